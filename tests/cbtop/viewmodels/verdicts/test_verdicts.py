"""Tests of all verdicts: each simulated problem causes exactly its own verdict, and healthy processes cause none."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import asdict, replace
from math import log2
from pathlib import Path
from random import Random

import pytest

from cbtop.commands.shared.show import require_passed_checks
from cbtop.errors import FailedCheckError
from cbtop.protocol.messages import CheckResult
from cbtop.protocol.vocabulary import BY_KERNELS, CALL, IDLE_BEFORE, WARM_UP
from cbtop.reports import REPORTS
from cbtop.tui.views.books import books_rule
from cbtop.units import number
from cbtop.viewmodels.durations import DurationBar
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.merged import MergedView
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import Severity
from cbtop.viewmodels.verdicts import VERDICTS, judged
from cbtop.viewmodels.verdicts.base import Rule
from cbtop.viewmodels.verdicts.bimodal_latency import BIMODAL_LATENCY
from cbtop.viewmodels.verdicts.data_incomplete import DATA_INCOMPLETE
from cbtop.viewmodels.verdicts.idle_between_steps import IDLE_BETWEEN_STEPS
from tests.cbtop import samples
from tests.cbtop.viewmodels.verdicts.cases import ALMOST, CAUSES, HEALTHY, RECORDED, WAITS
from tests.cbtop.viewmodels.verdicts.streams import Decoding, run
from tests.representatives import first_by_default

PAGE = Path(__file__).parents[4] / "docs" / "verdicts.md"
PAGE_OF_TRAINING = PAGE.with_name("verdicts-training.md")
OF_TRAINING = (
    "gradient-not-finite",
    "waits-for-rank",
    "loss-scale-falling",
    "allocator-retries",
    "input-bound",
    "communication-exposed",
    "optimizer-bound",
    "recompute",
    "memory-near-limit",
)
PAGE_OF_ENGINES = PAGE.with_name("verdicts-engines.md")
OF_ENGINES = ("cache-too-small", "batch-of-one", "queue-at-limit")
QUIET = {f"almost {name}": made for name, made in ALMOST.items()} | HEALTHY
STREAMS = CAUSES | QUIET | {name: made for name, (made, _) in RECORDED.items()}
IDS = [rule.id for rule in VERDICTS]


class Views(dict[str, SourceView]):
    """Views of simulated processes, by name. A view is created when it is first used.

    So each pytest worker creates few views.
    """

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        super().__init__()
        self._folders = folders

    def __missing__(self, name: str) -> SourceView:
        self[name] = STREAMS[name](self._folders.mktemp("stream"))
        return self[name]


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> Views:
    return Views(tmp_path_factory)


def test_every_verdict_has_a_stream_that_provokes_it() -> None:
    assert list(CAUSES) == IDS
    assert len(set(IDS)) == len(IDS)


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_provokes_its_verdict_and_no_other(views: dict[str, SourceView], cause: str) -> None:
    assert [verdict.id for verdict in views[cause].verdicts] == [cause]


# Simulated processes that are tested only by `make soak`, because the default run tests similar processes.
ALIKE = {
    "noisy", "two phases", "layers of two kinds", "steps of two lengths, little apart", "steps of two sizes in turn",
    "a cache that fills, and much else that moves", "a short life", "as the baseline, noisy",
    "another batch than the baseline's", "three ranks", "noisy, in a window", "layers of all kinds",
    "two phases, one as long as the other", "a batch that shrinks", "steps of many sizes", "a short, noisy life",
    "the same, and the GPU is busy", "faster than the baseline", "a longer cache than the baseline's",
    "another mix of phases than the baseline's", "training, in a window", "training with a gradient scaler",
    "three replicas, one of them slow", "paused in one place since the baseline", "a warm-up that waits for data",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in QUIET]
)
def test_a_healthy_stream_provokes_none_nor_does_too_small_a_cause(views: dict[str, SourceView], name: str) -> None:
    assert [verdict.sentence for verdict in views[name].verdicts] == []


@pytest.mark.parametrize("name", RECORDED)
def test_of_a_recorded_run_only_what_was_wrong_is_said(views: dict[str, SourceView], name: str) -> None:
    assert [verdict.id for verdict in views[name].verdicts] == RECORDED[name][1]


def test_a_layer_far_ahead_of_another_odd_one_is_found(tmp_path: Path) -> None:
    (verdict,) = run(tmp_path, Decoding(layer_factor={0: 1.6, 5: 5.0})).one().verdicts
    assert (verdict.id, verdict.about.name) == ("odd-layer", "Layer 5")


@pytest.mark.parametrize(
    ("brick", "advice"),
    [
        ("AttentionScore", "Use a smaller cache (grouped heads"),
        ("DownProjection", "The bricks that grow are not attention"),
    ],
)
def test_the_brick_that_grows_with_the_cache_is_named(tmp_path: Path, brick: str, advice: str) -> None:
    grows = Decoding(cached=lambda step: 100 + step, brick_factor={brick: lambda step: 1 + step / 150}, seconds=15)
    (verdict,) = run(tmp_path, grows).one().verdicts
    assert verdict.id == "grows-with-cache"
    assert verdict.sentence.endswith(f"; most of the growth is in {brick}")
    assert verdict.advice.startswith(advice)


def test_a_process_that_waits_for_a_processor_is_not_judged_by_its_latency(tmp_path: Path) -> None:
    assert [verdict.id for verdict in WAITS(tmp_path).verdicts] == ["starved"]


def test_a_clock_that_falls_is_not_the_cache(tmp_path: Path) -> None:
    falls = Decoding(cached=lambda step: 100 + step, step_factor=lambda step: 1 + step / 1_000, seconds=15)
    assert [verdict.id for verdict in run(tmp_path, falls).one().verdicts] == ["slows-down"]


@first_by_default(
    ("measured", "expected", "gap"),
    [
        (BY_KERNELS + IDLE_BEFORE, ["launch-bound"], "GPU waited"),
        (BY_KERNELS, [], "GPU waited, or ran what came before"),
        ("torch", [], None),
    ],
    2,
)
def test_a_gpu_is_said_to_wait_only_if_it_was_idle_as_steps_began(
    tmp_path: Path, measured: str, expected: list[str], gap: str | None
) -> None:
    view = run(tmp_path, Decoding(rest_us=12_000, gap_us=0, measured=measured)).one()
    assert [verdict.id for verdict in view.verdicts] == expected
    text = REPORTS["text"]([view], ["bricks"])
    assert ("not instrumented" in text) == (gap is None)
    assert gap is None or f" + {gap} " in text


def test_a_pause_before_a_process_was_found_is_no_warm_up(tmp_path: Path) -> None:
    paused = Decoding(attach_s=20, seconds=32, step_factor=lambda step: 400.0 if step == 300 else 1.0)
    assert [verdict.id for verdict in run(tmp_path, paused).one().verdicts] == ["outlier-mean"]


@pytest.mark.parametrize("cause", CAUSES)
def test_text_and_json_say_the_same(views: dict[str, SourceView], cause: str) -> None:
    (verdict,) = views[cause].verdicts
    text = REPORTS["text"]([views[cause]], [])
    (source,) = json.loads(REPORTS["json"]([views[cause]], []))["sources"]
    (said,) = source["verdicts"]
    assert f"{said['severity']} {said['id']}: {said['sentence']}\n" in text
    assert said["advice"] in text
    assert said["evidence"] == [asdict(one) for one in verdict.evidence]
    assert (said["gain_tokens_per_sec"] is not None) == ("tokens/s if" in text)
    if said["gain_tokens_per_sec"] is not None:
        assert f"+{number(said['gain_tokens_per_sec'])} tokens/s if {said['gain_if']} (derived)" in text


def test_a_check_that_met_a_nan_says_so_everywhere(tmp_path: Path) -> None:
    failed = CheckResult("LmHead", "equals reference", False, None, 1e-5, "NaN")
    view = run(tmp_path, Decoding(checks=(failed,))).one()
    (verdict,) = view.verdicts
    assert verdict.sentence == "LmHead fails its check `equals reference` (met NaN)"
    assert "check FAILED: LmHead equals reference, met NaN\n" in REPORTS["text"]([view], []) + "\n"
    (source,) = json.loads(REPORTS["json"]([view], []))["sources"]
    assert [(check["max_error"], check["not_finite"]) for check in source["checks"]] == [(None, "NaN")]


@pytest.mark.slow
def test_of_failed_checks_the_one_that_bears_the_others_is_named_first(tmp_path: Path) -> None:
    """DownProjection returns a NaN.

    `--check-contracts` finds it right after the brick, and the guard finds it later.
    """
    of_norm, of_down = ("precondition finite(x)", "postcondition finite(out)"), ("postcondition finite(out)",)
    named = [*(("RmsNorm", name) for name in of_norm), *(("DownProjection", name) for name in of_down)]
    held = [CheckResult(*check, True, None, None) for check in named]
    failed = [CheckResult(*named[at], False, None, None) for at in (2, 0, 1)]
    met = CheckResult("DownProjection", "guard", False, None, None, "NaN", note="NaN in layer 1, position 0")
    once = CheckResult("LmHead", "logits", False, None, None, "NaN", note="NaN in position 0")
    for place, (checks, wanted) in enumerate(
        (
            (failed, "DownProjection fails its check `postcondition finite(out)`; 2 more of 3 failed"),
            ([*failed, met], f"DownProjection fails its check `guard` (met NaN) ({met.note}); 3 more of 4 failed"),
            ([*failed, once], "DownProjection fails its check `postcondition finite(out)`; 3 more of 4 failed"),
            ([once], "a step fails its check `logits` (met NaN) (NaN in position 0)"),
            (failed[1:2], "the input of RmsNorm fails its check `precondition finite(x)`"),
        )
    ):
        (tmp_path / str(place)).mkdir()
        view = run(tmp_path / str(place), Decoding(checks=(*held, *checks))).one()
        (verdict,) = view.verdicts
        assert verdict.sentence == wanted
        assert ("Fix the kernel" in verdict.advice) == (checks not in (failed[1:2], [once]))
        first = view.failed_checks[0]
        lines = [line for line in REPORTS["text"]([view], []).splitlines() if line.startswith("check FAILED")]
        assert lines[0].startswith(f"check FAILED: {first.brick} {first.assertion}, ")
        with pytest.raises(FailedCheckError, match=re.escape(f"fails its check `{first.assertion}`")):
            require_passed_checks([view])


def test_a_failed_check_says_where_and_how_often_and_a_skipped_is_neither(
    tmp_path: Path,
) -> None:
    note = "overflow in layer 1, position 4; met 2 times"
    failed = CheckResult("LmHead", "guard", False, 0.25, 1e-5, note=note)
    skipped = CheckResult("Sampling", "guard", True, None, None, skipped="no sample")
    view = run(tmp_path, Decoding(checks=(failed, skipped))).one()
    (verdict,) = view.verdicts
    assert verdict.sentence == f"LmHead fails its check `guard` (error 2.5e-01, tolerance 1.0e-05) ({note})"
    text = REPORTS["text"]([view], [])
    assert f"({note})\n" in text
    assert "checks skipped: 1 (no sample)" in text
    (source,) = json.loads(REPORTS["json"]([view], []))["sources"]
    said = [(check["passed"], check["skipped"], check["note"]) for check in source["checks"]]
    assert said == [(False, None, note), (None, "no sample", None)]


def test_who_does_not_want_to_read_one_silences_it(tmp_path: Path) -> None:
    made = run(tmp_path, Decoding(between_us=20_000, layer_factor={5: 2.0}))
    assert [verdict.id for verdict in made.one().verdicts] == ["idle-between-steps", "odd-layer"]
    made.silenced = ("idle-between-steps",)
    assert [verdict.id for verdict in made.one().verdicts] == ["odd-layer"]


def test_time_in_no_brick_is_not_instrumented_and_nothing_is_gained(tmp_path: Path) -> None:
    view = run(tmp_path, Decoding(gap_us=4_000)).one()
    assert view.verdicts == ()
    text = REPORTS["text"]([view], ["bricks"])
    (line,) = [line for line in text.splitlines() if line.startswith("not instrumented: ")]
    assert re.fullmatch(
        r"not instrumented: \S+ % of the step time \(inside layers .*\): no brick covers it: .*", line
    )
    (source,) = json.loads(REPORTS["json"]([view], ["bricks"]))["sources"]
    assert source["not_instrumented"]["percent"] > 25
    compiled = REPORTS["text"]([replace(view, has_compiled=True)], ["bricks"])
    assert "): torch.compile compiled code of this process\n" in compiled


@pytest.mark.parametrize("count", [200, 1_000])
def test_chance_makes_no_two_kinds_of_steps(count: int) -> None:
    """The durations have one broad mode with noise. At most one in a hundred histograms may look bimodal."""
    found = 0
    for seed in range(100):
        random = Random(seed)
        us = [10_000 + random.expovariate(1 / 20_000) for _ in range(count)]
        steps = replace(samples.DECODE, count=count, tokens=count, durations=_bars(us))
        found += BIMODAL_LATENCY.find(replace(samples.LIVE, steps=steps)) is not None
    assert found <= 1


def _bars(us: list[float]) -> tuple[DurationBar, ...]:
    """Return a histogram with sixteen bars per octave."""
    places = Counter(int(16 * log2(each)) for each in us)
    return tuple(
        DurationBar(2 ** (at / 16), 2 ** ((at + 1) / 16), places[at]) for at in range(min(places), max(places) + 1)
    )


def test_a_gain_is_what_the_same_process_reaches_without_the_cause(views: dict[str, SourceView]) -> None:
    healthy = views["as usual"].steps
    assert healthy is not None
    for cause in ("straggler", "idle-between-steps", "host-bound", "odd-layer", "bimodal-latency", "outlier-mean"):
        (verdict,) = views[cause].verdicts
        steps = views[cause].steps
        assert steps is not None
        assert steps.tokens_per_sec is not None
        assert verdict.gain_tokens_per_sec is not None
        assert steps.tokens_per_sec + verdict.gain_tokens_per_sec == pytest.approx(healthy.tokens_per_sec, rel=0.015)


def test_records_lost_since_somebody_looked_are_a_share_of_those_since_then(tmp_path: Path) -> None:
    """Only records since the viewer joined count for the share of lost records.

    Nothing is known about the time before.
    """
    view = run(tmp_path, Decoding(ring_bytes=1 << 14)).one()
    before = 10**7
    loss = replace(
        view.loss,
        produced=view.loss.produced + before,
        dropped=view.loss.dropped + before,
        before_attach=view.loss.before_attach + before,
    )
    verdict = DATA_INCOMPLETE.judge(replace(view, loss=loss))
    assert verdict == DATA_INCOMPLETE.judge(view)
    assert verdict is not None


def test_a_gpu_that_still_runs_a_step_is_not_idle_between_steps(views: dict[str, SourceView]) -> None:
    idle = views["idle-between-steps"]
    assert idle.steps is not None
    assert idle.steps.p50_us is not None
    assert idle.time_range is not None
    assert idle.time_range.between_us is not None
    assert idle.books is not None
    between_us = idle.time_range.between_us / idle.steps.count
    for part, is_idle in ((0.9, False), (0.2, True)):  # Kernels take this share of the time between steps.
        kernels_us = (idle.steps.p50_us + part * between_us) * idle.steps.recorded
        books = replace(idle.books, bricks_us=kernels_us)
        verdict = IDLE_BETWEEN_STEPS.judge(replace(idle, books=books, backend=f"torch on cuda; {BY_KERNELS}"))
        assert (verdict is not None) == is_idle
        assert verdict is None or "in which the GPU ended them (derived)" in verdict.sentence
        # This process runs on a CPU, where bricks are not measured by kernels. So all time between steps counts as
        # idle.
        assert IDLE_BETWEEN_STEPS.judge(replace(idle, books=books)) is not None


def test_what_steps_would_gain_that_do_not_follow_each_other_is_not_known(views: dict[str, SourceView]) -> None:
    idle = views["idle-between-steps"]
    assert idle.steps is not None
    assert idle.time_range is not None
    at_once = replace(idle, steps=replace(idle.steps, at_once=2.0))
    phases = replace(idle, time_range=replace(idle.time_range, by_phase=idle.time_range.by_phase * 2))
    merged = replace(idle, merged=MergedView(MergeMode.SUM, ("rank 0", "rank 1"), ("0", "1"), left_out=0))
    for view in (at_once, phases, merged):
        verdict = IDLE_BETWEEN_STEPS.judge(view)
        assert verdict is not None
        assert verdict.gain_tokens_per_sec is None


def test_the_page_about_them_says_what_the_code_does(views: dict[str, SourceView]) -> None:
    general, training, engines = ([head.rstrip()] for head in (_HEAD, _HEAD_OF_TRAINING, _HEAD_OF_ENGINES))
    general += _sections(views, [rule for rule in VERDICTS if rule.id not in OF_TRAINING + OF_ENGINES])
    general += ["", "## What the tests show", "", _MATRIX_IS, "", _matrix(), "", *_LEFT_OUT]
    training += _sections(views, [rule for rule in VERDICTS if rule.id in OF_TRAINING])
    engines += _sections(views, [rule for rule in VERDICTS if rule.id in OF_ENGINES])
    for page, lines in ((PAGE, general), (PAGE_OF_TRAINING, training), (PAGE_OF_ENGINES, engines)):
        text = "\n".join(lines) + "\n"
        if os.environ.get("CBTOP_UPDATE_GOLDENS") == "1":
            page.write_text(text, encoding="utf-8")
        assert text == page.read_text(encoding="utf-8")


def _sections(views: dict[str, SourceView], rules: list[Rule]) -> list[str]:
    lines = []
    for severity, heading in _HEADINGS.items():
        for rule in rules:
            if rule.severity is severity:
                (example,) = views[rule.id].verdicts
                gain = example.gain_tokens_per_sec
                lines += [] if f"## {heading}" in lines else ["", f"## {heading}"]
                lines += ["", f"### {rule.id}", "", rule.means, "", f"> {example.sentence}"]
                if gain is not None:
                    lines.append(f"> (+{gain:.1f} tokens/s if {example.gain_if})")
                lines += ["", f"- Fires: {rule.fires}", f"- To do: {rule.advice}"]
    return lines


def _matrix() -> str:
    """Return a Markdown table: the verdicts of each recording, and the number of processes without a verdict."""
    rows = ["| recording | verdicts |", "|---|---|"]
    rows += [f"| {name} | {', '.join(said)} |" for name, (_, said) in RECORDED.items() if said]
    quiet = len(HEALTHY) + len([name for name, (_, said) in RECORDED.items() if not said])
    healthy = f"{quiet} streams of healthy processes have no verdict (`cases.py`)."
    almost = f"Nor have {len(ALMOST)} streams whose cause is too small for a verdict."
    return "\n".join([*rows, "", f"{healthy} {almost}"])


_HEADINGS = {
    Severity.ERROR: "Errors: figures cannot be trusted",
    Severity.WARNING: "Warnings: time is lost",
    Severity.NOTE: "Notes: limits, and the meaning of figures",
}
_HEAD = """\
# Verdicts

