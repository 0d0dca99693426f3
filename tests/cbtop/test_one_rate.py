"""Tests of tokens/s of a recorded server. Every output has the same rate.

This rate equals the rate from the program's own clock and counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.commands.shared.ring_view import view_of
from cbtop.comparison.judged import Outcome
from cbtop.comparison.run_diff import diff_of
from cbtop.comparison.threshold_grammar import parse
from cbtop.comparison.thresholds import judge
from cbtop.daemon.source import Source
from cbtop.errors import UsageError
from cbtop.feeds.replay import ReplayFeed
from cbtop.feeds.run_file import read_runs, write_runs
from cbtop.feeds.run_reader import runs_in
from cbtop.reports.sources import sources_json
from cbtop.reports.summary import summary
from cbtop.telemetry.metrics import TOKENS
from cbtop.telemetry.snapshot import snapshot
from cbtop.tui.views.header import _tiles
from cbtop.viewmodels.sources import source_row
from tests.cbtop.made_server import STEPS_A_PROMPT, Served, record_server


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> list[Served]:
    at = tmp_path_factory.mktemp("served")
    return [record_server(at / f"{seed}.cbtop", at / str(seed), seed=seed) for seed in range(4)]


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    main([str(word) for word in arguments])
    return capsys.readouterr().out


def found_in(text: str, pattern: str) -> float:
    found = re.search(pattern.replace("NUMBER", r"([\d.,]+)"), text, re.MULTILINE)
    assert found, f"{pattern} in {text}"
    return float(found[1].replace(",", ""))


def line_text(line: Sequence[tuple[str, str]]) -> str:
    return "".join(text for text, _ in line)


def test_every_output_has_the_tokens_a_second_of_the_programs_clock(
    served: list[Served], capsys: pytest.CaptureFixture[str]
) -> None:
    new, *bases = served
    rate, in_steps = new.rate(), new.rate_in_steps()
    # The rate in steps (tokens per second of step time) is much higher than the rate by wall clock, so a mix-up would
    # be noticed.
    assert in_steps > 1.5 * rate
    three = [word for base in bases for word in ("--baseline", base.path)]
    thresholds = ("decode.tokens_per_sec>=1e6", "tokens_per_sec>=1e6", "decode.in_steps>=1e6")
    both = ("--format", "text", "--format", f"json={new.path}.json")
    alone = printed(capsys, "check", *thresholds, "--new", new.path, *both)
    in_json = Path(f"{new.path}.json").read_text(encoding="utf-8")
    gate = printed(capsys, "check", *three, "--new", new.path, "--format", "json")
    diff = printed(capsys, "diff", bases[0].path, new.path)
    rates = {one["phase"]: one for one in json.loads(in_json)["diff"]["rates"]}
    changed = json.loads(gate)["diff"]["rates"]
    report = printed(capsys, "replay", new.path, "--headless")
    source = json.loads(printed(capsys, "replay", new.path, "--headless", "--format", "json"))["sources"][0]
    with ReplayFeed(new.path) as feed:
        feed.seek(feed.duration_s)
        view = feed.view()
        rows = [source_row(record, window=False) for record in feed.store.sources.values()]
        (listed,) = json.loads(sources_json(rows))["sources"]
        (point,) = [one for one in snapshot(feed.store, 0)[TOKENS] if "decode" in one.labels]
    assert view is not None
    ring = Source(next(new.runtime.glob("*.ring")))
    ended = view_of(ring)
    ring.close()
    assert ended is not None
    assert ended.steps is not None
    rule = "decode: no fewer tokens/s beyond noise"
    (judged,) = [one["said"] for one in json.loads(gate)["verdicts"] if one["rule"] == rule]
    shown = {
        "check": found_in(alone, r"broken +decode.tokens_per_sec>=1e6 +decode +NUMBER tokens/s \("),
        "check without a phase": found_in(alone, r"broken +tokens_per_sec>=1e6 +decode +NUMBER tokens/s \("),
        "figures of the run": found_in(alone, r"^decode: NUMBER tokens/s"),
        "JSON of check": rates["decode"]["tokens_per_sec"][1],
        "default gate": found_in(judged, r"→ NUMBER tokens/s"),
        "diff": found_in(diff, r"^decode: [\d.,]+ → NUMBER tokens/s"),
        "JSON of diff": next(one for one in changed if one["phase"] == "decode")["tokens_per_sec"][1],
        "report": found_in(report, r"^\* decode: .* NUMBER tokens/s"),
        "JSON": source["steps"]["tokens_per_sec"],
        "screen": found_in(line_text(_tiles(view, 200)[1]), r"^ *NUMBER"),
        "ls": listed["tokens_per_sec"],
        "summary": found_in("\n".join(summary(view, "cbtop")), r"decode: NUMBER tokens/s"),
        "Prometheus": point.value / new.wall_s,
        "post-mortem": ended.steps.tokens_per_sec,
    }
    for where, value in shown.items():
        assert value == pytest.approx(rate, rel=5e-4), where
    assert found_in(diff, r"^decode: NUMBER → ") == pytest.approx(bases[0].rate(), rel=5e-4)
    shown = {
        "check": found_in(alone, r"broken +decode.in_steps>=1e6 +decode +NUMBER tokens/s without pauses \("),
        "figures of the run": found_in(alone, r"^decode: .* NUMBER tokens/s without pauses"),
        "JSON of check": rates["decode"]["tokens_per_sec_in_steps"][1],
        "report": found_in(report.partition("* decode")[2], r"NUMBER tok/s without pauses"),
        "JSON": source["steps"]["tokens_per_sec_in_steps"],
    }
    for where, value in shown.items():
        assert value == pytest.approx(in_steps, rel=5e-4), where


def test_a_limit_between_the_rate_and_that_in_steps_is_judged_by_the_first(served: list[Served]) -> None:
    new, *_ = served
    runs = runs_in(new.path)
    found = diff_of(runs, runs)
    between = (new.rate() * new.rate_in_steps()) ** 0.5
    for threshold, outcome in (
        (f"decode.tokens_per_sec>={between}", Outcome.BROKEN),
        (f"tokens_per_sec>={between}", Outcome.BROKEN),
        (f"decode.in_steps>={between}", Outcome.HOLDS),
        (f"decode.tokens_per_sec>={new.rate() / 2}", Outcome.HOLDS),
        (f"decode[batch=1].in_steps<={new.rate_in_steps()}", Outcome.HOLDS),
        (f"decode[batch=2].in_steps>={new.rate_in_steps()}", Outcome.HOLDS),
        (f"decode.samples_per_sec>={new.samples() * 2}", Outcome.BROKEN),
        (f"decode.samples_per_sec>={new.samples() / 2}", Outcome.HOLDS),
        (f"prefill.tokens_per_sec>={new.rate('prefill') / 2}", Outcome.HOLDS),
    ):
        (judged,) = judge(parse(threshold), found)
        assert judged.outcome is outcome, judged


def test_a_recording_that_began_late_has_the_rates_of_the_recorded_time(tmp_path: Path) -> None:
    late = record_server(tmp_path / "late.cbtop", tmp_path / "late", leave_out=40)
    (run,) = runs_in(late.path)
    (decode,) = [one for one in run.rates if one.phase == "decode"]
    assert decode.is_headline
    assert decode.steps == 50 * STEPS_A_PROMPT
    assert decode.per_sec("tokens_per_sec") == pytest.approx(late.rate(), rel=5e-4)
    assert decode.per_sec("in_steps") == pytest.approx(late.rate_in_steps(), rel=5e-4)


@pytest.mark.slow
def test_a_file_of_runs_keeps_the_rates_and_one_without_them_is_read(tmp_path: Path, served: list[Served]) -> None:
    runs = runs_in(served[0].path)
    write_runs(tmp_path / "runs.json", runs)
    assert [run.rates for run in read_runs(tmp_path / "runs.json")] == [run.rates for run in runs]
    document = json.loads((tmp_path / "runs.json").read_text())
    del document["runs"][0]["rates"]
    (tmp_path / "older.json").write_text(json.dumps(document))
    assert read_runs(tmp_path / "older.json")[0].rates == ()
    document["runs"][0]["rates"] = [{"phase": "decode", "steps": 1, "times_us": {"in_steps": [0.0] * 10}}]
    document["runs"][0]["rates"][0]["times_us"]["in_steps"][2] = 5
    document["runs"][0]["rates"][0]["times_us"]["in_steps"][7] = 1
    (tmp_path / "wrong.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match="times_us: no token, step or sample takes no time"):
        read_runs(tmp_path / "wrong.json")
