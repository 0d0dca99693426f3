"""Tests of the comparison of two runs: verdicts, notes, and runs with different numbers of cached positions."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from cbtop.comparison.default_gate import default_gate
from cbtop.comparison.items import BETWEEN_BRICKS, PlaceTimes
from cbtop.comparison.noise import Change, Figure, change
from cbtop.comparison.part_diff import PartDiff, PlaceDiff, findable_percent
from cbtop.comparison.place_changes import shared_ratio
from cbtop.comparison.run_diff import RunDiff, diff, diff_of
from cbtop.comparison.run_sets import together
from cbtop.comparison.runs import MissingPart, Pace, Run, TooShort, part_of
from cbtop.comparison.step_blocks import StepBlocks
from cbtop.protocol.vocabulary import BY_KERNELS, BrickCategory
from cbtop.reports.run_diff import sentence
from tests.cbtop.comparison.made_runs import AT, Noise, made_batch, made_run, made_table

STEADY = Noise(pauses=0)


def test_a_change_in_all_layers_is_of_the_brick_and_in_one_of_that_layer() -> None:
    for in_layer, name in ((None, "DownProjection"), (4, "DownProjection in Layer 4")):
        (part,) = diff(made_run(1), made_run(2, slower=1.1, in_layer=in_layer)).parts
        assert [one.name for one in part.slower] == [name]


def test_without_a_baseline_a_run_is_compared_with_itself() -> None:
    assert diff(made_run(1), made_run(2)).has_baseline is True
    assert diff(made_run(1), made_run(1)).has_baseline is False


def test_kernels_are_those_that_differ() -> None:
    (part,) = diff(made_run(1), made_run(2)).parts
    assert [place.kernels for place in part.places if place.kernels is not None] == []


def test_a_run_read_twice_is_the_same_run() -> None:
    base = made_run(1)
    twin = replace(base, name="twin")
    assert diff(base, twin).why_not.startswith("both are the same run, run 1")
    assert diff(base, twin, anyway=True).why_not == ""


@pytest.mark.parametrize(
    ("runs", "rest"), [(2, "; fewer than 3 do not show how runs vary, so run 1 counts alone"), (3, "")]
)
def test_a_part_that_some_base_runs_lack_is_said_with_the_reason(runs: int, rest: str) -> None:
    gap = MissingPart("decode", "decode (240 steps)", runs, 4, ("run 4 lacks it",), "run 1")
    (note,) = diff(replace(made_run(1), gaps=(gap,)), made_run(2)).notes
    assert note == f"decode (240 steps): in {runs} of 4 runs of the baseline: run 4 lacks it{rest}"


def test_calls_with_more_tokens_are_not_compared() -> None:
    runs = []
    for seed, tokens in ((1, 16), (2, 18)):
        batch, table = made_batch(seed, STEADY, 120, all_longer=tokens / 16), made_table()
        blocks = StepBlocks(table)
        blocks.take(replace(batch, elements=tokens * batch.elements))
        parts = [part_of(table, work, found) for work, found in blocks.blocks().items()]
        runs.append(replace(made_run(seed), parts=tuple(one for one in parts if one)))
    found = diff(*runs)
    assert found.parts == ()
    assert "another batch: 18.00 tokens a step, 16.00 before" in found.why_not


def test_what_is_faster_is_no_regression() -> None:
    (part,) = diff(made_run(1, slower=1.2), made_run(2)).parts
    assert part.slower == []
    assert [one.name for one in part.cells if one.verdict == "faster"] == ["DownProjection in Layer 4"]


def test_a_few_long_calls_move_the_mean_and_not_the_verdict() -> None:
    (part,) = diff(made_run(1, STEADY), made_run(2, Noise(pauses=0.003))).parts
    assert part.balance.wall[1] > 1.2 * part.balance.wall[0]
    assert part.slower == []


def test_where_long_calls_hide_in_the_mean_that_a_brick_is_slower_it_is_said() -> None:
    paused, slower = made_run(1, Noise(pauses=0.02)), made_run(2, STEADY, slower=1.2)
    for base, said in ((paused, " by the mean, which a few long calls move"), (made_run(1, STEADY), "")):
        (part,) = diff(base, slower).parts
        (place,) = [one for one in part.slower if one.name == "DownProjection in Layer 4"]
        assert (place.delta_us < 0) == bool(said)
        assert sentence(part, place).endswith(f" µs/token{said}")
        brick = default_gate(diff(base, slower))[0]
        assert brick.guilty == place.name
        # The sentence about the brick ends with the brick's time only if this time decided the verdict.
        assert brick.said.endswith(" µs/token") is not bool(said)


def test_longer_caches_are_compared_at_a_length_that_both_have_seen() -> None:
    """Attention takes 100 µs plus 0.2 µs per cached position.

    The new run has 200 more positions, so Attention takes 40 µs longer. This is not a change of the program.
    """
    base = made_run(1, STEADY, 400, cached_from=0, us_a_position=0.2)
    later = made_run(2, STEADY, 400, cached_from=200, us_a_position=0.2)
    (part,) = diff(base, later).parts
    assert part.cached == pytest.approx(300, abs=2)
    (attention,) = [one for one in part.bricks if one.name == "Attention"]
    assert attention.mean is not None
    assert attention.mean.percent == pytest.approx(0, abs=3)
    assert part.slower == []
    (part,) = diff(base, made_run(3, STEADY, 400, cached_from=200, us_a_position=0.2, slower=1.1)).parts
    assert [one.name for one in part.slower] == ["DownProjection in Layer 4"]
    assert "other KV lengths" in diff(base, made_run(2, STEADY, 400, cached_from=900)).why_not


@pytest.mark.slow
def test_calls_and_typical_times_are_compared_at_one_length_too() -> None:
    """Attention takes 100 µs plus 0.2 µs per cached position. The new run has 200 more positions.

    So its measured median and p99 are 40 µs higher. At the same number of positions they are equal.
    """
    base, later = (made_run(at, STEADY, 400, cached_from=200 * at, us_a_position=0.2) for at in (0, 1))
    (part,) = diff(base, later).parts
    for one in (place for place in part.places if place.name.startswith("Attention")):
        assert one.change is not None
        assert one.p50 is not None
        assert one.p99 is not None
        # Only four calls in a layer are longer than the p99, so the p99 has a large error.
        for moved, half_percent in ((one.change, 15), (one.p50, 15), (one.p99, 25)):
            assert moved.percent == pytest.approx(0, abs=5)
            assert moved.half_percent is not None
            assert moved.half_percent < half_percent
        assert one.p50.before == pytest.approx(100 + 0.2 * 300, rel=0.03)
    assert part.step.p50 is not None
    assert part.step.p50.percent == pytest.approx(0, abs=3)


def test_what_lies_between_bricks_is_judged_by_calls_at_one_length_too() -> None:
    """The median time between bricks is computed from the median step.

    If more positions are cached, the whole step takes longer, and this must not count as time between bricks.
    """
    base, later = (made_run(at, STEADY, 400, cached_from=200 * at, us_a_position=0.2) for at in (0, 1))
    (part,) = diff(base, later).parts
    between = [one for one in part.places if one.name.startswith("between bricks")]
    assert len(between) == 7
    for one in between:
        assert one.mean is not None
        assert one.mean.medians_us is not None
        assert one.mean.medians_us[1] == pytest.approx(one.mean.medians_us[0], rel=0.03)
    assert part.wall.medians_us is not None
    assert part.wall.medians_us[1] == pytest.approx(part.wall.medians_us[0], rel=0.03)


def test_the_sums_close_also_where_caches_grow_and_means_are_moved() -> None:
    base = made_run(1, cached_from=0, us_a_position=0.2)
    (part,) = diff(base, made_run(2, cached_from=50, us_a_position=0.2, slower=1.3)).parts
    assert part.balance.off_us == pytest.approx(0, abs=1e-6)
    bricks = sum(one.delta_us for one in part.bricks)
    assert bricks + part.balance.between_steps[1] - part.balance.between_steps[0] == pytest.approx(
        part.balance.wall[1] - part.balance.wall[0], abs=1e-6
    )


def test_a_brick_that_runs_elsewhere_is_gone_and_another_new() -> None:
    base, now = made_run(1), made_run(2, rename="Other")
    (part,) = diff(base, now).parts
    assert {one.renamed_from for one in part.bricks} == {"", "DownProjection"}
    now = replace(now, kernels={one.brick: ("another",) for one in part.bricks if one.brick and one.renamed_from})
    (part,) = diff(base, now).parts
    assert {one.verdict: one.name for one in part.bricks if one.verdict} == {"new": "Other", "gone": "DownProjection"}
    assert part.balance.off_us == pytest.approx(0, abs=1e-6)


def test_several_runs_are_one_that_knows_how_they_scatter() -> None:
    runs = [made_run(seed, Noise(run=0.05), 80) for seed in range(5)]
    found = together(runs)
    assert found.runs == 5
    (part,) = found.parts
    means = [run.parts[0].wall_us.mean for run in runs]
    assert part.wall_us.mean == pytest.approx(np.mean(means))
    assert part.wall_us.scatter == pytest.approx(np.std(means, ddof=1))
    assert together(runs[:2]) is runs[0]


def test_another_gpu_clock_is_another_machine_where_recordings_carry_it() -> None:
    base, now = (replace(made_run(seed), gpu_clock_mhz=clock) for seed, clock in ((1, 1980.0), (2, 1410.0)))
    said = "another GPU clock: 1,410 MHz, of the baseline 1,980"
    assert diff(base, now).why_not == said
    assert said in diff(base, now, anyway=True).notes
    for unknown in (replace(now, gpu_clock_mhz=None), replace(now, gpu_clock_mhz=1950.0)):
        assert diff(base, unknown).why_not == ""


def paced(seed: int, *paces: tuple[float, float]) -> Run:
    return replace(made_run(seed, STEADY, 40), paces=tuple(Pace(*one) for one in paces))


def test_a_run_does_not_compare_if_its_machine_has_a_pace_it_never_had() -> None:
    bases = [paced(seed, (1_000.0, 5_000.0 + 100 * seed), (1_020.0, 5_200.0)) for seed in (1, 2, 3)]
    slow = paced(4, (1_000.0, 7_000.0), (1_010.0, 7_400.0))
    found = diff_of(bases, [slow])
    assert found.why_not == (
        "another pace of the machine itself: the same work in its memory took 7,000 to 7,400 µs before and behind "
        "this run, 5,100 to 5,300 of the baseline"
    )
    assert found.why_not in diff_of(bases, [slow], anyway=True).notes
    in_cache = diff_of(bases, [paced(4, (1_500.0, 5_100.0), (1_400.0, 5_100.0))])
    assert "work in its cache took 1,400 to 1,500 µs" in in_cache.why_not
    quicker = diff_of(bases, [paced(4, (1_000.0, 4_000.0), (1_000.0, 4_100.0))])
    assert "memory took 4,000 to 4,100 µs" in quicker.why_not


@pytest.mark.parametrize(
    "paces",
    [
        pytest.param([(1_000.0, 7_000.0), (1_010.0, 5_250.0)], id="before it alone"),
        pytest.param([(1_020.0, 5_830.0), (1_020.0, 5_830.0)], id="by a tenth"),
        pytest.param([(1_020.0, 4_640.0), (1_020.0, 4_640.0)], id="quicker by a tenth"),
        pytest.param([((1 + 0.10) * 1_020.0, 5_200.0)], id="by exactly a tenth"),
        pytest.param([], id="not known"),
    ],
)
def test_a_machine_whose_pace_comes_near_what_it_was_is_the_same(paces: list[tuple[float, float]]) -> None:
    bases = [paced(seed, (1_000.0, 5_000.0 + 100 * seed), (1_020.0, 5_200.0)) for seed in (1, 2, 3)]
    assert diff_of(bases, [paced(4, *paces)]).why_not == ""
    assert diff_of([paced(seed) for seed in (1, 2, 3)], [paced(4, (9.0, 9.0))]).why_not == ""


def test_runs_taken_together_may_have_any_pace_and_widen_what_is_the_same() -> None:
    bases = [paced(seed, (1_000.0, 1_000.0 * seed), (1_000.0, 1_000.0 * seed)) for seed in (1, 2, 3)]
    assert diff_of(bases, [paced(4, (1_000.0, 3_000.0), (1_000.0, 3_100.0))]).why_not == ""
    assert together(bases).paces == tuple(pace for run in bases for pace in run.paces)
    # One of these runs has no measured pace of the machine. So the set of runs has no pace.
    assert together([*bases[:2], paced(3)]).paces == ()


def test_a_busier_machine_is_said_beside_what_changed() -> None:
    base, now = (replace(made_run(seed), host_busy_percent=busy) for seed, busy in ((1, 55.0), (2, 99.0)))
    assert "processors busy 99.0 % of the time, were 55.0 %" in diff(base, now).notes
    assert not diff(base, replace(now, host_busy_percent=60.0)).notes


def test_runs_taken_together_keep_clock_cut_gone_process_and_failed_check() -> None:
    runs = [replace(made_run(seed), gpu_clock_mhz=1000.0 * seed) for seed in (1, 2, 3)]
    assert together(runs).gpu_clock_mhz == 2000
    assert together([*runs[:2], replace(runs[2], gpu_clock_mhz=None)]).gpu_clock_mhz is None
    odd = together([*runs[:2], replace(runs[2], is_cut=True, is_gone=True, failed_checks=("RmsNorm: finite",))])
    assert (odd.is_cut, odd.is_gone, odd.failed_checks) == (True, True, ("RmsNorm: finite",))


@pytest.mark.slow
def test_runs_of_other_lengths_are_said_where_nobody_says_how_much_is_cached() -> None:
    """A note is given only if the numbers of steps differ by more than 10 %."""
    for steps, is_said in ((240, False), (264, False), (280, True)):
        notes = diff(made_run(1, STEADY, 240), made_run(2, STEADY, steps)).notes
        said = f"decode: {steps} steps, 240 in the baseline, and how much was cached is not said"
        assert any(note.startswith(said) for note in notes) is is_said
    assert not diff(made_run(1, STEADY, 240, cached_from=0), made_run(2, STEADY, 280, cached_from=0)).notes
    bases = [made_run(seed, STEADY, 80) for seed in (3, 4, 5)]
    # The new run and each of the three base runs have 80 steps, so there is no note. The sum of the base runs (240
    # steps) does not count.
    assert not diff_of(bases, [made_run(6, STEADY, 80)]).notes
    assert diff_of(bases, [made_run(6, STEADY, 240)]).notes


def test_losses_are_those_of_the_run_that_has_them() -> None:
    base, now = made_run(1), made_run(2)
    lost = {"lost": 2, "seen": 1000}
    assert diff(base, replace(now, **lost)).why_not == "0.2 % of the records were lost"  # type: ignore[arg-type]
    assert diff(replace(base, **lost), now).why_not.startswith("0.2 % of the records of the baseline")  # type: ignore[arg-type]
    assert diff(base, replace(now, lost=1, seen=1000)).why_not == ""
    assert diff(base, replace(now, **lost), may_lack_records=True).parts  # type: ignore[arg-type]


def test_too_little_is_said_of_the_run_and_the_phase_that_lack_it() -> None:
    base, now = made_run(1), replace(made_run(2), parts=(), too_short=(TooShort("decode", 7, 20),))
    found = diff(base, now)
    assert (found.why_not, found.is_too_little) == ("too little in the new run: 7 decode steps of 20 needed", True)
    said = "too little in the baseline: no prefill steps; too little in the new run: no prefill steps"
    assert diff(base, now, "prefill").why_not == said
    assert diff(now, base).why_not == "too little in the baseline: 7 decode steps of 20 needed"


def test_the_works_that_lack_least_are_named_and_a_sample_has_its_remedy() -> None:
    works = tuple(TooShort(phase, steps, 200) for phase, steps in (("decode", 4), ("eval", 1), ("decode", 9)))
    base, few = made_run(1), "too little in the new run: 9 decode steps of 200 needed, 1 eval step of 200 needed"
    for every in (1, 2, 10):
        sampled = replace(AT, sample_every=every)
        now = replace(made_run(2), parts=(), too_short=works, surroundings=sampled)
        remedy = f", for one in {every} was recorded: `cbtop run --overhead 100%` records each" if every > 1 else ""
        assert diff(replace(base, surroundings=sampled), now).why_not == few + remedy
    notes = diff(base, replace(made_run(2), too_short=(TooShort("eval", 1, 20), TooShort("eval", 3, 20)))).notes
    assert "eval: left out of the new run: 4 steps in 2 batches of at most 3, of 20 needed in each" in notes


def test_fewer_than_three_runs_are_not_taken_together_and_a_twin_is_refused() -> None:
    one, other, new = (made_run(seed) for seed in (1, 2, 3))
    assert diff_of([one, replace(one)], [new]).base is one
    assert "run 1 is there twice" in diff_of([other, one, replace(one)], [new]).why_not
    elsewhere = replace(other, surroundings=replace(other.surroundings, host="there"))
    assert "run 2: another host: there, run 1 has here" in diff_of([one, new, elsewhere], [new]).why_not
    assert diff_of([one, new, elsewhere], [new], anyway=True).base.runs == 3


def test_all_bricks_take_as_many_times_as_long_only_where_each_does() -> None:
    base = made_run(1, STEADY)
    (part,) = diff(base, made_run(2, STEADY, all_longer=1.2)).parts
    assert part.machine_ratio == pytest.approx(1.2, abs=0.01)
    (part,) = diff(base, made_run(2, STEADY, all_longer=1.2, slower=1.3, in_layer=None)).parts
    assert part.machine_ratio is None
    (part,) = diff(base, made_run(2, STEADY)).parts
    assert part.machine_ratio is None


def test_how_small_a_change_is_found_follows_from_interval_and_error() -> None:
    assert findable_percent(Change(100, 101, half=8, error=2)) == pytest.approx(8 + 1.645 * 2, abs=0.01)
    assert findable_percent(Change(100, 101, half=1, error=0.1)) == pytest.approx(3 + 0.1645, abs=0.01)
    assert findable_percent(Change(50, 51, half=1, error=0.4)) == pytest.approx(3 + 2 * 0.4 * 1.645, abs=0.01)
    assert findable_percent(Change(0, 101, half=1, error=0.1)) is None
    (part,) = diff(made_run(1, STEADY), made_run(2, STEADY)).parts
    known = sorted(findable_percent(one.change) or 0 for one in part.bricks if one.change)
    # Each of the five bricks has a smallest change that can be found. The gate reports the median of these changes.
    assert part.findable(part.bricks) == pytest.approx(known[len(known) // 2])
    assert part.findable([]) is None


def test_caches_compare_up_to_a_fiftieth_beyond_what_each_run_has_seen() -> None:
    def cached(run: Run, least: float, mean: float, most: float) -> Run:
        (part,) = run.parts
        return replace(run, parts=(replace(part, cached_least=least, cached=mean, cached_most=most),))

    # This run has 90 to 110 cached positions. A comparison with it may use up to 112.2 positions.
    base = cached(made_run(1, STEADY), 90, 100, 110)
    # The comparison uses the midpoint of both means of cached positions, which is 112 or 112.5. The limit is 112.2.
    for mean, is_compared in ((124, True), (125, False)):
        now = cached(made_run(2, STEADY), 100, mean, 160)
        for one, other in ((base, now), (now, base)):
            assert (diff(one, other).why_not == "") is is_compared
    # The other run has at least 114 or 115 positions. So the comparison may use no fewer than 111.7 or 112.7
    # positions, and the midpoint is 112.
    for least, is_compared in ((114, True), (115, False)):
        assert (diff(base, cached(made_run(2, STEADY), least, 124, 160)).why_not == "") is is_compared


def test_bricks_layers_and_bricks_in_layers_are_known_if_the_clock_can_tell() -> None:
    (part,) = diff(made_run(1), made_run(2)).parts
    assert len(part.known) == 5 + 6 + 6 * 5
    base, now = (replace(made_run(seed), clock_resolution_us=5.0) for seed in (1, 2))
    (part,) = diff(base, now).parts
    assert {one.name for one in part.places} - {one.name for one in part.known} == {
        "RmsNorm",
        *(f"RmsNorm in Layer {layer}" for layer in range(6)),
    }


def test_what_a_machine_does_to_all_is_what_half_of_the_time_shares() -> None:
    """Another process slows down small bricks.

    Most bricks are small, but together they take little of the step's time.
    """
    (base,), (now,) = made_run(1, STEADY).parts, made_run(2, STEADY).parts
    usual = shared_ratio(base.places, now.places)
    assert usual == pytest.approx(1.0, abs=0.03)

    def longer(names: tuple[str, ...]) -> float | None:
        return shared_ratio(
            base.places,
            {
                place: replace(one, call=replace(one.call, mean=1.3 * one.call.mean))
                if place[0] and place[0][0] in names and one.call
                else one
                for place, one in now.places.items()
            },
        )

    # Of the step's 520 µs, these bricks take 120 µs, which is less than half.
    assert longer(("RmsNorm", "Attention")) == pytest.approx(usual, abs=0.03)
    # Of the step's 520 µs, these bricks take 400 µs, which is more than half.
    assert longer(("QkvProjection", "DownProjection")) == pytest.approx(1.3 * usual, abs=0.03)
    few = {place: one for place, one in now.places.items() if place[1] in (None, "Layer 0", "Layer 1")}
    assert shared_ratio(base.places, few) is not None  # eight bricks remain
    few.pop(next(place for place in few if place[0] and place[0][0] == "RmsNorm" and place[1] == "Layer 1"))
    assert shared_ratio(base.places, few) is None


def test_a_change_relative_to_others_is_no_surer_if_cache_lengths_are_moved() -> None:
    base = made_run(1, STEADY, 400, cached_from=0, us_a_position=0.2)
    (moved,) = diff(base, made_run(2, STEADY, 400, cached_from=200, us_a_position=0.2)).parts
    (as_long,) = diff(base, made_run(2, STEADY, 400, cached_from=0, us_a_position=0.2)).parts
    for name in ("RmsNorm in Layer 1", "DownProjection in Layer 3"):
        sure, unsure = (next(one.change for one in part.cells if one.name == name) for part in (as_long, moved))
        assert sure is not None
        assert unsure is not None
        halves = [one.own.half if one.own else one.half for one in (sure, unsure)]
        assert halves[0] < halves[1]


@cache
def steady() -> PartDiff:
    """Return the comparison of two runs of the same program."""
    (part,) = diff(made_run(1, STEADY), made_run(2, STEADY)).parts
    return part


def times_as(each: Change, **changed: object) -> tuple[PlaceDiff, ...]:
    """Return the bricks and layers of the comparison `steady`. The change of every one is replaced by `each`."""
    return tuple(replace(one, change=each, **changed) for one in steady().places)  # type: ignore[arg-type]


def test_figures_at_another_length_move_along_their_line_and_are_less_sure() -> None:
    """Both runs are converted to 110 cached positions: one from 100 and one from 120.

    So each result moves by 10 positions.
    """
    line = Figure(1000.0, 3.0, 20, 500.0, slope=0.5, slope_error=0.4, own_error=1.0)
    # The result has the error √(3² + 4²) = 5: 3 from the measurement, and 4 from the slope. In a comparison with
    # other bricks, the error is √(1² + 4²).
    moved = Figure(1000.0, 5.0, 20, 500.0, own_error=17**0.5)
    runs = []
    for seed, cached in ((1, 100.0), (2, 120.0)):
        run = made_run(seed, STEADY, 40)
        (part,) = run.parts
        places = {place: PlaceTimes(line, line, line, None, Figure(1.0, 0.0, 20)) for place in part.places}
        figures = {"wall_us": line, "inside_us": line, "typical_us": line}
        at = {"cached": cached, "cached_least": cached - 20, "cached_most": cached + 20}
        runs.append(replace(run, parts=(replace(part, places=places, **figures, **at),)))  # type: ignore[arg-type]
    (part,) = diff(*runs).parts
    (same,) = diff(runs[0], replace(runs[0], key="another")).parts
    assert (part.cached, part.step.p99) == (110.0, None)
    for one in (part.wall, part.typical, part.step.change, part.places[0].mean, part.places[0].p50):
        assert one is not None
        assert (one.before, one.now) == (1005.0, 995.0)
        assert one.error == pytest.approx(50**0.5)
        assert one.half > same.wall.half
    assert part.wall.medians_us == (505.0, 495.0)
    assert part.step.change is not None
    assert part.step.change.half == pytest.approx(change(moved, moved, 4).half)
    between = next(one for one in part.places if one.name == "between bricks")
    assert between.mean is not None
    # For the time between bricks, the comparison uses the median call of the step.
    assert between.mean.medians_us == (1005.0, 995.0)
    own = next(one.change.own for one in part.cells if one.change)
    assert own is not None
    assert own.error == pytest.approx(34**0.5, rel=0.01)
    assert part.balance.wall == (1005.0, 995.0)


def test_times_below_a_microsecond_become_slower_and_faster_like_others() -> None:
    slower, faster = Change(0.5, 0.7, 0.01), Change(0.5, 0.3, 0.01)
    for one, verdict in ((slower, "slower"), (faster, "faster")):
        assert {place.verdict for place in times_as(one)} == {verdict}
        part = replace(steady(), wall=one, typical=one)
        assert (part.is_slower, part.is_typically_slower) == (verdict == "slower",) * 2


def test_a_place_that_is_new_or_gone_costs_all_of_it() -> None:
    times = PlaceTimes(Figure(5.0, 0.1, 20))
    new, gone = PlaceDiff(("Extra", BrickCategory.FFN), None, None, times), PlaceDiff(None, "Layer 9", times, None)
    assert [(one.name, one.verdict, one.delta_us) for one in (new, gone)] == [
        ("Extra", "new", 5.0),
        ("Layer 9", "gone", -5.0),
    ]
    both = replace(new, before=times, change=Change(5.0, 6.0, 0.1))
    assert (both.verdict, replace(both, is_below_resolution=True).verdict) == ("slower", "")
    assert (both.moved_by, both.delta_us) == ("", 0.0)


def test_more_steps_fail_by_the_difference_of_their_shares() -> None:
    part = replace(
        steady(),
        before=replace(steady().before, steps=50, failed=1),
        now=replace(steady().now, steps=100, failed=5),
    )
    assert part.more_failed_percent == pytest.approx(3.0)


def test_growth_is_shared_if_all_bricks_grow_alike_and_the_unit_by_as_much() -> None:
    longer = Change(1000.0, 1200.0, 10.0)
    alike, alone = (replace(longer, own=Change(1000.0, now, 5.0)) for now in (1000.0, 1200.0))
    shared = replace(steady(), shared=1.2, wall=longer, places=times_as(alike))
    assert shared.is_shared
    for part in (
        replace(shared, shared=None),
        replace(shared, shared=1.0, wall=Change(1000.0, 1000.0, 10.0)),
        replace(shared, places=times_as(longer)),  # These changes lack the change relative to the other bricks.
        replace(shared, places=(*times_as(alike)[:-1], replace(times_as(alone)[-1], brick=("A", BrickCategory.FFN)))),
        # Divided by the factor that all bricks share, the step takes 1,030.8 µs. This is a change of more than 3 %,
        # so it does not count as noise.
        replace(shared, wall=Change(1000.0, 1237.0, 10.0)),
    ):
        assert not part.is_shared
    # Divided by the factor that all bricks share, the step takes 1,029.2 µs. This is a change of less than 3 %, so it
    # counts as noise.
    assert replace(shared, wall=Change(1000.0, 1235.0, 10.0)).is_shared
    # All bricks change by the same factor. Only the time between bricks changes by another factor.
    between = tuple(replace(one, change=alone) if one.brick == BETWEEN_BRICKS else one for one in times_as(alike))
    assert replace(shared, places=between).is_shared


def test_every_brick_takes_as_many_times_as_long_within_a_twentieth() -> None:
    names = ("RmsNorm", "QkvProjection", "Attention", "DownProjection")

    def ratio_of(*ratios: float) -> float | None:
        by_name = dict(zip(names, ratios, strict=True))
        places = tuple(
            replace(one, change=Change(100.0, 100.0 * by_name[one.name], 1.0)) for one in steady().bricks if one.p50
        )
        return replace(steady(), places=places).machine_ratio

    assert ratio_of(1.2, 1.2, 1.22, 1.22) == pytest.approx(1.21)
    assert ratio_of(1.2, 1.2, 1.2, 1.255) == pytest.approx(1.2)
    assert ratio_of(1.2, 1.2, 1.2, 1.265) is None
    assert ratio_of(1.2, 1.2, 1.2, 1.0) is None
    assert ratio_of(0.8, 0.8, 0.8, 0.8) == pytest.approx(0.8)


def test_a_unit_is_longer_in_the_mean_if_beyond_chance_and_no_median_call_is() -> None:
    for wall, is_longer in (
        (Change(100.0, 120.0, 5.0, (50.0, 50.0)), True),
        # The medians of both runs are unknown, so it is unknown whether the median changed.
        (Change(100.0, 120.0, 5.0), False),
        (Change(100.0, 105.0, 5.0, (50.0, 50.0)), False),
        (Change(0.0, 105.0, 5.0), False),
    ):
        assert replace(steady(), wall=wall).is_longer_in_the_mean is is_longer


def test_the_smallest_change_found_relative_to_others_counts_if_smaller() -> None:
    one = Change(100.0, 101.0, half=8.0, error=2.0)
    surer, less_sure = (replace(one, half=half, error=half / 4) for half in (4.0, 16.0))
    assert findable_percent(replace(one, own=surer)) == pytest.approx(findable_percent(surer))
    assert findable_percent(replace(one, own=less_sure)) == pytest.approx(findable_percent(one))
    assert findable_percent(Change(0.5, 0.5, half=0.05, error=0.0)) == pytest.approx(10)


def test_clocks_and_loads_are_alike_up_to_three_percent_and_fifteen_points() -> None:
    base = replace(made_run(1, STEADY, 40), gpu_clock_mhz=2000.0, host_busy_percent=50.0)
    new = made_run(2, STEADY, 40)
    for mhz, is_alike in ((1940.0, True), (2060.0, True), (1939.0, False), (2061.0, False)):
        assert (diff(base, replace(new, gpu_clock_mhz=mhz)).why_not == "") is is_alike
    for busy, is_alike in ((65.0, True), (35.0, True), (66.0, False), (34.0, False)):
        notes = diff(base, replace(new, host_busy_percent=busy)).notes
        assert any("processors busy" in note for note in notes) is not is_alike
    for one, other in ((base, new), (new, base)):
        assert diff(one, other).notes == ()


def test_another_host_another_gpu_and_another_sampling_are_said() -> None:
    base, new = made_run(1, STEADY, 40), made_run(2, STEADY, 40)
    for changed, said in (
        ({"host": "there"}, "another host: there, the baseline has here"),
        ({"devices": ("H100",)}, "another GPU: H100, the baseline has none"),
        ({"sample_every": 8}, "another part of steps recorded, one in: 8, the baseline has 1"),
    ):
        elsewhere = replace(new, surroundings=replace(new.surroundings, **changed))  # type: ignore[arg-type]
        assert diff(base, elsewhere).why_not == said
        assert diff(base, elsewhere, anyway=True).why_not == ""


@pytest.mark.parametrize(
    ("before", "now", "is_alike"),
    [(96, 97, True), (100, 900, True), (4, 5, True), (1, 2, False), (8, 400, False), (4, 8, False), (400, 4, False)],
)
def test_runs_whose_recording_adds_as_little_are_compared(before: int, now: int, is_alike: bool) -> None:
    def outcome(backend: str) -> str:
        runs = [
            replace(run, surroundings=replace(run.surroundings, sample_every=every, backend=backend))
            for run, every in ((made_run(1, STEADY, 40), before), (made_run(2, STEADY, 40), now))
        ]
        return diff(*runs).why_not

    assert (outcome("torch on cpu") == "") is is_alike
    assert outcome(f"torch on cuda; {BY_KERNELS}") == ""


def test_notes_name_what_each_part_left_out_or_failed_and_what_work_it_is_of() -> None:
    base, new = made_run(1, STEADY, 40), made_run(2, STEADY, 40)
    (before,), (now,) = base.parts, new.parts
    for was, is_now, said in (
        ({"warm_up": 4}, {}, "decode: left out as warm-up: 0 steps, 4 before"),
        ({}, {"warm_up": 1}, "decode: left out as warm-up: 1 step, 0 before"),
        ({"failed": 2}, {}, "decode: failed: 0 steps of 40, 2 of 40 before"),
        ({}, {"failed": 1}, "decode: failed: 1 step of 40, 0 of 40 before"),
    ):
        found = diff(
            replace(base, parts=(replace(before, **was),)),  # type: ignore[arg-type]
            replace(new, parts=(replace(now, **is_now),)),  # type: ignore[arg-type]
        )
        assert found.notes == (said,)
    prefill = replace(now, phase="prefill", work=(8, 2), steps=12)
    encode = replace(now, phase="encode", work=(None, None), steps=1)
    found = diff(replace(base, parts=(before, encode)), replace(new, parts=(prefill, now)))
    assert set(found.notes) == {
        "only the baseline has encode (1 step): left out",
        "only the new run has prefill (12 steps of about 8 tokens on 2 sequences): left out",
    }
    assert (found.not_judged, [part.phase for part in found.alone]) == (("encode",), ["prefill"])
    # The phase with the most steps is reported first, regardless of the order in the recording.
    many = (replace(before, phase="verify", steps=80), before)
    assert [part.phase for part in diff(replace(base, parts=many[::-1]), replace(new, parts=many)).parts] == [
        "verify",
        "decode",
    ]
    assert [part.phase for part in diff(replace(base, parts=many), replace(new, parts=many), "decode").parts] == [
        "decode"
    ]


def test_parts_that_are_counted_in_other_ways_do_not_compare() -> None:
    base, new = made_run(1, STEADY, 40), made_run(2, STEADY, 40)
    (part,) = new.parts
    for changed, said in (
        ({"unit": "step"}, "decode: tokens are counted in one of the two alone"),
        ({"cached": 5.0}, "decode: how many positions are cached is said in one of the two alone"),
        ({"work": (8, 1)}, "another batch or phase: decode (40 steps of about 1 token) in the baseline, "),
    ):
        other = replace(new, parts=(replace(part, **changed),))  # type: ignore[arg-type]
        found = diff(base, other)
        assert (found.parts, found.is_too_little) == ((), False)
        assert found.why_not.startswith(said)


def test_too_few_steps_count_for_the_new_run_by_their_extra_share_of_time() -> None:
    base, new = made_run(1, STEADY, 40), made_run(2, STEADY, 40)
    whole_us = new.parts[0].time_us
    few = [TooShort("verify", 3, 20, 0.1 * whole_us), TooShort("verify", 4, 20, 0.2 * whole_us)]
    new = replace(new, too_short=(*few, TooShort("encode", 1, 20, 0.5)))
    found = diff(base, new)
    assert [(one.phase, one.steps) for one in found.alone_short] == [("verify", 7), ("encode", 1)]
    assert found.alone_short[0].time_us == pytest.approx(0.3 * whole_us)
    assert found.alone_percent == pytest.approx(100 * 0.3 / 1.3, rel=1e-3)
    # The share of `verify` in the time is not larger than in the baseline, so `verify` is not reported.
    as_before = replace(base, too_short=(TooShort("verify", 9, 20, 0.5 * base.parts[0].time_us),))
    assert [one.phase for one in diff(as_before, new).alone_short] == ["encode"]
    assert [one.phase for one in diff(base, replace(new, parts=base.parts), "decode").alone_short] == []
    assert RunDiff(base, replace(new, parts=(), too_short=())).alone_percent == 0.0


def test_runs_with_other_types_of_weights_are_compared_if_the_user_insists() -> None:
    base = made_run(1, STEADY)
    now = replace(made_run(2, STEADY), surroundings=replace(base.surroundings, quantization="F16"))
    assert diff(base, now).why_not == "another type of weights: F16, the baseline has Q4_K"
    found = diff(base, now, anyway=True)
    assert found.parts
    assert "type of weights F16, was Q4_K" in found.notes
