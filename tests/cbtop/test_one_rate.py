"""tokens/s of a recorded server is one number in every output: that of the program's own clock and counts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.commands.shared.ring_view import view_of
from cbtop.daemon.source import Source
from cbtop.feeds.replay import ReplayFeed
from cbtop.reports.summary import summary
from cbtop.telemetry.metrics import TOKENS
from cbtop.telemetry.snapshot import snapshot
from tests.cbtop.made_server import Served, record_server


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> list[Served]:
    at = tmp_path_factory.mktemp("served")
    return [record_server(at / f"{seed}.cbtop", at / str(seed), seed=seed) for seed in range(4)]


def printed(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    capsys.readouterr()
    assert main([str(word) for word in arguments]) == code
    return capsys.readouterr().out


def found_in(text: str, pattern: str) -> float:
    found = re.search(pattern.replace("NUMBER", r"([\d.,]+)"), text, re.MULTILINE)
    assert found, f"{pattern} in {text}"
    return float(found[1].replace(",", ""))


def test_every_output_of_a_recording_has_the_tokens_a_second_of_the_programs_clock(
    served: list[Served], capsys: pytest.CaptureFixture[str]
) -> None:
    new, *bases = served
    rate, in_steps = new.rate(), new.rate_in_steps()
    assert in_steps > 1.5 * rate  # so that no output can have one for the other
    three = [word for base in bases for word in ("--baseline", base.path)]
    thresholds = ("decode.tokens_per_sec>=1e6", "tokens_per_sec>=1e6", "decode.in_steps>=1e6")
    both = ("--format", "text", "--format", f"json={new.path}.json")
    alone = printed(capsys, "check", *thresholds, "--new", new.path, *both, code=4)
    in_json = Path(f"{new.path}.json").read_text(encoding="utf-8")
    gate = printed(capsys, "check", *three, "--new", new.path, "--format", "json", code=5)
    diff = printed(capsys, "diff", bases[0].path, new.path)
    rates = {one["phase"]: one for one in json.loads(in_json)["diff"]["rates"]}
    changed = json.loads(printed(capsys, "diff", bases[0].path, new.path, "--format", "json"))["rates"]
    report = printed(capsys, "replay", new.path, "--headless")
    source = json.loads(printed(capsys, "replay", new.path, "--headless", "--format", "json"))["sources"][0]
    with ReplayFeed(new.path) as feed:
        feed.seek(feed.duration_s)
        view = feed.view()
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
        "summary": found_in("\n".join(summary(view, "cbtop")), r"decode: NUMBER tokens/s"),
        "Prometheus": point.value / new.wall_s,
        "post-mortem": ended.steps.tokens_per_sec,
    }
    for where, value in shown.items():
        assert value == pytest.approx(rate, rel=5e-4), where
    assert found_in(diff, r"^decode: NUMBER → ") == pytest.approx(bases[0].rate(), rel=5e-4)
    shown = {
        "check": found_in(alone, r"broken +decode.in_steps>=1e6 +decode +NUMBER tokens/s in steps \("),
        "figures of the run": found_in(alone, r"^decode: .* NUMBER tokens/s in steps"),
        "JSON of check": rates["decode"]["tokens_per_sec_in_steps"][1],
        "report": found_in(report.partition("* decode")[2], r"NUMBER tok/s in steps"),
        "JSON": source["steps"]["tokens_per_sec_in_steps"],
    }
    for where, value in shown.items():
        assert value == pytest.approx(in_steps, rel=5e-4), where