A verdict is one sentence, with numbers and advice, about what is wrong with a process or limits it. It covers the
time shown: the last seconds, or everything seen. `--silence ID` leaves one out.

If it can be derived, a verdict has the tokens/s that a fix would gain (Amdahl's law). That needs steps in turn, in
one process, parts that add up, and no long step that began before the seconds shown. A gain inside steps also needs
recorded steps whose time is within 10 % of that of all steps.

Tests write it from `cbtop/viewmodels/verdicts`. [Training](verdicts-training.md) and [engines](verdicts-engines.md)
have others.
"""
_HEAD_OF_TRAINING = """\
# Verdicts of training

These [verdicts](verdicts.md) are about [training steps](training.md). [launch-bound](verdicts.md#launch-bound) and
others of that page may be about them, too. Tests write this page from `cbtop/viewmodels/verdicts`.
"""
_HEAD_OF_ENGINES = """\
# Verdicts of engines

These [verdicts](verdicts.md) are about the queue of an [engine](engines.md) that serves requests. A schedule is the
choice of the requests and tokens of one step. Tests write this page from `cbtop/viewmodels/verdicts`.
"""
_MATRIX_IS = """\
Each verdict has a stream of made records with only its cause, and no other verdict. Recordings of real runs have:"""
_LEFT_OUT = """\
## What is not judged

- Compilers other than Dynamo (TensorRT) do not report when they compile: that is outlier-mean.""".splitlines()


def test_the_speed_of_a_warm_up_is_not_judged(views: dict[str, SourceView]) -> None:
    view = views["bimodal-latency"]
    assert view.phase is not None
    assert judged(view).verdicts
    assert not judged(replace(view, phase=view.phase + WARM_UP)).verdicts


def test_times_of_calls_of_different_functions_are_not_compared(views: dict[str, SourceView]) -> None:
    view = views["bimodal-latency"]
    assert view.steps is not None
    assert BIMODAL_LATENCY.find(view) is not None
    assert BIMODAL_LATENCY.find(replace(view, steps=replace(view.steps, phase=CALL))) is None


def test_the_screen_says_how_much_time_is_not_instrumented(tmp_path: Path) -> None:
    view = run(tmp_path, Decoding(rest_us=12_000, gap_us=0)).one()
    rule = "".join(text for text, _ in books_rule(view, "where a step's time goes", 100))
    assert "not instrumented: 33.5 % of the step time" in rule
