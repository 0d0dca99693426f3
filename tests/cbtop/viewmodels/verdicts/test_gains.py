"""Tests of the gain that a verdict states.

The gain is the difference to a run without the problem, and never more.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbtop.client.store import Store
from cbtop.units import duration
from cbtop.viewmodels.source import SourceView, source_view
from cbtop.viewmodels.verdicts import VERDICTS
from cbtop.viewmodels.verdicts.bimodal_latency import BIMODAL_LATENCY
from cbtop.viewmodels.verdicts.outlier_mean import OUTLIER_MEAN
from tests.cbtop.test_steps_in_the_window import MS, SECOND, Host, Span, Viewer, a_host, covered_ns
from tests.cbtop.viewmodels.verdicts.cases import beside_a_gpu
from tests.cbtop.viewmodels.verdicts.streams import Decoding, run
from tests.representatives import first_by_default

DECODE, STEP_NS, SAID_NS = 2, 20 * MS, SECOND // 2

# Problems inside steps. Only recorded steps show such problems.
INSIDE = {
    "host-bound": Decoding(gap_us=2_000),
    "odd-layer": Decoding(layer_factor={5: 1.5}),
    "over-budget": Decoding(budget_us=300),
}


def _decoding(host: Host, until_ns: int, long: tuple[int, int]) -> SourceView:
    """Return the view of the last ten seconds of a process.

    Its steps take 20 ms. One more step, `long`, has the given begin and end.
    """
    viewer = Viewer(host, Store(10.0))
    viewer.hears(host.said(0, whole=True))
    ran, at_ns = [], 0
    while at_ns < until_ns:
        end_ns = long[1] if at_ns <= long[0] < at_ns + STEP_NS else at_ns + STEP_NS
        ran.append((DECODE, at_ns, end_ns))
        at_ns = end_ns
    for before_ns, now_ns in pairwise(range(0, until_ns + 1, SAID_NS)):
        host.ran(*(span for span in ran if before_ns < span[2] <= now_ns))
        viewer.hears([*host.said(now_ns), host.heartbeat(now_ns)])
    (record,) = viewer.store.sources.values()
    return source_view(record, "decode", window=True)


@settings(max_examples=settings.default.max_examples // 2)
@given(st.integers(0, 700), st.integers(50, 400), st.integers(1100, 1500))
def test_a_long_step_from_before_the_window_gains_only_its_part_inside_it(begin: int, steps: int, until: int) -> None:
    with a_host() as host:
        long = begin * STEP_NS, (begin + steps) * STEP_NS
        view = _decoding(host, until * STEP_NS // SAID_NS * SAID_NS, long)
        verdict = OUTLIER_MEAN.judge(view)
        assert view.steps is not None
        assert view.time_range is not None
        rate, found = view.steps.tokens_per_sec, verdict and verdict.gain_tokens_per_sec
        if rate is None or found is None:
            return
        end_ns = until * STEP_NS // SAID_NS * SAID_NS
        in_it: list[Span] = [(DECODE, *long)]
        part_ns = covered_ns(in_it, end_ns - round(view.time_range.wall_us * 1e3), end_ns)
        saved = (part_ns - STEP_NS) / 1e3 / view.time_range.wall_us
        assert found == pytest.approx(rate * (1 / (1 - saved) - 1), rel=0.05)
        assert rate + found <= 1.01 * 1e9 / STEP_NS


@pytest.mark.parametrize("seconds", [1.5, 2.0, 3.3, 4.3, 5.0, 6.7, 8.0, 8.6])
def test_the_gain_of_a_long_step_in_the_window_is_what_the_median_allows(seconds: float) -> None:
    with a_host() as host:
        view = _decoding(host, 16 * SECOND, (7 * SECOND, 7 * SECOND + round(seconds * SECOND)))
        verdict = OUTLIER_MEAN.judge(view)
        assert view.steps is not None
        assert view.steps.tokens_per_sec is not None
        assert verdict is not None
        assert verdict.gain_tokens_per_sec is not None
        assert 0.95 * 50 <= view.steps.tokens_per_sec + verdict.gain_tokens_per_sec <= 50


@first_by_default("id", INSIDE)
def test_recorded_steps_unlike_the_rest_give_no_gain_and_the_verdict_says_so(tmp_path: Path, id: str) -> None:
    """Only every tenth step is recorded, and these steps take `factor` times as long as the others."""
    (rule,) = [rule for rule in VERDICTS if rule.id == id]
    for name, plan, factor in (("like", INSIDE[id], 1.05), ("unlike", INSIDE[id], 3.0), ("unlike", INSIDE[id], 0.5)):
        directory = tmp_path / f"{name}-{factor}"
        directory.mkdir()
        sampled = replace(plan, sample_every=10, step_factor=partial(_each_tenth, factor))
        view = beside_a_gpu(sampled, busy_percent=10)(directory)
        verdict = rule.judge(view)
        assert verdict is not None
        assert view.steps is not None
        assert view.steps.recorded_mean_us is not None
        said = (
            f"; this covers the {view.steps.recorded} recorded steps, which took "
            f"{duration(view.steps.recorded_mean_us)} on average, not all {view.steps.count}, "
            f"which took {duration(view.steps.mean_us)}"
        )
        assert verdict.sentence.endswith(said) == (name == "unlike")
        assert (verdict.gain_tokens_per_sec is None) == (name == "unlike")


def _each_tenth(factor: float, step: int) -> float:
    return factor if step % 10 == 0 else 1.0


@first_by_default(
    "factors",
    [
        (1.0, 2.0),
        pytest.param((1.0, 1.5, 3.0), marks=pytest.mark.slow),
        pytest.param((1.0, 2.0, 4.0), marks=pytest.mark.slow),
        (1.0, 1.4, 2.0, 4.0),
    ],
)
def test_all_kinds_of_steps_are_named_and_what_the_slow_ones_cost_is_gained(
    tmp_path: Path, factors: tuple[float, ...]
) -> None:
    (tmp_path / "fast").mkdir()
    (tmp_path / "slow").mkdir()
    # maps the begin of a range within 0 to 99 to the factor on the steps in this range
    kinds = dict(zip((0, 40, 60, 80), factors, strict=False))
    plan = Decoding(seconds=40, step_factor=lambda step: kinds[max(at for at in kinds if at <= step * 7_919 % 100)])
    fast, view = run(tmp_path / "fast", Decoding(seconds=40)).one(), run(tmp_path / "slow", plan).one()
    verdict = BIMODAL_LATENCY.judge(view)
    assert verdict is not None
    assert {2: "bimodal", 3: "trimodal", 4: "multimodal"}[len(factors)] in verdict.sentence
    shares = [float(said) for said in re.findall(r"([0-9.]+) %", verdict.sentence)]
    assert shares == pytest.approx([after - at for at, after in pairwise((*kinds, 100))], abs=0.5)
    modes = [one.value for one in verdict.evidence if one.unit == "µs"]
    assert [mode / modes[0] for mode in modes] == pytest.approx(factors, rel=0.06)
    assert view.steps is not None
    assert fast.steps is not None
    assert verdict.gain_tokens_per_sec is not None
    reached = (view.steps.tokens_per_sec or 0) + verdict.gain_tokens_per_sec
    assert reached == pytest.approx(fast.steps.tokens_per_sec, rel=0.02)
