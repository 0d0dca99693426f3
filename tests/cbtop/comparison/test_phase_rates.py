"""Tests of the rate of a phase (tokens or steps per second) and of its error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cbtop.comparison.noise import Figure
from cbtop.comparison.phase_rates import (
    IN_STEPS,
    SAMPLES,
    STEPS,
    TOKENS,
    PhaseRates,
    ShownRates,
    phase_rates,
    rates_together,
)
from cbtop.comparison.rate_blocks import RateBlocks
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from tests.cbtop.comparison.test_rate_blocks import DECODE, PREFILL, ended

TABLE = NodeTable()
for number, name in ((DECODE, "decode"), (PREFILL, "prefill")):
    TABLE.add(Node(number, None, NodeKind.STEP, name))
MS = 1_000_000


def rates_of(rows: list[tuple[int, int, int]], **others: list[int]) -> dict[str, PhaseRates]:
    blocks = RateBlocks()
    blocks.take(ended(rows, **others), set())
    return {one.phase: one for one in phase_rates(blocks, TABLE, {}, is_shown_whole=False)}


def steps(*lengths_ms: float, node: int = DECODE, pause_ms: float = 0) -> list[tuple[int, int, int]]:
    """Return (node, begin, end) in ns of consecutive steps with these lengths.

    Before each step is a pause of `pause_ms`.
    """
    at, rows = 0, []
    for length_ms in lengths_ms:
        begin = at + round(pause_ms * MS)
        at = begin + round(length_ms * MS)
        rows.append((node, begin, at))
    return rows


def error_of(rates: PhaseRates, rate: str = TOKENS) -> float:
    figure = rates.times_us[rate]
    return figure.error / figure.mean


def test_a_rate_is_of_the_wall_clock_and_the_one_in_steps_of_theirs() -> None:
    (found,) = rates_of(steps(*[3.0] * 40, pause_ms=1)).values()
    wall_s = (40 * 4 - 1) / 1e3
    for rate, value in ((TOKENS, 80 / wall_s), (STEPS, 40 / wall_s), (SAMPLES, 120 / wall_s), (IN_STEPS, 80 / 0.12)):
        assert found.per_sec(rate) == pytest.approx(value)
    assert (found.steps, found.cached, found.main) == (40, 7, TOKENS)


def test_a_screens_number_is_taken_if_it_shows_exactly_these_steps() -> None:
    blocks = RateBlocks()
    blocks.take(ended(steps(*[3.0] * 40)), set())
    shown = {"decode": ShownRates({TOKENS: 50.0, STEPS: 25.0, SAMPLES: None, IN_STEPS: 80.0}, is_headline=True)}
    (found,) = phase_rates(blocks, TABLE, shown, is_shown_whole=True)
    assert [found.per_sec(rate) for rate in (TOKENS, STEPS, IN_STEPS)] == pytest.approx([50, 25, 80])
    assert (SAMPLES in found.times_us, found.is_headline) == (False, True)
    (own,) = phase_rates(blocks, TABLE, shown, is_shown_whole=False)
    assert own.per_sec(TOKENS) == pytest.approx(80 / 0.12)
    assert error_of(own) == pytest.approx(error_of(found))


def test_rates_of_too_few_blocks_are_unknown() -> None:
    for many, is_known in ((19, False), (20, True)):
        (found,) = rates_of(steps(*[3.0] * many)).values()
        assert bool(found.times_us) is is_known
        assert found.steps == many


def test_rates_of_tokens_and_samples_need_every_step_to_report_them() -> None:
    rows = steps(*[3.0] * 40)
    (found,) = rates_of(rows, tokens=[2] * 39 + [0], sequences=[3] * 39 + [-1]).values()
    assert (found.main, set(found.times_us)) == (STEPS, {STEPS})


def test_a_phase_that_ran_before_all_others_has_the_error_of_its_own_time() -> None:
    noise = np.random.default_rng(1).normal(1, 0.05, 400)
    first = steps(*(3 * noise[:100]), node=PREFILL)
    later = [(DECODE, begin + first[-1][2], end + first[-1][2]) for _, begin, end in steps(*noise[100:])]
    found = rates_of([*first, *later])
    assert found["decode"].per_sec(TOKENS) == pytest.approx(600 / (later[-1][2] / 1e9))
    assert error_of(found["decode"]) < 0.01
    assert error_of(found["prefill"]) < 0.02


def test_slow_first_steps_are_in_a_rate_and_not_in_its_error() -> None:
    noise = np.random.default_rng(1).normal(1, 0.05, 200)
    (even,) = rates_of(steps(1.0, *noise)).values()
    for first_ms in (20.0, 400.0):
        (slow,) = rates_of(steps(first_ms, *noise)).values()
        assert slow.per_sec(TOKENS) == pytest.approx((even.per_sec(TOKENS) or 0) * 201 / (200 + first_ms), rel=0.02)
        assert error_of(slow) == pytest.approx(error_of(even), rel=0.5)


def test_of_five_blocks_none_is_left_out() -> None:
    (found,) = rates_of(steps(400.0, *[1.0 + at % 3 / 100 for at in range(19)])).values()
    assert set(found.times_us) == {TOKENS, STEPS, SAMPLES, IN_STEPS}


@pytest.mark.parametrize(("first_ms", "is_left_out"), [(1.35, False), (1.45, True)])
def test_a_first_block_is_slow_from_four_usual_deviations_on(first_ms: float, is_left_out: bool) -> None:
    rows = steps(*np.repeat([first_ms, *[0.9, 1.0, 1.1] * 8], 4))
    (whole,), (later,) = (rates_of(each).values() for each in (rows, rows[4:]))
    assert (error_of(whole) == pytest.approx(error_of(later))) is is_left_out


def test_a_phase_in_four_blocks_after_the_slow_first_one_has_no_known_error() -> None:
    """A prompt begins in every fifth block of steps, so the phase of prompts has few blocks.

    If the first block is slow, it is left out. The remaining blocks are too few to compute an error.
    """
    for first_ms, is_known in ((1.0, True), (400.0, False)):
        rows = steps(first_ms, *[1.0 + at % 3 / 100 for at in range(99)])
        rows = [(DECODE if at % 20 else PREFILL, begin, end) for at, (_, begin, end) in enumerate(rows)]
        found = rates_of(rows)
        assert (found["prefill"].steps, bool(found["prefill"].times_us)) == (5, is_known)
        assert found["decode"].times_us


def test_growth_with_the_cache_is_no_noise() -> None:
    lengths = [1 + at / 200 for at in range(200)]
    cached = list(range(200))
    (found,), (unsaid,) = (rates_of(steps(*lengths), cached=each).values() for each in (cached, [-1] * 200))
    assert error_of(found) < error_of(unsaid) / 20
    assert found.times_us[TOKENS].slope == pytest.approx(1e3 / 200 / 2, rel=0.01)
    assert (found.cached, unsaid.cached) == (99.5, None)


def test_blocks_without_a_phase_have_no_weight_in_its_growth() -> None:
    rows = steps(*[1.0 if at % 8 < 4 else 2.0 for at in range(160)])
    rows = [(DECODE if at % 8 < 4 else PREFILL, begin, end) for at, (_, begin, end) in enumerate(rows)]
    found = rates_of(rows, cached=list(range(160)))
    assert found["decode"].cached == np.mean([at for at in range(160) if at % 8 < 4])
    time_us = found["decode"].times_us[TOKENS]
    assert time_us.mean == 1500.0
    assert 4 < time_us.slope_error < 6


def test_steps_of_nanoseconds_and_a_single_sample_have_a_rate() -> None:
    (found,) = rates_of([(DECODE, at, at + 1) for at in range(40)], sequences=[0] * 8 + [1] + [0] * 31).values()
    assert set(found.times_us) == {TOKENS, STEPS, SAMPLES, IN_STEPS}


def test_half_of_the_blocks_tell_the_scatter_of_time_with_pauses() -> None:
    (found,) = rates_of(steps(*[3.0] * 128)).values()
    assert found.times_us[IN_STEPS].blocks == 2 * found.times_us[TOKENS].blocks


def test_rates_of_several_runs_are_their_mean_if_enough_have_them() -> None:
    def run(mean: float, *names: str, phase: str = "decode") -> PhaseRates:
        return PhaseRates(phase, 40, {name: Figure(mean, 0.1, 20) for name in names}, cached=mean, is_headline=True)

    runs = [[run(mean, TOKENS, STEPS)] for mean in (9.0, 10.0, 11.0)]
    (found,) = rates_together(runs, 3)
    assert (found.per_sec(TOKENS), found.cached, found.steps, found.is_headline) == (1e5, 10.0, 120, True)
    assert (found.times_us[TOKENS].scatter, found.times_us[TOKENS].runs) == (1.0, 3)
    runs[1] = [replace(run(10.0, STEPS), cached=None)]
    (found,) = rates_together(runs, 3)
    assert (set(found.times_us), found.cached) == ({STEPS}, None)
    assert rates_together(runs, 4) == ()


def test_another_run_without_a_phase_takes_no_rate_away() -> None:
    runs = [[PhaseRates("decode", 40, {TOKENS: Figure(mean, 0.1, 20)})] for mean in (9.0, 10.0, 11.0)]
    more: list[list[PhaseRates]] = [[PhaseRates("prefill", 40, {})], *runs, []]
    (found,) = rates_together(more, 3)
    assert (found,) == rates_together(runs, 3)
    assert not found.is_headline
