"""Tests of sets of runs: a figure of a set is a mean over runs. Runs that lack the figure are left out and named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cbtop.comparison.default_gate import default_gate, known_to_scatter
from cbtop.comparison.items import BETWEEN_BRICKS, WHOLE_STEP, Place
from cbtop.comparison.judged import Outcome
from cbtop.comparison.place_changes import shared_ratio
from cbtop.comparison.run_diff import RunDiff, diff_of
from cbtop.comparison.run_sets import together
from cbtop.comparison.runs import Run, TooShort
from cbtop.protocol.vocabulary import BrickCategory
from cbtop.reports.run_diff import diff_json, diff_text
from tests.cbtop.comparison.made_runs import AT, STEADY, Noise, made_run, place_of
from tests.representatives import first_by_default

ATTENTION: Place = (("Attention", BrickCategory.ATTENTION), None)
NOISE = Noise(run=0.005)
MANY = (6, None)  # (tokens per step, batch size): the steps with about six tokens


def two_batches(seed: int, steps: int = 120, **planted: object) -> Run:
    """Return a run with steps of one token and steps of six tokens.

    Only the steps of six tokens have the planted change.
    """
    run, other = made_run(seed, NOISE, 80), made_run(10_000 + seed, NOISE, steps, **planted)  # type: ignore[arg-type]
    many = replace(other.parts[0], work=MANY, tokens=6.0)
    return replace(run, parts=(*run.parts, many))


def without_many(run: Run, steps: int = 0) -> Run:
    """Return the run without its steps of six tokens, except for `steps` of them. These are too few to compare."""
    few = (TooShort("decode", steps, 20, 600.0 * steps, MANY),) if steps else ()
    return replace(run, parts=run.parts[:1], too_short=few)


def without_brick(run: Run, name: str) -> Run:
    parts = []
    for part in run.parts:
        places = {place: times for place, times in part.places.items() if not place[0] or place[0][0] != name}
        parts.append(replace(part, places=places))
    return replace(run, parts=tuple(parts))


def orders(runs: Sequence[Run]) -> list[list[Run]]:
    """Return all rotations of the list, so that each run comes first once."""
    return [[*runs[at:], *runs[:at]] for at in range(len(runs))]


def worst(bases: Sequence[Run], now: Run) -> tuple[Outcome, RunDiff]:
    """Return two things: the worst result of the default gate, and the comparison that the gate judged.

    Results from worst to best: broken, unknown, unsure, holds.
    """
    found = diff_of(bases, [now])
    if found.why_not:
        return Outcome.UNKNOWN, found
    outcomes = {one.outcome for one in known_to_scatter(default_gate(found), found.base.runs)}
    order = (Outcome.BROKEN, Outcome.UNKNOWN, Outcome.UNSURE, Outcome.HOLDS)
    return next(one for one in order if one in outcomes), found


def test_a_set_has_the_sums_of_its_runs_work_and_the_means_of_their_times() -> None:
    runs = [made_run(seed, Noise(run=0.05), 40 * seed) for seed in (1, 2, 3)]
    runs = [replace(run, lost=seed, covers_s=10.0 * seed) for seed, run in enumerate(runs, 1)]
    for clocks, coarsest in (((None, 0.05, 0.03), 0.05), ((None,) * 3, None)):
        timed = [replace(run, clock_resolution_us=clock) for run, clock in zip(runs, clocks, strict=True)]
        assert together(timed).clock_resolution_us == coarsest
    each = [replace(run.parts[0], failed=seed) for seed, run in enumerate(runs, 1)]
    found = together([replace(run, parts=(part,)) for run, part in zip(runs, each, strict=True)])
    assert (found.name, found.key, found.runs, found.gaps) == ("3 runs", runs[0].key, 3, ())
    assert (found.covers_s, found.lost, found.seen) == (60.0, 6, sum(run.seen for run in runs))
    (part,) = found.parts
    assert (part.steps, part.failed, part.tokens, part.runs) == (sum(one.steps for one in each), 6, 1.0, 3)
    for name in ("wall_us", "inside_us", "typical_us"):
        figures_of = [getattr(one, name) for one in each]
        figure = getattr(part, name)
        assert figure.mean == pytest.approx(np.mean([one.mean for one in figures_of]))
        assert figure.blocks == sum(one.blocks for one in figures_of)
        assert figure.scatter == pytest.approx(np.std([one.mean for one in figures_of], ddof=1))
    assert list(part.places) == list(each[0].places)
    for place, times in part.places.items():
        assert times.time.mean == pytest.approx(np.mean([one.places[place].time.mean for one in each]))
        calls = each[0].places[place].calls
        assert calls is not None
        assert times.calls == replace(calls, blocks=60, runs=3)


@pytest.mark.slow
def test_a_set_is_compared_at_the_cache_length_that_most_of_its_runs_have() -> None:
    grown = {"cached_from": 0, "us_a_position": 0.2}
    runs = [made_run(seed, STEADY, steps, **grown) for seed, steps in ((1, 240), (2, 220), (3, 230), (4, 40))]
    found = together(runs)
    (part,) = found.parts
    assert (part.runs, part.cached) == (3, pytest.approx(runs[1].parts[0].cached))
    (gap,) = found.gaps
    assert gap.why_not == ("run 4 has other KV lengths, 2 to 38 positions cached",)
    alike = [run.parts[0].places[ATTENTION].time.mean for run in runs[:3]]
    assert part.places[ATTENTION].time.scatter < np.std(alike, ddof=1)
    assert part.places[ATTENTION].time.mean == pytest.approx(alike[1], rel=0.01)


def test_a_figure_is_averaged_over_the_runs_that_have_it_if_three_do() -> None:
    runs = [made_run(seed, STEADY, 40) for seed in (1, 2, 3, 4)]
    (part,) = runs[1].parts
    untold = {name: replace(times, p99=None, call=None) for name, times in part.places.items()}
    lacking = replace(runs[1], parts=(replace(part, places=untold, typical_us=None),))
    (found,) = together([runs[0], lacking, *runs[2:]]).parts
    both = [(one.call, one.p99) for one in found.places.values()]
    assert {figure.runs for pair in both for figure in pair if figure} == {3}
    assert found.typical_us is not None
    assert found.typical_us.runs == 3
    assert found.places[WHOLE_STEP].time.runs == 4
    (found,) = together([runs[0], lacking, runs[2]]).parts
    assert {(one.call, one.p99) for one in found.places.values()} == {(None, None)}
    assert found.typical_us is None


@pytest.mark.slow
@first_by_default("few", [0, 1])
def test_a_part_that_three_base_runs_have_is_judged_whatever_others_lack(few: int) -> None:
    """Three base runs have steps of six tokens. Each additional base run has at most one step of six tokens."""
    bases = [two_batches(seed) for seed in (0, 2, 3)]
    now = two_batches(7, slower=2.0, in_layer=None)
    assert worst(bases, now)[0] is Outcome.BROKEN
    for order in orders([*bases, without_many(two_batches(1), few)]):
        outcome, found = worst(order, now)
        assert outcome is Outcome.BROKEN
        why = "run 1 has 1 of 20 steps needed" if few else "run 1 lacks it"
        work = "decode (360 steps of about 6 tokens)"
        assert found.notes == (f"{work}: in 3 of 4 runs of the baseline: {why}",)
        assert "only the new run has" not in diff_text(found)


def test_a_part_of_fewer_than_three_base_runs_is_named_and_breaks_nothing() -> None:
    bases = [two_batches(0), without_many(two_batches(1)), without_many(two_batches(2), 3)]
    for order in orders(bases):
        outcome, found = worst(order, two_batches(7, slower=2.0, in_layer=None))
        assert outcome is Outcome.UNKNOWN
        assert found.notes == (
            "decode (120 steps of about 6 tokens): in 1 of 3 runs of the baseline: run 1 lacks it; run 2 has 3 of 20 "
            "steps needed; fewer than 3 do not show how runs vary, so run 0 counts alone",
        )
    assert worst(bases, without_many(two_batches(7)))[0] is not Outcome.UNKNOWN


def test_a_part_that_all_base_runs_have_too_little_of_is_not_called_new() -> None:
    bases = [without_many(two_batches(seed), seed) for seed in (1, 2, 3)]
    for some in (bases, bases[2:]):
        outcome, found = worst(some, two_batches(7))
        said = "the new run has decode (120 steps of about 6 tokens), the baseline 3 such steps of 20 needed"
        assert f"{said}: left out" in found.notes
        assert outcome is Outcome.UNKNOWN
        assert default_gate(found)[-1].said.endswith(f"of the new run's time: {said}")


def test_the_first_of_two_base_runs_is_completed_by_the_second() -> None:
    one, other, now = (two_batches(seed) for seed in (1, 2, 3))
    assert together([one, other]) is one
    found = diff_of([without_many(one), other], [now])
    assert found.notes == (
        "decode (120 steps of about 6 tokens): in 1 of 2 runs of the baseline: run 1 lacks it; fewer than 3 do not "
        "show how runs vary, so run 2 counts alone",
    )
    assert [part.before.places[WHOLE_STEP] for part in found.parts if part.now.work == MANY] == [
        other.parts[1].places[WHOLE_STEP]
    ]
    found = diff_of([without_brick(one, "Attention"), other], [now])
    assert not any("new: Attention" in note for note in found.notes)
    assert "decode: Attention, Attention in Layer 0" not in found.notes[0]
    assert found.notes[0].startswith("decode: Attention: in 1 of 2 runs of the baseline: run 1 has no call of it; ")


def test_eight_lacking_bricks_are_named_and_the_rest_are_counted() -> None:
    first, second = made_run(1), made_run(2)
    (part,) = second.parts
    more = {((f"Expert {at}", BrickCategory.FFN), None): part.places[ATTENTION] for at in range(10)}
    (gap,) = together([first, replace(second, parts=(replace(part, places={**part.places, **more}),))]).gaps
    assert gap.what == f"decode: {', '.join(f'Expert {at}' for at in range(8))} and 2 more"


def test_the_first_of_two_base_runs_keeps_what_the_second_lacks() -> None:
    first = two_batches(1)
    assert together([first, without_many(two_batches(2))]) == first
    other_unit = replace(first.parts[0], unit="step", places={})
    assert together([replace(first, parts=(other_unit,)), two_batches(2)]).parts[0] == other_unit


@pytest.mark.slow
def test_a_brick_that_one_base_run_never_called_is_judged_by_the_others() -> None:
    bases = [made_run(seed, NOISE, 120) for seed in range(3)]
    now = made_run(9, NOISE, 120, slower=2.0, in_layer=None)
    lacking = without_brick(made_run(4, NOISE, 120), "DownProjection")
    assert worst(bases, now)[0] is Outcome.BROKEN
    outcome, found = worst([lacking, *bases], now)
    assert outcome is Outcome.BROKEN
    assert place_of(found.parts[0], "DownProjection").verdict == "slower"
    assert found.notes == ("decode: DownProjection: in 3 of 4 runs of the baseline: run 4 has no call of it",)
    outcome, found = worst([lacking, *bases[:2]], now)
    (judged,) = [one for one in default_gate(found) if "no brick" in one.rule]
    assert judged.outcome is Outcome.UNKNOWN
    assert judged.said.endswith("; too few base runs have enough calls of DownProjection")
    assert found.notes[0].endswith("; fewer than 3 do not show how runs vary, so its calls are not judged")
    assert "new" not in {one.verdict for one in found.parts[0].places}


def extras(seed: int) -> dict[str, Run]:
    """Return unusual base runs of the same program. Each key says what is unusual about its run."""
    run = two_batches(seed)
    return {
        "another": run,
        "short": replace(two_batches(seed, 20), parts=two_batches(seed, 20).parts[::-1]),
        "without a part": without_many(run),
        "with one step of a part": without_many(run, 1),
        "with nothing": replace(run, parts=(), too_short=(TooShort("decode", 3, 20, 9.0, (1, None)),)),
        "without a brick": without_brick(run, "DownProjection"),
        "without another brick": without_brick(run, "Attention"),
        "cut": replace(run, is_cut=True),
        "slow and noisy": two_batches(seed, all_longer=1.5),
        "untypical": replace(run, parts=(run.parts[0], replace(two_batches(seed, 40).parts[1], typical_us=None))),
        "of another sampling": replace(run, surroundings=replace(AT, sample_every=10)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, pytest.param(25, marks=pytest.mark.slow)])
def test_one_more_base_run_never_turns_a_clear_slowdown_into_a_pass(rounds: int) -> None:
    for at in range(rounds):
        first = 100 * at
        bases, now = [two_batches(first + one) for one in range(3)], two_batches(first + 9, slower=2.0, in_layer=None)
        assert worst(bases, now)[0] is Outcome.BROKEN
        for name, extra in extras(first + 5).items():
            outcomes = {worst(order, now)[0] for order in ([*bases, extra], [extra, *bases], [*bases[::-1], extra])}
            assert len(outcomes) == 1, name
            if name == "of another sampling":
                assert "another part of steps recorded" in worst([*bases, extra], now)[1].why_not
            elif name == "slow and noisy":
                # The additional run is 50 % slower, so the base runs vary too much to exclude a factor of 2.
                assert outcomes <= {Outcome.BROKEN, Outcome.UNKNOWN}
            else:
                assert outcomes == {Outcome.BROKEN}, name


def test_the_order_of_base_runs_changes_no_figure() -> None:
    runs = [two_batches(seed) for seed in range(3)]
    runs.append(without_brick(two_batches(4), "Attention"))
    found = {diff_json(diff_of(order, [two_batches(9)])) for order in orders(runs)}
    assert len(found) == 1


def test_a_new_run_that_is_also_a_base_run_is_refused() -> None:
    bases = [made_run(seed, STEADY, 40) for seed in range(3)]
    again = replace(bases[1], name="again")
    assert diff_of(bases, [again]).why_not == "again is also in the baseline: a run does not differ from itself"
    assert diff_of(bases, [again], anyway=True).why_not == ""


def test_each_run_of_a_set_must_be_of_one_machine_and_complete() -> None:
    bases = [made_run(seed, STEADY, 40) for seed in range(3)]
    clocks = [replace(run, gpu_clock_mhz=clock) for run, clock in zip(bases, (1000.0, 1025.0, 975.0), strict=True)]
    for order in orders(clocks):
        assert "another GPU clock" in diff_of(order, [made_run(9, STEADY, 40)]).why_not
    lossy = [*bases[:2], replace(bases[2], lost=2, seen=1000)]
    for order in orders(lossy):
        assert "of the records" in diff_of(order, [made_run(9, STEADY, 40)]).why_not


def test_bricks_in_a_layer_scatter_beside_what_all_of_a_run_share() -> None:
    """One run takes twice as long everywhere.

    This difference must count as variation of the machine, not of single bricks.
    """
    runs = [made_run(seed, STEADY, 40, all_longer=longer) for seed, longer in ((1, 2.0), (2, 1.0), (3, 1.0))]
    parts = [run.parts[0] for run in runs]
    shared = [shared_ratio(parts[0].places, part.places) or 0.0 for part in parts]
    assert shared == pytest.approx([1.0, 0.5, 0.5], rel=0.05)
    (found,) = together(runs).parts
    cells = [place for place in found.places if place[0] and place[1] and place[0] != BETWEEN_BRICKS]
    means = np.array([[typical.mean for part in parts if (typical := part.places[cell].call)] for cell in cells])
    beside = means * np.mean(shared) / shared
    scatter = beside.std(axis=1, ddof=1)
    scatter = np.maximum(scatter, np.median(scatter / beside.mean(axis=1)) * beside.mean(axis=1))
    typical = [times for cell in cells if (times := found.places[cell].call)]
    assert [one.own_scatter for one in typical] == pytest.approx(scatter)
    assert all(one.scatter > 10 * one.own_scatter for one in typical)


def test_too_few_steps_of_several_runs_are_one_row_a_work_with_all_time() -> None:
    few = [TooShort("prefill", 3, 20, 50.0), TooShort("verify", 2, 20, 10.0), TooShort("prefill", 4, 20, 70.0)]
    few.append(TooShort("prefill", 1, 20, 5.0, MANY))
    runs = [replace(made_run(seed, STEADY, 40), too_short=(one,)) for seed, one in enumerate(few, 1)]
    assert together(runs).too_short == (TooShort("prefill", 4, 20, 120.0), few[1], few[3])
    assert TooShort("prefill", 3, 20).time_us == 0
