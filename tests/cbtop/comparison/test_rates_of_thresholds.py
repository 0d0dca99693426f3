"""Tests of thresholds on rates, for steps of one batch size and for steps of several batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import exp

import numpy as np
import pytest

from cbtop.comparison.batches import batch_text, batches_text, has_batch, part_names
from cbtop.comparison.default_gate import default_gate
from cbtop.comparison.items import BETWEEN_BRICKS, WHOLE_STEP
from cbtop.comparison.judged import Judged, Outcome, must_be_sure
from cbtop.comparison.noise import Figure, half_of
from cbtop.comparison.phase_rates import PhaseRates
from cbtop.comparison.rate_diff import rate_diff
from cbtop.comparison.run_diff import RunDiff, diff
from cbtop.comparison.runs import Run, StepGroup
from cbtop.comparison.threshold_grammar import parse
from cbtop.comparison.thresholds import judge
from cbtop.errors import UsageError
from cbtop.units import duration, number
from tests.cbtop.comparison.made_runs import STEADY, Noise, made_run

QUIET = Noise(pauses=0, memory=0.0, machine=0.0, brick=0.0)


def batches(seed: int, *sizes: int, noise: Noise = STEADY, steps: int = 240) -> Run:
    """Return a run whose decode steps have these batch sizes. `made_run` simulates the steps of each size."""
    runs = [made_run(1000 * seed + size, noise, steps) for size in sizes]
    parts = [of_batch(run.parts[0], size) for run, size in zip(runs, sizes, strict=True)]
    return replace(runs[0], key=f"here:{seed}:1:0", parts=tuple(parts))


def of_batch(part: StepGroup, size: int) -> StepGroup:
    return replace(part, work=(size, size), tokens=float(size), sequences=float(size))


def judged_as(found: RunDiff, text: str) -> Judged:
    (one,) = judge(parse(text), found)
    return one


def with_rates(run: Run, *rates: PhaseRates) -> Run:
    return replace(run, rates=rates)


def rates(phase: str, a_token_us: float, **others: float) -> PhaseRates:
    times_us = {"tokens_per_sec": a_token_us, "steps_per_sec": a_token_us, **others}
    return PhaseRates(phase, 240, {name: Figure(us, us / 1e3, 30) for name, us in times_us.items()})


def test_a_batch_is_named_where_a_phase_has_several() -> None:
    (part,) = made_run(1).parts
    of = {
        (6, 6): "decode, batch 6",
        (2, None): "decode, batch 2",
        (8, 8): "decode, batch 8 to 9",
        (512, 1): "decode, batch 1, 512 to 639 tokens",
        (640, 1): "decode, batch 1, 640 tokens",
        (None, 1): "decode, batch 1, tokens not reported",
        (None, None): "decode",
    }
    parts = [replace(part, work=work) for work in of]
    means = [(6.0, 6.0), (2.0, None), (8.4, 8.4), (600.0, 1.0), (640.0, 1.0), (None, 1.0), (None, None)]
    parts = [replace(one, tokens=tokens, sequences=n) for one, (tokens, n) in zip(parts, means, strict=True)]
    assert part_names(parts) == {("decode", work): name for work, name in of.items()}
    alone = replace(parts[0], phase="verify")
    assert part_names([*parts, alone])["verify", (6, 6)] == "verify"
    two = [part for part in parts if part.work in ((512, 1), (640, 1))]
    assert list(part_names(two).values()) == [of[part.work] for part in two]
    assert batches_text(parts) == "1, 2, 6, 8 to 9"
    assert batches_text(parts[-1:]) == "none"
    assert [has_batch(parts[2], batch) for batch in (7, 8, 9, 10)] == [False, True, True, False]
    assert not has_batch(parts[-1], 0)
    assert batch_text(replace(parts[2], sequences=9.0)) == "9"


@pytest.mark.slow
def test_a_threshold_on_a_batch_is_on_no_other_and_a_wrong_one_lists_them() -> None:
    found = diff(batches(1, 6, 2), batches(2, 6, 2))
    for text, about in (
        ("decode[batch=6].step.p50<=1s", "decode, batch 6: step"),
        ("decode[batch=2].RmsNorm@1.p50<=9x", "decode, batch 2: RmsNorm in Layer 1"),
        ("decode[batch=2].tokens_per_sec>=1", "decode, batch 2"),
        ("decode[batch=6].samples_per_sec>=0.1x", "decode, batch 6"),
        ("decode[batch=6].in_steps>=0.1x", "decode, batch 6"),
        ("decode[batch=6].unattributed<=99%", "decode, batch 6"),
    ):
        judged = judged_as(found, text)
        assert (judged.about, judged.outcome) == (about, Outcome.HOLDS)
    assert [one.about for one in judge(parse("decode.step<=1s"), found)] == [
        "decode, batch 6: step",
        "decode, batch 2: step",
    ]
    with pytest.raises(UsageError, match=r"there is no batch 30 in decode; there are 2, 6$"):
        judge(parse("decode[batch=30].step<=1s"), found)
    with pytest.raises(UsageError, match="there is no phase 'prefill'"):
        judge(parse("prefill[batch=6].step<=1s"), found)


def test_a_batch_that_the_baseline_lacks_is_not_compared_and_no_wrong_usage() -> None:
    found = diff(batches(1, 2), batches(2, 6, 2))
    judged = judge(parse("decode[batch=6].step<=2x"), found)[0]
    assert (judged.about, judged.outcome) == ("decode, batch 6", Outcome.UNKNOWN)
    assert judged.said == "the baseline has too few steps of this batch"
    assert judged_as(found, "decode[batch=6].step<=1s").outcome is Outcome.HOLDS
    assert judge(parse("decode[batch=2].step<=2x"), found)[0].outcome is Outcome.HOLDS
    with pytest.raises(UsageError, match="there is no brick 'steps_per_sec'"):
        judge(parse("steps_per_sec>=0.9x"), found)


def test_the_rate_of_a_batch_is_of_its_own_steps_and_the_time_before_them() -> None:
    found = diff(batches(1, 6, 2), batches(2, 6, 2))
    (six,) = [part for part in found.parts if part.now.work == (6, 6)]
    rate = 1e6 / six.now.wall_us.mean
    part = half_of(six.now.wall_us) / six.now.wall_us.mean
    for off, outcome in ((-1.1, Outcome.HOLDS), (-0.9, Outcome.UNSURE), (0.9, Outcome.UNSURE), (1.1, Outcome.BROKEN)):
        assert judged_as(found, f"decode[batch=6].tokens_per_sec>={rate * exp(off * part)}").outcome is outcome
    # One step generates one token for each of six sequences, so a sample has six tokens.
    assert judged_as(found, "decode[batch=6].samples_per_sec>=1").said.startswith(f"{rate:.1f} samples/s (")
    assert six.step.now
    in_steps = 1e6 / six.step.now.time.mean
    said = judged_as(found, "decode[batch=6].in_steps>=1").said
    assert said.startswith(f"{in_steps:.1f} tokens/s without pauses (")
    said = judged_as(found, "decode[batch=6].tokens_per_sec>=1x").said
    assert said.startswith(f"{six.wall.before / six.wall.now:.2f}× (")
    assert said.endswith(f"), {number(1e6 / six.wall.before)} → {number(1e6 / six.wall.now)} tokens/s")


def test_a_batch_without_tokens_or_sequences_has_no_such_rate() -> None:
    (part,) = made_run(1, STEADY).parts
    few = replace(of_batch(part, 6), unit="step", tokens=None, work=(None, 6))
    found = diff(*(replace(made_run(seed, STEADY), parts=(few,)) for seed in (1, 2)))
    assert judged_as(found, "decode[batch=6].tokens_per_sec>=1").said == "not every step reports its tokens"
    samples = judged_as(found, "decode[batch=6].samples_per_sec>=1")
    assert samples.said.startswith(f"{number(6e6 / found.parts[0].wall.now)} samples/s (")
    unsaid = replace(of_batch(part, 6), sequences=None)
    found = diff(*(replace(made_run(seed, STEADY), parts=(unsaid,)) for seed in (1, 2)))
    assert judged_as(found, "decode[batch=6].samples_per_sec>=1").said == "not every step reports its sequences"


def test_samples_of_a_batch_are_the_sequences_of_its_tokens() -> None:
    sides = ((made_run(1, STEADY), 3.0), (made_run(2, STEADY), 2.0))
    runs = [
        replace(run, parts=(replace(of_batch(run.parts[0], 6), sequences=sequences),)) for run, sequences in sides
    ]
    found = diff(*runs)
    wall = found.parts[0].wall
    before, now = 1e6 / wall.before / 2, 1e6 / wall.now / 3
    assert judged_as(found, "decode[batch=6].samples_per_sec>=1").said.startswith(f"{number(now)} samples/s (")
    said = judged_as(found, "decode[batch=6].samples_per_sec>=0.1x").said
    assert said.startswith(f"{number(now / before)}× (")
    assert said.endswith(f"), {number(before)} → {number(now)} samples/s")


def test_a_rate_of_which_next_to_nothing_is_known_is_unsure() -> None:
    vague = PhaseRates("decode", 240, {"tokens_per_sec": Figure(10.0, 1e6, 30)}, is_headline=True)
    found = diff(made_run(1), with_rates(made_run(2), vague))
    assert judged_as(found, "tokens_per_sec>=900").outcome is Outcome.UNSURE


def test_a_rate_of_millions_of_tokens_is_lower_as_any_other() -> None:
    for now_us, is_lower in ((0.8, True), (0.3, False)):
        found = rate_diff(rates("decode", 0.5), rates("decode", now_us), "tokens_per_sec", (), 1)
        assert found is not None
        assert found.is_lower is is_lower


# `sides` are the expected times in µs. The expected error is the root of the sum of `squares` squared errors of 1 ns
# each. Over 100 positions, the error of the slope is also 1 ns.
@pytest.mark.parametrize(("slope", "sides", "squares"), [(1e-3, (0.6, 0.6), 4), (1e-2, (1.5, 0.7), 3)])
def test_a_rate_is_compared_at_one_length_unless_that_were_no_time(
    slope: float, sides: tuple[float, float], squares: int
) -> None:
    each = []
    for us, cached in ((0.5, 100.0), (0.7, 300.0)):
        figure = Figure(us, 1e-3, 30, slope=slope, slope_error=1e-5)
        each.append(PhaseRates("decode", 240, {"tokens_per_sec": figure}, cached))
    found = rate_diff(*each, "tokens_per_sec", (), 1)
    assert found is not None
    assert (found.time_us.before, found.time_us.now) == pytest.approx(sides)
    assert found.time_us.error == pytest.approx(squares**0.5 * 1e-3)
    assert (found.before, found.now, found.cached) == (pytest.approx(2e6), pytest.approx(1e6 / 0.7), 200.0)


def test_a_rate_without_a_phase_is_that_of_the_phase_a_screen_shows_first() -> None:
    both = rates("prefill", 10.0), replace(rates("decode", 1000.0, in_steps=500.0), is_headline=True)
    found = diff(made_run(1), with_rates(made_run(2), *both))
    assert judged_as(found, "tokens_per_sec>=900").about == "decode"
    assert judged_as(found, "tokens_per_sec>=1100").outcome is Outcome.BROKEN
    assert judged_as(found, "prefill.tokens_per_sec>=90000").outcome is Outcome.HOLDS
    assert judged_as(found, "decode.in_steps>=1900").said.startswith("2,000 tokens/s without pauses (")
    with pytest.raises(UsageError, match="there is no phase 'verify'; there are prefill, decode"):
        judge(parse("verify.tokens_per_sec>=1"), found)


def test_a_rate_that_is_not_known_says_why() -> None:
    steps_only = {"steps_per_sec": Figure(1.0, 0.1, 30)}
    old = replace(made_run(2), name="old.json", rates=())
    for base, now, text, said in (
        (made_run(1), old, "tokens_per_sec>=1", "old.json was written by an older cbtop, which kept no rates: "),
        (old, made_run(1), "tokens_per_sec>=1x", "old.json was written by an older cbtop, which kept no rates: "),
        (with_rates(old, rates("verify", 1.0)), made_run(1), "tokens_per_sec>=1x", "the baseline lacks it"),
        (
            made_run(1),
            with_rates(old, PhaseRates("decode", 3)),
            "tokens_per_sec>=1",
            "too few steps: 3 steps of 20",
        ),
        (made_run(1), with_rates(old, PhaseRates("decode", 99)), "tokens_per_sec>=1", "some steps left no record"),
        (made_run(1), with_rates(old, PhaseRates("decode", 99, steps_only)), "in_steps>=1", "not every step reports"),
        (
            with_rates(old, PhaseRates("decode", 9)),
            made_run(1),
            "tokens_per_sec>=1x",
            "of the baseline: too few",
        ),
    ):
        judged = judged_as(diff(base, now, anyway=True), text)
        assert judged.outcome is Outcome.UNKNOWN
        assert judged.said.startswith(said)


def test_a_rate_is_compared_at_one_length_of_the_cache_and_says_so() -> None:
    """A token takes 10 µs more for each cached position.

    The new run has cached 100 positions more than the baseline.
    """
    before, now = (
        replace(
            rates("decode", us),
            times_us={"tokens_per_sec": Figure(us, 1.0, 30, slope=10.0), "steps_per_sec": Figure(us, 1.0, 30)},
            cached=cached,
        )
        for us, cached in ((5000.0, 200.0), (6000.0, 300.0))
    )
    found = diff(with_rates(made_run(1), before), with_rates(made_run(2), now))
    said = judged_as(found, "tokens_per_sec>=0.99x").said
    assert said.startswith("1.00× (")
    assert said.endswith(" at 250 positions cached, 200.0 → 166.7 tokens/s")
    (rule,) = [one for one in default_gate(found) if "no fewer tokens/s" in one.rule]
    assert rule.said.startswith("200.0 → 166.7 tokens/s, ± ")
    assert rule.said.endswith(" at 250 positions cached")
    assert rule.outcome is Outcome.HOLDS
    alike = replace(now, cached=203.0, times_us=before.times_us)
    found = diff(with_rates(made_run(1), before), with_rates(made_run(2), alike))
    assert "cached" not in judged_as(found, "tokens_per_sec>=0.99x").said


def test_a_rate_that_other_phases_or_batches_lower_names_them() -> None:
    """A token takes 15 % more wall-clock time, but neither the steps nor the waits before them become longer."""
    longer = rates("decode", 1150.0)
    found = diff(with_rates(made_run(1, STEADY), rates("decode", 1000.0)), with_rates(made_run(2, STEADY), longer))
    (judged,) = [one for one in default_gate(found) if "no fewer tokens/s" in one.rule]
    assert judged.outcome is Outcome.UNSURE
    assert judged.said.endswith("as long as before: waits outside the compared steps took the time")
    (part,) = found.now.parts
    for parts, said in (
        ((replace(part, warm_up=36),), "the 36 steps left out as warm-up took the time"),
        ((part, part), "another mix of batches took the time"),
        ((part, replace(part, phase="prefill")), "other phases took the time"),
    ):
        changed = replace(found, now=replace(found.now, parts=parts))
        (judged,) = [one for one in default_gate(changed) if "no fewer tokens/s" in one.rule]
        assert judged.said.endswith(f"as long as before: {said}")


@pytest.mark.parametrize(("times_own", "is_by_others"), [(1.9, False), (2.5, True)])
def test_a_rate_is_lower_by_others_if_its_steps_explain_less_than_half(times_own: float, is_by_others: bool) -> None:
    (found,) = diff(made_run(1, STEADY), made_run(2, STEADY, all_longer=1.2)).rates
    (part,) = found.parts
    delta_us = times_own * part.wall.delta
    found = replace(found, time_us=replace(found.time_us, now=found.time_us.before + delta_us))
    assert found.is_by_others is is_by_others


def test_a_rate_of_several_batches_names_the_slowest_as_its_cause() -> None:
    bases, now = batches(1, 6, 2), batches(2, 6, 2)
    six, two = now.parts
    places = {
        place: replace(one, time=replace(one.time, mean=2 * one.time.mean)) for place, one in two.places.items()
    }
    wall = replace(two.wall_us, mean=2 * two.wall_us.mean, median_us=2 * (two.wall_us.median_us or 0))
    slow = replace(two, places=places, wall_us=wall)
    base_rates, now_rates = rates("decode", 1000.0), rates("decode", 1400.0)
    found = diff(with_rates(bases, base_rates), with_rates(replace(now, parts=(six, slow)), now_rates))
    (judged,) = [one for one in default_gate(found) if "no fewer tokens/s" in one.rule]
    assert judged.outcome is Outcome.BROKEN
    assert judged.guilty.startswith("decode, batch 2: ")


def test_a_rate_has_the_typical_time_of_a_token_with_the_new_mix_of_batches() -> None:
    found = diff(batches(1, 6, 2), batches(2, 6, 2, steps=120))
    (rate,) = found.rates
    six, two = (next(part for part in found.parts if part.now.work == (size, size)) for size in (6, 2))
    assert six.wall.medians_us
    assert two.wall.medians_us
    mixed = [(6 * six.wall.medians_us[at] + 2 * two.wall.medians_us[at]) / 8 for at in (0, 1)]
    assert rate.time_us.medians_us == pytest.approx(tuple(mixed))
    assert rate.phase == "decode"
    unknown = diff(
        batches(1, 6), replace(batches(2, 6), parts=tuple(without_median(part) for part in batches(2, 6).parts))
    )
    assert unknown.rates[0].time_us.medians_us is None


def without_median(part: StepGroup) -> StepGroup:
    return replace(part, wall_us=replace(part.wall_us, median_us=None))


def test_an_unsure_threshold_fails_and_says_the_ways_out() -> None:
    outcomes = (Outcome.UNSURE, Outcome.HOLDS, Outcome.BROKEN)
    unsure, holds, broken = (Judged("a<=1x", "decode", one, "1.01× ± 0.02") for one in outcomes)
    assert [one.passes for one in (unsure, holds, broken)] == [True, True, False]
    strict, *others = must_be_sure([unsure, holds, broken])
    assert others == [holds, broken]
    assert (strict.passes, strict.outcome) == (False, Outcome.UNSURE)
    assert strict.said == (
        "1.01× ± 0.02; the limit is within the interval, so it is not known: use more or longer runs, a wider limit, "
        "or --allow-unsure"
    )


# sixteen batch sizes, for simulated decode steps
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
# Compare only the whole step and the time between bricks, so that comparisons are fast.
ONLY = (WHOLE_STEP, (BETWEEN_BRICKS, None))


@cache
def pool(many: int) -> tuple[tuple[StepGroup, ...], float]:
    """Return the decode steps of `many` runs of one batch size, and the true median of a step in µs."""
    parts = [made_run(seed, QUIET, 60).parts[0] for seed in range(5000, 5000 + many)]
    parts = [replace(part, places={place: part.places[place] for place in ONLY}) for part in parts]
    medians = [p50.mean for part in parts if (p50 := part.places[WHOLE_STEP].p50)]
    return tuple(parts), float(np.mean(medians))


def sixteen(parts: Sequence[StepGroup]) -> RunDiff:
    run = replace(made_run(1), parts=tuple(of_batch(part, size) for part, size in zip(parts, SIZES, strict=True)))
    return diff(run, run)


def broken_of(cases: int, many: int, sign: str) -> int:
    """Return how many comparisons of equal runs break a threshold.

    The limit on the median step of sixteen batches is exactly the true median.
    """
    parts, true_us = pool(many)
    chance, broken = np.random.default_rng(7), 0
    for _ in range(cases):
        chosen = [parts[at] for at in chance.choice(many, len(SIZES), replace=False)]
        judged = judge(parse(f"step.p50{sign}{true_us}us"), sixteen(chosen))
        assert len(judged) == len(SIZES)
        broken += any(one.outcome is Outcome.BROKEN for one in judged)
    return broken


@pytest.mark.slow
def test_each_of_sixteen_batches_has_the_interval_of_one_of_sixteen() -> None:
    parts, _ = pool(16)
    together = judge(parse("step.p50<=1s"), sixteen(parts))
    for part, size in zip(parts, SIZES, strict=True):
        p50 = part.places[WHOLE_STEP].p50
        assert p50
        (judged,) = [one for one in together if one.about.partition(":")[0] == f"decode, batch {size}"]
        off_us = 2 * 0.03
        assert judged.said == f"{duration(p50.mean)} ± {duration(half_of(p50, 16) + off_us)}"
        (alone,) = judge(parse(f"decode[batch={size}].step.p50<=1s"), sixteen(parts))
        assert alone.said == f"{duration(p50.mean)} ± {duration(half_of(p50) + off_us)}"
        assert half_of(p50, 16) > 1.2 * half_of(p50)


@pytest.mark.slow
@pytest.mark.parametrize("sign", ["<=", ">="])
def test_of_a_thousand_aa_over_sixteen_batches_at_most_ten_break(sign: str) -> None:
    broken = broken_of(1000, 400, sign)
    print(f"{sign}: {broken} of 1,000")  # noqa: T201
    assert broken <= 10
