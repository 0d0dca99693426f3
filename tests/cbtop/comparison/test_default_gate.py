"""Tests of the gate (pass or fail) without thresholds.

It fails only if a run is slower than its baseline beyond noise.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cbtop.comparison.call_counts import CallsChange
from cbtop.comparison.default_gate import confirmed, default_gate, known_to_scatter, unconfirmed
from cbtop.comparison.items import BETWEEN_BRICKS, PlaceTimes
from cbtop.comparison.judged import Judged, Outcome
from cbtop.comparison.noise import Change, Figure
from cbtop.comparison.part_diff import Balance, PartDiff, PlaceDiff
from cbtop.comparison.phase_rates import TOKENS
from cbtop.comparison.run_diff import RunDiff, diff, diff_of
from cbtop.comparison.run_sets import together
from cbtop.comparison.runs import Run, TooShort
from cbtop.comparison.threshold_grammar import parse
from cbtop.comparison.thresholds import judge
from cbtop.protocol.vocabulary import BrickCategory
from tests.cbtop.comparison.made_runs import STEADY, Noise, made_run, place_of, steady
from tests.representatives import first_by_default


def test_where_a_threshold_stands_is_said_with_what_became_of_it() -> None:
    for text in (
        "loss==0",
        "tokens_per_sec>=1",
        "tokens_per_sec>=1x",
        "unattributed<=1%",
        "RmsNorm<=1s",
        "RmsNorm<=9x",
    ):
        assert [one.where for one in judge(parse(text, ("gate.txt", 7)), steady())] == [("gate.txt", 7)]
        assert [one.where for one in judge(parse(text), steady())] == [("", 1)]
    assert {one.where for one in default_gate(steady())} == {("", 1)}


def outcomes_of(base: Run, now: Run) -> dict[str, Judged]:
    """Return the results of the default gate by rule. If a rule has several results, the first one is returned."""
    found: dict[str, Judged] = {}
    for one in default_gate(diff(base, now)):
        found.setdefault(one.rule, one)
    return found


BRICKS, RATE = "decode: no brick slower beyond noise", "decode: no fewer tokens/s beyond noise"


STEP = "decode: no longer step beyond noise"
STEADY_RULES = ("decode: no more drift beyond noise", "decode: no longer p99 beyond noise")


def gate_of(**changed: object) -> dict[str, Judged]:
    """Return the results of the default gate by rule, for the comparison `steady` with `changed` figures."""
    (part,) = steady().parts
    changed_part = replace(part, **changed)  # type: ignore[arg-type]
    return {one.rule: one for one in default_gate(found_of(changed_part))}


def found_of(*parts: PartDiff) -> RunDiff:
    """Return the comparison `steady` with these parts (phases). Its time per token is taken from the first part."""
    (rate,) = steady().rates
    return replace(steady(), parts=parts, rates=(replace(rate, time_us=parts[0].wall, parts=parts[:1]),))


def with_wall(run: Run, wall: Figure, **changed: object) -> Run:
    """Set the time per token of a run that has one part. Returns the new run."""
    (part,), (rates,) = run.parts, run.rates
    times_us = {TOKENS: replace(wall, median_us=None)}
    part = replace(part, wall_us=wall, **changed)  # type: ignore[arg-type]
    return replace(run, parts=(part,), rates=(replace(rates, times_us=times_us),))


def places_as(one_change: Change | None, **changed: object) -> tuple[PlaceDiff, ...]:
    """Return the places of `steady` (bricks, and bricks of a layer). Each place gets `one_change` as its change."""
    (part,) = steady().parts
    return tuple(replace(one, change=one_change, **changed) for one in part.places)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("half", "outcome"),
    [(10.0, Outcome.HOLDS), (10.1, Outcome.UNSURE), (50.0, Outcome.UNSURE), (50.1, Outcome.UNKNOWN)],
)
def test_bricks_are_unsure_if_a_tenth_would_be_unseen_and_unknown_if_a_half(half: float, outcome: Outcome) -> None:
    judged = gate_of(places=places_as(Change(100.0, 100.0, half)))[BRICKS]
    assert judged.outcome is outcome
    assert (f"only a change of {half} % would have been found" in judged.said) is (outcome is not Outcome.HOLDS)


def test_bricks_are_judged_without_timed_calls_but_not_if_no_clock_tells() -> None:
    sure = Change(100.0, 100.0, 1.0)
    assert gate_of(places=places_as(sure, p50=None))[BRICKS].outcome is Outcome.HOLDS
    assert gate_of(places=places_as(None))[BRICKS].outcome is Outcome.UNKNOWN
    too_short = tuple(replace(one, is_below_resolution=one.p50 is not None) for one in places_as(sure))
    judged = gate_of(places=too_short)[BRICKS]
    assert (judged.outcome, judged.said) == (Outcome.UNKNOWN, "the clock is too coarse to time any brick")


@pytest.mark.parametrize(
    ("now", "half", "outcome"),
    [
        (100.0, 10.0, Outcome.HOLDS),
        (100.0, 10.1, Outcome.UNSURE),
        (110.0, 20.0, Outcome.UNSURE),
        (110.1, 20.0, Outcome.UNKNOWN),
        (100.0, 100.0, Outcome.UNSURE),
        (100.0, 100.1, Outcome.UNKNOWN),
        (90.0, 9.0, Outcome.HOLDS),
    ],
)
def test_a_step_holds_if_a_tenth_would_be_found_and_is_unknown_if_it_may_be(
    now: float, half: float, outcome: Outcome
) -> None:
    assert gate_of(typical=Change(100.0, now, half))[STEP].outcome is outcome


@pytest.mark.parametrize(
    ("now", "half", "outcome", "outcome_alone"),
    [
        (100.0, 50.0, Outcome.HOLDS, Outcome.HOLDS),
        (100.0, 50.1, Outcome.UNSURE, Outcome.UNSURE),
        (103.0, 10.0, Outcome.HOLDS, Outcome.HOLDS),
        (103.1, 10.0, Outcome.UNSURE, Outcome.UNSURE),
        (90.0, 10.0, Outcome.HOLDS, Outcome.HOLDS),
        (125.0, 30.0, Outcome.UNSURE, Outcome.UNSURE),
        (125.1, 30.0, Outcome.UNKNOWN, Outcome.UNKNOWN),
        (100.0, 100.0, Outcome.UNSURE, Outcome.UNSURE),
        # No typical step is known here, so it cannot be used to exclude a slowdown.
        (100.0, 100.1, Outcome.UNSURE, Outcome.UNKNOWN),
    ],
)
def test_tokens_a_second_hold_where_twice_as_long_a_token_would_be_found(
    now: float, half: float, outcome: Outcome, outcome_alone: Outcome
) -> None:
    wall = Change(100.0, now, half)
    assert gate_of(wall=wall)[RATE].outcome is outcome
    alone = gate_of(wall=wall, typical=None)
    assert (alone[RATE].outcome, STEP in alone) == (outcome_alone, False)


def test_a_few_longer_steps_are_shown_with_cause_and_unknown_from_a_quarter() -> None:
    for now, outcome in ((125.0, Outcome.UNSURE), (126.0, Outcome.UNKNOWN)):
        judged = gate_of(wall=Change(100.0, now, 5.0, (50.0, 50.0)))[RATE]
        assert (judged.outcome, judged.guilty) == (outcome, "")
        assert "; but the typical step is as long as before: fewer than half became longer (" in judged.said


def test_steps_that_fail_are_more_where_three_in_a_hundred_more_do() -> None:
    (part,) = steady().parts
    for failed, is_said in ((3, False), (4, True)):
        judged = gate_of(now=replace(part.now, steps=100, failed=failed))
        assert ("decode: no more steps that fail" in judged) is is_said


def test_what_all_share_is_reported_once_and_the_other_parts_are_judged() -> None:
    (part,) = steady().parts
    rule = "decode: nothing slower beyond noise"
    for shared, outcome in ((1.0995, Outcome.UNSURE), (1.125, Outcome.UNKNOWN)):
        all_alike = Change(1000.0, 1000.0 * shared, 10.0)
        as_others = replace(all_alike, own=Change(1000.0, 1000.0, 5.0))
        unsure = replace(all_alike, half=500.0)
        unseen = places_as(replace(as_others, half=500.0))
        longer = replace(part, shared=shared, wall=all_alike, typical=all_alike, places=places_as(as_others))
        for one in (
            longer,
            replace(longer, places=unseen, typical=unsure),
            replace(longer, places=unseen, wall=unsure),
            replace(longer, typical=None, wall=unsure),
        ):
            found = found_of(one, replace(part, now=replace(part.now, phase="prefill"), batch_name="prefill"))
            judged = default_gate(found)
            of_part = [each for each in judged if each.about == "decode"]
            assert [each.outcome for each in of_part if each.rule not in STEADY_RULES] == [outcome]
            assert f"every brick takes {shared:.2f} times as long" in judged[0].said
            assert judged[0].rule == rule
            assert {each.outcome for each in judged if each.about == "prefill"} == {Outcome.HOLDS}
        nothing_shows = replace(longer, places=unseen, typical=unsure, wall=unsure)
        assert rule not in {one.rule for one in default_gate(found_of(nothing_shows))}


def test_a_new_brick_is_guilty_if_it_takes_over_half_of_what_a_token_grew() -> None:
    (part,) = steady().parts
    for us, now_us, is_guilty in ((51.0, 1100.0, True), (50.0, 1100.0, False), (51.0, 1000.0, False)):
        new = PlaceDiff(("Extra", BrickCategory.FFN), None, None, PlaceTimes(Figure(us, 1.0, 20)))
        judged = gate_of(places=(*part.places, new), wall=Change(1000.0, now_us, 5.0))[BRICKS]
        assert (judged.guilty == "Extra") is is_guilty
        assert judged.outcome is (Outcome.BROKEN if is_guilty else Outcome.HOLDS)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("between_steps", "between steps"),
        ("between_bricks", "between bricks"),
        ("not_recorded", "steps not recorded inside"),
    ],
)
@pytest.mark.parametrize(("grown", "is_named"), [(51.0, True), (50.0, False)])
def test_what_more_than_half_of_the_longer_time_is_is_named_as_its_cause(
    where: str, name: str, grown: float, is_named: bool
) -> None:
    (part,) = steady().parts
    before, longer = (900.0, 900.0), Change(1000.0, 1100.0, 5.0)
    balance = replace(Balance((1000.0, 1100.0), before, before, before, before), **{where: (900.0, 900.0 + grown)})
    judged = gate_of(wall=longer, typical=None, balance=balance)[RATE]
    assert judged.outcome is Outcome.BROKEN
    most = max((one for one in part.bricks if one.brick != BETWEEN_BRICKS), key=lambda one: one.delta_us)
    assert judged.guilty == (name if is_named else f"no single brick; most {most.name}")
    # If the step has no bricks, the result names the part of the balance that has grown most.
    assert gate_of(wall=longer, typical=None, balance=balance, places=())[RATE].guilty == name


def test_the_part_of_a_longer_typical_step_in_no_call_lies_between_steps() -> None:
    (part,) = steady().parts
    balance = Balance(*[(1000.0, 1000.0)] * 5)
    for inside_us, is_between in ((49.0, True), (51.0, False)):
        step = replace(part.step, call=Change(900.0, 900.0 + inside_us, 1.0))
        judged = gate_of(typical=Change(1000.0, 1100.0, 5.0), step=step, balance=balance)[STEP]
        assert judged.outcome is Outcome.BROKEN
        assert (judged.guilty == "between steps") is is_between
        assert judged.said.startswith("1.100× ± 0.005, 1.00 ms → 1.10 ms for a typical token, ")
    unknown = gate_of(typical=Change(1.0, 2.0, 0.005), step=replace(part.step, call=None), balance=balance)
    assert unknown[STEP].guilty == "between steps"
    assert unknown[STEP].said == (
        "2.000× ± 0.005, 1.00 µs → 2.00 µs for a typical token, with the time between steps"
    )


def test_with_several_tokens_a_step_each_side_counts_its_own() -> None:
    (part,) = steady().parts
    before, now = (replace(one, tokens=tokens) for one, tokens in ((part.before, 8.0), (part.now, 7.9)))
    # A step takes 80 µs, as before. A token takes longer, because the batch has fewer tokens (7.9 instead of 8).
    step = replace(part.step, call=Change(80.0, 80.0, 0.01), change=Change(10.0, 10.0, 0.01))
    more = Change(11.0, 11.0 + 80 / 7.9 - 10, 0.01, least_percent=1.0)
    balance = Balance(*[(10.0, 10.0)] * 5)
    for slower, is_between in ((more, False), (replace(more, now=12.0), True)):
        judged = gate_of(before=before, now=now, typical=slower, step=step, balance=balance)[STEP]
        assert (judged.outcome, judged.guilty == "between steps") == (Outcome.BROKEN, is_between)


@pytest.mark.slow
def test_where_no_change_would_have_been_found_nothing_holds() -> None:
    """A rule holds only if the comparison could have found a slowdown.

    If each brick varies by 10 %, a slowdown of a brick by 10 % cannot be found. If each brick varies by 50 %, not
    even a brick that takes twice as long can be found.
    """
    for brick, outcome in ((0.1, Outcome.UNSURE), (0.5, Outcome.UNKNOWN)):
        noise = Noise(brick=brick, memory=0.98)
        found = outcomes_of(made_run(1, noise), made_run(2, noise))
        assert found[BRICKS].outcome is outcome
        assert "only a change of " in found[BRICKS].said
    steady = outcomes_of(made_run(1, STEADY), made_run(2, STEADY))
    assert {one.outcome for one in steady.values()} == {Outcome.HOLDS}


def test_fewer_tokens_a_second_within_a_wide_interval_are_unsure() -> None:
    """A lower rate of tokens/s is unsure in two cases.

    In the first, the loss is larger than the usual difference of two runs. In the second, the interval is so wide
    that a loss of one half cannot be found.
    """
    base, now = made_run(1, STEADY), made_run(2, STEADY)
    assert outcomes_of(base, now)[RATE].outcome is Outcome.HOLDS
    for longer, error, outcome in (
        (1.0, 0.03, Outcome.HOLDS),
        (1.05, 0.03, Outcome.UNSURE),
        (1.0, 0.2, Outcome.UNSURE),
        (1.3, 0.2, Outcome.UNKNOWN),
    ):
        (part,) = now.parts
        wall = replace(part.wall_us, mean=longer * base.parts[0].wall_us.mean, error=error * part.wall_us.mean)
        found = outcomes_of(base, with_wall(now, wall))
        assert found[RATE].outcome is outcome


def test_a_step_with_a_too_wide_interval_is_unknown_and_says_what_to_do() -> None:
    base, now = made_run(1, STEADY), made_run(2, STEADY)
    (part,) = now.parts
    typical, rate = part.typical_us, part.wall_us
    assert typical
    for longer, error, outcome in (
        (1.0, 0.03, Outcome.UNSURE),
        (1.12, 0.05, Outcome.UNKNOWN),
        (1.0, 0.5, Outcome.UNKNOWN),
    ):
        changed = replace(typical, mean=longer * typical.mean, error=error * typical.mean)
        found = outcomes_of(base, replace(now, parts=(replace(part, typical_us=changed),)))
        assert found[STEP].outcome is outcome
        assert (outcome is Outcome.UNKNOWN) == ("such as step.p50<=1.05x" in found[STEP].said)
    # Neither run has a typical step here, so only tokens/s can decide.
    wide = with_wall(now, replace(rate, error=0.5 * rate.mean), typical_us=None)
    found = outcomes_of(base, wide)
    assert STEP not in found
    assert found[RATE].outcome is Outcome.UNKNOWN
    assert "more or longer runs (--learn 6)" in found[RATE].said


@first_by_default(
    ("planted", "guilty"),
    [({}, ""), ({"unnamed_us": 1_000.0}, "between bricks"), ({"between_steps_us": 2_030.0}, "between steps")],
)
def test_time_in_no_brick_and_between_steps_is_found_even_if_pauses_hide_it(
    planted: dict[str, float], guilty: str
) -> None:
    """One step in 20 pauses for 20 ms. With three such runs, a loss of tokens/s below one half cannot be shown."""
    paused = Noise(pauses=0.002)
    found = diff(together([made_run(seed, paused) for seed in (11, 12, 13)]), made_run(14, paused, **planted))
    judged = {one.rule: one for one in default_gate(found)}
    assert found.parts[0].wall.half_percent > 50  # type: ignore[operator]
    assert judged[STEP].guilty == guilty
    assert judged[STEP].outcome is (Outcome.BROKEN if guilty else Outcome.HOLDS)
    assert judged[RATE].outcome is not Outcome.BROKEN


def test_what_the_clock_cannot_tell_holds_nowhere() -> None:
    base, now = (replace(made_run(seed), clock_resolution_us=1e6) for seed in (1, 2))
    assert outcomes_of(base, now)[BRICKS].outcome is Outcome.UNKNOWN


def test_fewer_tokens_a_second_are_said_where_the_typical_step_takes_as_long() -> None:
    """40 % of the calls of one brick take five times as long.

    So the mean step takes 5 % longer, but the typical call of this brick takes as long as before.
    """
    quiet = replace(STEADY, memory=0)
    (judged,) = [
        one
        for one in default_gate(diff(made_run(1, quiet), made_run(2, replace(quiet, bimodal=4.0))))
        if one.rule == RATE
    ]
    assert (judged.outcome, judged.guilty) == (Outcome.UNSURE, "")
    assert "the typical step is as long as before" in judged.said


def test_a_new_brick_is_guilty_where_a_token_takes_longer_for_it() -> None:
    base, now = made_run(1, STEADY), made_run(2, STEADY)
    (part,) = base.parts
    down_us = 6 * 240.0
    places = {place: times for place, times in part.places.items() if not place[0] or place[0][0] != "DownProjection"}
    wall = replace(part.wall_us, mean=part.wall_us.mean - down_us, median_us=(part.wall_us.median_us or 0) - down_us)
    base = with_wall(base, wall, places=places)
    found = outcomes_of(base, now)
    assert (found[BRICKS].outcome, found[BRICKS].guilty) == (Outcome.BROKEN, "DownProjection")
    assert found[BRICKS].said.startswith("new: +14")
    assert (found[RATE].outcome, found[RATE].guilty) == (Outcome.BROKEN, "DownProjection")
    assert "decode: new: DownProjection" in diff(base, now).notes
    assert "decode: no longer there: DownProjection" in diff(now, base).notes


@pytest.mark.parametrize(
    ("longer_us", "gone_us", "is_known"),
    [(300.0, 0.0, False), (300.0, 300.0, True), (0.0, 0.0, True), (90.0, 0.0, True)],
)
def test_a_new_brick_in_some_steps_is_no_pass_if_it_takes_much_time(
    longer_us: float, gone_us: float, *, is_known: bool
) -> None:
    """The typical step takes as long as before.

    A brick that was renamed or split must not count as additional time.
    """
    (part,) = steady().parts
    down = place_of(part, "DownProjection")
    assert down.now
    assert down.calls
    time = replace(down.now.time, mean=longer_us or 300.0)
    new = replace(down, before=None, now=replace(down.now, time=time), calls=replace(down.calls, is_new=True))
    gone_time = replace(down.now.time, mean=gone_us)
    gone = replace(down, before=replace(down.now, time=gone_time), now=None, calls=None)
    wall = Change(2000.0, 2000.0 + longer_us, 500.0)
    judged = gate_of(places=(*part.places, new, *([gone] if gone_us else [])), wall=wall)[BRICKS]
    assert judged.outcome is (Outcome.HOLDS if is_known else Outcome.UNKNOWN)
    if not is_known:
        assert judged.said == "new: DownProjection, 13.0 % of the time; the typical token is not longer beyond noise"


def test_a_phase_that_the_new_run_lacks_is_no_pass() -> None:
    base, now = made_run(1, STEADY), made_run(2, STEADY)
    (part,) = base.parts
    base = replace(base, parts=(part, replace(part, phase="prefill")))
    (judged,) = [one for one in default_gate(diff(base, now)) if one.outcome is not Outcome.HOLDS]
    assert (judged.outcome, judged.about, judged.said) == (
        Outcome.UNKNOWN,
        "prefill",
        "the new run has no such steps",
    )
    now = replace(now, too_short=(TooShort("prefill", 3, 20),))
    (judged,) = [one for one in default_gate(diff(base, now)) if one.outcome is not Outcome.HOLDS]
    assert judged.said == "too few steps in the new run: 3 steps, of 20 needed"


def test_of_a_phase_that_was_not_compared_it_is_said_why() -> None:
    base, now = made_run(1, STEADY), made_run(2, STEADY)
    (part,) = now.parts
    cached = replace(part, phase="prefill", cached=100.0, cached_least=90.0, cached_most=110.0)
    far = replace(cached, cached=900.0, cached_least=890.0, cached_most=910.0)
    for before, after, said in (
        (cached, replace(cached, work=(9, 1)), "no batch is in both runs"),
        (cached, far, "prefill: other KV lengths: 890 to 910 positions cached, 90 to 110 in the baseline"),
    ):
        few = (TooShort("verify", 3, 20),)
        found = diff(replace(base, parts=(part, before)), replace(now, parts=(part, after), too_short=few))
        judged = next(one for one in default_gate(found) if one.about == "prefill")
        assert (judged.rule, judged.outcome, judged.said) == ("prefill: is compared", Outcome.UNKNOWN, said)


def test_work_of_the_new_run_alone_is_no_pass_if_it_takes_much_of_its_time() -> None:
    base, now = made_run(1, STEADY), made_run(2, STEADY)
    (part,) = now.parts
    for steps, outcomes in ((part.steps // 10, []), (part.steps // 8, [Outcome.UNKNOWN])):
        found = diff(base, replace(now, parts=(part, replace(part, phase="verify", steps=steps))))
        judged = default_gate(found)
        assert [one.outcome for one in judged if one.about == "verify"] == outcomes
        assert {one.rule for one in judged if one.about == "verify"} <= {"verify: is compared"}
        relative = judge(parse("tokens_per_sec>=0.9x"), found)
        assert {one.rule for one in relative} == {"tokens_per_sec>=0.9x"}
        assert [one.outcome for one in relative] == [Outcome.HOLDS, *outcomes]
        assert [one.outcome for one in judge(parse("decode.step<=1.1x"), found)] == [Outcome.HOLDS]
    assert judged[-1].said == (
        "not judged: 11.1 % of the new run's time: only the new run has verify (30 steps of about 1 token)"
    )


def test_steps_too_few_to_compare_are_no_pass_if_they_take_much_of_its_time() -> None:
    base, now = made_run(1, STEADY), made_run(2, STEADY)
    (part,) = now.parts
    for share, outcomes in ((0.05, []), (0.5, [Outcome.UNKNOWN])):
        few = TooShort("compact", 10, 20, share * part.time_us)
        judged = default_gate(diff(base, replace(now, too_short=(few,))))
        assert [one.outcome for one in judged if one.about == "compact"] == outcomes
    assert judged[-1].said == (
        "not judged: 33.3 % of the new run's time: too few compact steps: 10 steps, of 20 needed; "
        "use longer runs, or judge one phase, as decode"
    )
    for runs in (1, 6):
        as_before = [replace(made_run(seed, STEADY), too_short=(replace(few, steps=9),)) for seed in range(runs)]
        judged = default_gate(diff(together(as_before), replace(now, too_short=(few,))))
        assert "compact" not in {one.about for one in judged}


@pytest.mark.parametrize("runs", [1, 6])
def test_a_run_of_which_more_steps_fail_is_no_pass_however_fast_it_is(runs: int) -> None:
    bases, now = [made_run(seed, STEADY) for seed in range(runs)], made_run(7, STEADY)
    (part,) = now.parts
    few, many = part.steps * (3 if runs == 1 else 1) // 100, part.steps // 10
    for failed, outcomes in ((few, []), (many, [Outcome.UNKNOWN])):
        found = diff(together(bases), replace(now, parts=(replace(part, failed=failed),)))
        judged = {one.rule: one for one in default_gate(found)}
        rule = "decode: no more steps that fail"
        assert [one.outcome for one in judged.values() if one.rule == rule] == outcomes
        assert f"decode: failed: {failed} steps of 240, 0 of {240 * runs:,} before" in found.notes
    assert judged[rule].said.startswith(f"24 of 240 steps failed, 0 of {240 * runs:,} before")
    as_before = replace(part, failed=many)
    both = diff(replace(bases[0], parts=(replace(bases[0].parts[0], failed=many),)), replace(now, parts=(as_before,)))
    assert rule not in {one.rule for one in default_gate(both)}


@pytest.mark.parametrize(("longer", "outcome"), [(1.06, Outcome.UNSURE), (1.2, Outcome.UNKNOWN)])
def test_a_shared_slowdown_may_be_the_machine_unless_runs_give_its_scatter(longer: float, outcome: Outcome) -> None:
    bases, now = [made_run(seed, STEADY) for seed in range(6)], made_run(6, STEADY, all_longer=longer)
    judged, *others = default_gate(diff(bases[0], now))
    assert judged.outcome is outcome
    assert [(one.rule, one.outcome) for one in others] == [(rule, Outcome.HOLDS) for rule in STEADY_RULES]
    assert "every brick takes 1." in judged.said
    bricks, *whole = (one for one in default_gate(diff(together(bases), now)) if one.rule not in STEADY_RULES)
    for one in whole:
        assert (one.outcome, one.guilty) == (Outcome.BROKEN, "no single brick; most DownProjection")
    assert [one.rule for one in whole] == [STEP, RATE]
    assert bricks.said.startswith("every brick takes 1.")


def test_what_most_bricks_share_and_others_do_not_is_no_machines() -> None:
    """All bricks except the norms take 20 % longer. This is a change of the program, not of the machine."""
    base, now = made_run(1, STEADY), made_run(2, STEADY, all_longer=1.2)
    (part,) = now.parts
    (was,) = base.parts
    norms = {place: times for place, times in was.places.items() if place[0] and place[0][0] == "RmsNorm"}
    found = diff(base, replace(now, parts=(replace(part, places={**part.places, **norms}),)))
    assert not found.parts[0].is_shared
    assert Outcome.BROKEN in {one.outcome for one in default_gate(found)}


def test_a_slower_brick_has_its_ratio_alone_and_next_to_others_and_its_cost() -> None:
    (part,) = steady().parts
    slower = replace(
        place_of(part, "DownProjection"),
        before=PlaceTimes(Figure(1000.0, 1.0, 20)),
        now=PlaceTimes(Figure(1225.0, 1.0, 20)),
        change=Change(1000.0, 1200.0, 10.0),
        p50=Change(240.0, 290.0, 1.0),
    )
    beside = replace(slower, change=Change(1000.0, 1200.0, 300.0, own=Change(1000.0, 1100.0, 20.0)))
    for place, said in (
        (slower, "1.200× ± 0.010 (p50 240.0 µs → 290.0 µs), +225.0 µs/token"),
        (beside, "1.100× ± 0.020 relative to all others (p50 240.0 µs → 290.0 µs), +225.0 µs/token"),
    ):
        judged = gate_of(places=tuple(place if one.name == place.name else one for one in part.places))[BRICKS]
        assert (judged.outcome, judged.about) == (Outcome.BROKEN, "decode: DownProjection")
        assert (judged.guilty, judged.said) == ("DownProjection", said)


def test_what_has_made_a_step_longer_though_no_brick_has_is_named() -> None:
    base, now = made_run(1, STEADY), made_run(2, STEADY)
    (part,) = now.parts
    wall = replace(part.wall_us, mean=1.2 * part.wall_us.mean, median_us=1.2 * (part.wall_us.median_us or 0))
    found = outcomes_of(base, with_wall(now, wall))
    assert (found[RATE].outcome, found[RATE].guilty) == (Outcome.BROKEN, "between steps")
    assert found[BRICKS].outcome is Outcome.HOLDS


@pytest.mark.parametrize(("base_runs", "outcome"), [(1, Outcome.UNKNOWN), (2, Outcome.UNKNOWN), (3, Outcome.BROKEN)])
def test_only_what_three_base_runs_or_more_tell_breaks_a_default_gate(base_runs: int, outcome: Outcome) -> None:
    judged = [Judged("rule", "decode", one, "said") for one in (Outcome.BROKEN, Outcome.HOLDS)]
    assert [one.outcome for one in known_to_scatter(judged, base_runs)] == [outcome, Outcome.HOLDS]


def test_a_break_in_one_of_two_new_runs_is_unsure_and_in_both_is_broken() -> None:
    def said(about: str, outcome: Outcome) -> Judged:
        return Judged("no brick slower", about, outcome, f"{about}: 1.2×", brick=about)

    first = [said("A", Outcome.BROKEN), said("B", Outcome.BROKEN), said("C", Outcome.HOLDS)]
    second = [said("A", Outcome.BROKEN), said("C", Outcome.BROKEN), said("D", Outcome.UNKNOWN)]
    found = {one.about: (one.outcome, one.said) for one in confirmed(first, second)}
    once = "; only in one of two runs"
    assert found == {
        "A": (Outcome.BROKEN, "A: 1.2×"),
        "B": (Outcome.UNSURE, f"B: 1.2×{once}"),
        "C": (Outcome.UNSURE, f"C: 1.2×{once}"),
        "D": (Outcome.UNKNOWN, "D: 1.2×"),
    }
    nothing = [said("A", Outcome.HOLDS)]
    assert [one.outcome for one in confirmed(first, nothing)] == [Outcome.UNSURE, Outcome.UNSURE]


def test_two_new_runs_give_no_two_rows_that_contradict_each_other() -> None:
    def said(about: str, outcome: Outcome, brick: str = "") -> Judged:
        return Judged("no brick slower", about, outcome, "said", brick=brick)

    first = [said("decode: A in Layer 2", Outcome.BROKEN, "A"), said("prefill", Outcome.HOLDS)]
    second = [said("decode", Outcome.HOLDS), said("prefill", Outcome.HOLDS)]
    rows = {(one.about, one.outcome) for one in confirmed(first, second)}
    assert rows == {("decode: A in Layer 2", Outcome.UNSURE), ("prefill", Outcome.HOLDS)}


def test_a_slower_brick_shows_no_figure_that_became_smaller() -> None:
    (part,) = steady().parts
    down = place_of(part, "DownProjection")
    assert down.before
    assert down.now
    change = Change(100.0, 110.0, 300.0, own=Change(100.0, 231.9, 97.0))
    calls = CallsChange(1.0, 2.0, 0.0, is_exact=True)
    now = replace(down.now, time=replace(down.now.time, mean=down.before.time.mean - 21.4))
    place = replace(down, change=change, calls=calls, p50=Change(150.0, 120.1, 1.0), now=now)
    judged = gate_of(places=tuple(place if one.name == place.name else one for one in part.places))[BRICKS]
    assert judged.said == "2.319× ± 0.970 relative to all others, 2 calls a step instead of 1"


def test_where_each_of_two_new_runs_breaks_something_else_neither_is_known() -> None:
    """Two new runs fail for different reasons.

    Both runs are slower than the baseline, so the result is not a pass either.
    """
    first = [Judged("no brick slower", "decode: A", Outcome.BROKEN, "1.2×", brick="A")]
    for second in (replace(first[0], about="decode: B", brick="B"), replace(first[0], rule="no longer step")):
        found = confirmed(first, [second])
        assert [one.outcome for one in found] == [Outcome.UNKNOWN] * 2
        assert {one.said for one in found} == {
            "1.2×; only in one of two runs, and each is slower in a different place"
        }


@pytest.mark.slow
def test_a_brick_slower_in_two_layers_is_confirmed_whichever_a_run_names() -> None:
    bases = [made_run(seed, Noise(run=0.005)) for seed in range(6)]
    first, second = (
        default_gate(diff_of(bases, [made_run(seed, Noise(run=0.005), slower=1.2, in_layer=layer)]))
        for seed, layer in ((7, 1), (8, 3))
    )
    assert [one.about for one in first if one.outcome is Outcome.BROKEN] == ["decode: DownProjection in Layer 1"]
    (broken,) = [one for one in confirmed(first, second) if one.outcome is Outcome.BROKEN]
    assert broken.guilty == "DownProjection in Layer 3"


def test_if_the_second_run_failed_nothing_is_broken_and_nothing_lost() -> None:
    first = [Judged("a", "x", outcome, "1.1×", "guilty") for outcome in Outcome]
    *kept, reason = unconfirmed(first, "killed")
    outcomes = {before.outcome: now.outcome for before, now in zip(first, kept, strict=True)}
    assert outcomes == {one: one for one in Outcome} | {Outcome.BROKEN: Outcome.UNKNOWN}
    assert [now.guilty for now in kept] == ["guilty"] * len(Outcome)
    changed = [now.said for before, now in zip(first, kept, strict=True) if now != before]
    assert changed == ["1.1×; not confirmed by a second run"]
    assert (reason.outcome, reason.said) == (Outcome.UNKNOWN, "the second run failed: killed")
