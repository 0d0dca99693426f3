"""Tests of the results of thresholds, on one run and on two runs."""

from __future__ import annotations

from dataclasses import replace
from math import exp, sqrt

import pytest

from cbtop.comparison.default_gate import default_gate
from cbtop.comparison.items import BETWEEN_BRICKS, WHOLE_STEP
from cbtop.comparison.judged import Judged, Outcome
from cbtop.comparison.noise import Change, Figure, change
from cbtop.comparison.part_diff import PlaceDiff
from cbtop.comparison.run_diff import RunDiff, diff
from cbtop.comparison.runs import TooShort
from cbtop.comparison.threshold_grammar import parse
from cbtop.comparison.thresholds import judge, of_contracts, of_definitions
from cbtop.errors import UsageError
from cbtop.protocol.vocabulary import BrickCategory
from cbtop.units import duration, number
from tests.cbtop.comparison.made_runs import STEADY, made_run, place_of, steady


def test_a_figure_that_there_is_not_is_no_phase() -> None:
    found = diff(made_run(1), made_run(2))
    for text, said in (
        ("Attention.p90<=1us", "'p90' is not a figure of Attention; there are p50, p99, per_token"),
        ("decod.step<=1us", "there is no phase 'decod'; did you mean decode? there are decode"),
        ("RmsNorn<=1us", "there is no brick 'RmsNorn'; did you mean RmsNorm? there are Attention, "),
        ("RmsNorm@9<=1us", "there is no layer '9'; there are Layer 0, Layer 1, Layer 2, Layer 3, Layer 4, Layer 5"),
        ("other<=1us", "there is no brick 'other'; there are Attention, "),
    ):
        with pytest.raises(UsageError) as error:
            judge(parse(text), found)
        assert said in str(error.value)
    (part,) = found.parts
    without = replace(part, places=tuple(one for one in part.places if one.layer is None))
    with pytest.raises(UsageError, match="there is no layer '1'; there are none"):
        judge(parse("RmsNorm@1<=1us"), replace(found, parts=(without,)))


def test_a_threshold_within_the_noise_is_unsure_and_one_beyond_it_broken() -> None:
    base, now = made_run(1), made_run(2, slower=1.2, in_layer=None)
    found = diff(base, now)
    (part,) = found.parts
    (down,) = [one for one in part.bricks if one.name == "DownProjection"]
    assert down.change
    ratio, half = down.change.now / down.change.before, down.change.half / down.change.before
    for limit, outcome in (
        (ratio - 2 * half, Outcome.BROKEN),
        (ratio - half / 2, Outcome.UNSURE),
        (ratio + half / 2, Outcome.UNSURE),
        (ratio + 1.1 * half, Outcome.HOLDS),
    ):
        (judged,) = judge(parse(f"DownProjection<={limit:.6f}x"), found)
        assert judged.outcome is outcome
        assert bool(judged.guilty) == (outcome is Outcome.BROKEN)


@pytest.mark.parametrize("text", ["decode.p50<=1.05x", "decode.p99<=1s", "decode[batch=1].p50<=9ms", "decode<=9ms"])
def test_a_figure_of_a_phase_is_that_of_its_step(text: str) -> None:
    found = diff(made_run(1, STEADY), made_run(2, STEADY))
    (short,) = judge(parse(text), found)
    phase = "decode[batch=1]" if "[" in text else "decode"
    (full,) = judge(parse(text.replace(phase, f"{phase}.step")), found)
    assert replace(short, rule="") == replace(full, rule="")


@pytest.mark.slow
def test_a_brick_that_is_called_like_the_phase_is_preferred_to_its_step() -> None:
    base, now = made_run(1, STEADY, rename="Decode"), made_run(2, STEADY, rename="Decode")
    (judged,) = judge(parse("decode.p50<=1.05x"), diff(base, now))
    assert "Decode" in judged.about


def test_what_the_clock_cannot_tell_apart_breaks_nothing() -> None:
    """Calls that took 20 µs take 1.2 times as long. The clock's resolution is 10 µs, 1.5 µs or 30 ns."""
    outcomes = []
    for resolution_us in (10.0, 1.5, 0.03):
        base, now = (
            replace(made_run(seed, slower=1.2, in_layer=None), clock_resolution_us=resolution_us) for seed in (1, 2)
        )
        (judged,) = judge(parse("RmsNorm.p50<=18us"), diff(base, now))
        outcomes.append(judged.outcome)
    assert outcomes == [Outcome.UNKNOWN, Outcome.UNSURE, Outcome.BROKEN]
    base, now = (replace(run, clock_resolution_us=100.0) for run in (made_run(1), made_run(2, slower=1.5)))
    (part,) = diff(base, now).parts
    assert part.slower == []


def test_what_cannot_be_judged_is_no_pass() -> None:
    """None of three thresholds can be judged: a p99 from 60 steps, a brick that is gone, and a new brick."""
    base, now = made_run(1, steps=60), made_run(2, steps=60, rename="Renamed")
    # The renamed brick gets another kernel, so that it counts as a new brick.
    now = replace(now, kernels={("Renamed", BrickCategory.FFN): ("another",)})
    for text in ("step.p99<=1s", "DownProjection<=2x", "Renamed<=2x"):
        (judged,) = judge(parse(text), diff(base, now))
        assert judged.outcome is Outcome.UNKNOWN, text


PLANTED = "DownProjection in Layer 4"


def test_what_needs_no_baseline_is_judged_of_all_that_the_new_run_did() -> None:
    base, now = made_run(1, STEADY), made_run(2, STEADY)
    (part,) = now.parts
    (eight,) = made_run(3, STEADY, all_longer=8.0).parts
    down = ("DownProjection", BrickCategory.FFN)
    eight = replace(eight, work=(8, None), budgets={down: 1.0})
    found = diff(base, replace(now, parts=(part, eight)))
    beside, alone = judge(parse("decode.step<=8ms"), found)
    assert (beside.outcome, alone.outcome) == (Outcome.HOLDS, Outcome.BROKEN)
    assert [one.outcome for one in of_definitions(found)] == [Outcome.BROKEN]


def test_a_phase_of_too_few_steps_is_said() -> None:
    base, now = made_run(1, STEADY), made_run(2, STEADY)
    now = replace(now, too_short=(TooShort("prefill", 3, 20), TooShort("prefill", 2, 20), TooShort("decode", 1, 20)))
    notes = [note for note in diff(base, now).notes if "needed" in note]
    assert notes == ["prefill: left out of the new run: 5 steps in 2 batches of at most 3, of 20 needed in each"]
    first = TooShort("prefill (warm-up)", 9, 20, 5.0)
    assert "warm-up: 9 steps of the new run left out" in diff(base, replace(now, too_short=(first,))).notes


@pytest.mark.parametrize("text", ["step<=1.05x", "decode.step<=1.05x", "step<=1s", "decode.step<=1s"])
def test_batches_too_short_to_judge_are_no_pass_if_they_take_much_time(text: str) -> None:
    base, now = made_run(1, STEADY), made_run(2, STEADY)
    whole_us = now.parts[0].time_us
    for share, outcomes in ((0.04, []), (0.2, [Outcome.UNKNOWN])):
        few = tuple(TooShort("decode", 19, 20, share * whole_us, (batch, None)) for batch in (2, 4))
        found = diff(replace(base, too_short=few), replace(now, too_short=few))
        judged = judge(parse(text), found)
        assert [one.outcome for one in judged] == [Outcome.HOLDS, *outcomes]
        assert [one.outcome for one in judge(parse("decode[batch=1].step<=1.05x"), found)] == [Outcome.HOLDS]
        assert [one.outcome for one in default_gate(found) if one.rule == "decode: is compared"] == outcomes
    assert judged[-1].said == (
        "not judged: 28.6 % of the new run's time: too few decode steps: 38 steps in 2 batches of at most 19, "
        "of 20 needed in each; use longer runs, or judge one batch, as decode[batch=1]"
    )


def test_a_limit_without_a_baseline_covers_phases_of_few_steps() -> None:
    now = made_run(1, STEADY)
    now = replace(now, too_short=(TooShort("prefill", 19, 20, now.parts[0].time_us),))
    found = diff(now, now)
    first, second = judge(parse("step<=1s"), found)
    assert (first.outcome, second.outcome, second.about) == (Outcome.HOLDS, Outcome.UNKNOWN, "prefill")
    assert second.said.endswith("use longer runs, or judge one phase, as decode")
    assert [one.outcome for one in judge(parse("decode.step<=1s"), found)] == [Outcome.HOLDS]


def test_of_several_phases_a_threshold_is_on_those_that_have_what_it_names() -> None:
    base, now = made_run(1, STEADY), made_run(2, STEADY)
    (part,) = base.parts
    places = {place: times for place, times in part.places.items() if not place[0] or place[0][0] != "RmsNorm"}
    parts = (replace(part, phase="verify", places=places), part)
    found = diff(replace(base, parts=parts), replace(now, parts=parts))
    assert [one.about for one in judge(parse("RmsNorm<=1s"), found)] == ["decode: RmsNorm"]
    with pytest.raises(UsageError, match="there is no brick 'Head'"):
        judge(parse("Head<=1s"), found)


def test_a_note_names_the_machine_if_all_bricks_take_longer_by_as_much() -> None:
    base, now = made_run(1), made_run(2, all_longer=1.2)
    (note,) = [note for note in diff(base, now).notes if "every brick" in note]
    assert note.startswith("decode: every brick takes 1.2")
    assert not any("every brick" in note for note in diff(base, made_run(2, slower=1.2, in_layer=None)).notes)


def judged_as(found: RunDiff, text: str) -> Judged:
    (one,) = judge(parse(text), found)
    return one


def test_a_rate_is_judged_as_is_and_as_a_ratio_with_the_interval_of_its_time() -> None:
    found = diff(made_run(1, STEADY), made_run(2, STEADY))
    (rates,), (change_of,) = found.now.rates, found.rates
    time_us, before, now = rates.times_us["tokens_per_sec"], change_of.before, change_of.now
    assert now == 1e6 / time_us.mean
    part = change(Figure(0.0, 0.0, time_us.blocks), time_us, 1).half / time_us.mean
    moved = change_of.time_us
    of_ratio = sqrt(2) * moved.half / sqrt(moved.before**2 + moved.now**2)
    for off, outcome in ((1.1, Outcome.HOLDS), (0.5, Outcome.UNSURE), (-0.5, Outcome.UNSURE), (-1.1, Outcome.BROKEN)):
        assert judged_as(found, f"tokens_per_sec>={now * exp(-off * part)}").outcome is outcome
        assert judged_as(found, f"decode.tokens_per_sec>={now / before * exp(-off * of_ratio)}x").outcome is outcome
    least, most = (number(now / before * exp(off * of_ratio)) for off in (-1, 1))
    said = f"{number(now / before)}× ({least} to {most}), {number(before)} → {number(now)} tokens/s"
    assert judged_as(found, "tokens_per_sec>=1x").said == said
    said = f"{number(now)} tokens/s ({number(now * exp(-part))} to {number(now * exp(part))})"
    assert judged_as(found, "tokens_per_sec>=1").said == said
    assert judged_as(found, "tokens_per_sec>=1e6").guilty == ""


def test_a_threshold_that_nothing_could_break_is_no_pass() -> None:
    base, now = made_run(1, STEADY), made_run(2, STEADY)
    (part,) = now.parts
    step = part.places[WHOLE_STEP]
    assert step.p50
    for error, outcome in ((0.05, Outcome.BROKEN), (1.0, Outcome.UNKNOWN)):
        wide = replace(step, p50=replace(step.p50, error=error * step.p50.mean))
        found = diff(base, replace(now, parts=(replace(part, places={**part.places, WHOLE_STEP: wide}),)))
        assert judged_as(found, "decode.step<=1us").outcome is outcome
        assert judged_as(found, "decode.step<=1s").outcome is Outcome.HOLDS


def test_no_rate_or_budget_of_tokens_is_known_if_not_every_step_says_them() -> None:
    base, now = made_run(1, STEADY), made_run(2, STEADY)
    (part,) = base.parts
    uncounted = replace(part, unit="step", tokens=None, budgets={("RmsNorm", BrickCategory.NORM): 1e6})
    (rates,) = now.rates
    steps = (replace(rates, times_us={"steps_per_sec": rates.times_us["steps_per_sec"]}),)
    base, now = (replace(run, parts=(uncounted,), rates=steps) for run in (base, now))
    found = diff(base, now)
    for one in (judged_as(found, "decode.tokens_per_sec>=1"), *of_definitions(found)):
        assert (one.outcome, one.said) == (Outcome.UNKNOWN, "not every step reports its tokens")
    assert judged_as(found, "tokens_per_sec>=0.9x").outcome is Outcome.HOLDS
    assert judged_as(found, "tokens_per_sec>=0.9x").said.endswith(" steps/s")


def test_unattributed_is_the_share_of_a_step_in_no_brick_and_no_layer_gap() -> None:
    base, now = made_run(1, STEADY), made_run(2, STEADY)
    (part,) = now.parts
    whole_us, places = part.inside_us.mean, dict(part.places)
    assert judged_as(diff(base, now), "unattributed<=0.5%").outcome is Outcome.HOLDS
    between = places[BETWEEN_BRICKS, None]
    time = replace(between.time, mean=between.time.mean + 0.05 * whole_us, error=0.001 * whole_us)
    places[BETWEEN_BRICKS, None] = replace(between, time=time)
    found = diff(base, replace(now, parts=(replace(part, places=places),)))
    half = 100 * change(Figure(0.0, 0.0, time.blocks), time, 1).half / whole_us
    # A brick with less than 1 % of the time is compared if the error of its time is small.
    small = replace(time, mean=between.time.mean + 0.005 * whole_us, error=0.0005 * whole_us)
    little = {**places, (BETWEEN_BRICKS, None): replace(between, time=small)}
    assert (
        judged_as(diff(base, replace(now, parts=(replace(part, places=little),))), "unattributed<=0.55%").outcome
        is Outcome.UNSURE
    )
    assert judged_as(found, "unattributed<=1%").said == f"{number(5.0)} ± {number(half)} % of a step"
    share = float(judged_as(found, "unattributed<=1%").said.split()[0])
    assert share == pytest.approx(5, abs=0.01)
    for off, outcome in ((1.1, Outcome.HOLDS), (0.9, Outcome.UNSURE), (-0.9, Outcome.UNSURE), (-1.1, Outcome.BROKEN)):
        assert judged_as(found, f"unattributed<={5 + off * half}%").outcome is outcome


def test_losses_are_judged_as_a_share_of_the_records() -> None:
    now = replace(made_run(2), lost=5, seen=1000)
    found = diff(made_run(1), now, may_lack_records=True)
    for text, outcome in (("loss==0", Outcome.BROKEN), ("loss<=0.5%", Outcome.HOLDS), ("loss<0.5%", Outcome.BROKEN)):
        assert judged_as(found, text).outcome is outcome
        assert judged_as(found, text).said == "0.50 % were lost"


def test_a_layer_has_a_number_or_a_name_and_a_category_is_all_of_its_bricks() -> None:
    found = diff(made_run(1), made_run(2, slower=1.2))
    for text in ("DownProjection@4<=1.1x", "down@Layer 4.p50<=1.1x", "decode.ffn@4<=1.1x", "mlp@layer4<=1.1x"):
        one = judged_as(found, text)
        assert (one.outcome, one.guilty) == (Outcome.BROKEN, PLANTED)
    for text, names in (("attn<=9x", ["Attention", "QkvProjection"]), ("step<=9x", ["step"])):
        assert sorted(one.about.partition(": ")[2] for one in judge(parse(text), found)) == names
    (whole,) = judge(parse("DownProjection.per_token<=1.01x"), found)
    assert (whole.outcome, whole.guilty) == (
        Outcome.BROKEN,
        f"DownProjection, most in {PLANTED.partition(' in ')[2]}",
    )


def test_what_was_measured_is_said_with_its_interval() -> None:
    """The interval includes two readings of the clock with the lower resolution.

    An unknown resolution adds nothing.
    """
    for resolutions, off_us in (((0.5, 1.5), 3.0), ((1.5, None), 3.0), ((None, None), 0.0)):
        base, now = (
            replace(made_run(seed, STEADY), clock_resolution_us=one)
            for seed, one in zip((1, 2), resolutions, strict=True)
        )
        found = diff(base, now)
        (part,) = found.parts
        norm = place_of(part, "RmsNorm")
        assert norm.now
        assert norm.now.p50
        assert norm.mean
        assert norm.change
        assert norm.p50

        def half(figure: Figure) -> float:
            return change(Figure(0.0, 0.0, figure.blocks), figure, 1).half

        call, token, moved, mean = norm.now.p50, norm.now.time, norm.change, norm.mean
        off = moved.half / moved.before + off_us / norm.p50.before
        medians = f"(p50 {duration(norm.p50.before)} → {duration(norm.p50.now)})"
        for text, said in (
            ("RmsNorm<=1s", f"{duration(call.mean)} ± {duration(half(call) + off_us)}"),
            ("RmsNorm.per_token<=1s", f"{duration(token.mean)} ± {duration(half(token))}"),
            ("RmsNorm<=9x", f"{number(moved.now / moved.before)}× ± {number(off)} {medians}"),
            ("RmsNorm.per_token<=9x", f"{number(mean.now / mean.before)}× ± {number(mean.half / mean.before)}"),
        ):
            assert judged_as(found, text).said == said


def judged_where(place: PlaceDiff, text: str) -> Judged:
    """Return the result of a threshold on the comparison `steady` after `place` has replaced one of its bricks."""
    (part,) = steady().parts
    places = tuple(place if one.name == place.name else one for one in part.places)
    return judged_as(replace(steady(), parts=(replace(part, places=places),)), text)


def test_a_ratio_is_of_typical_calls_or_of_medians_if_only_means_are_known() -> None:
    (part,) = steady().parts
    norm = place_of(part, "RmsNorm")
    typical, median, mean, p99 = (Change(100.0, 100.0 * ratio, 0.0) for ratio in (1.2, 1.4, 1.6, 1.8))
    known = replace(norm, call=typical, p50=median, mean=mean, p99=p99)
    assert known.now
    known = replace(known, now=replace(known.now, p99=known.now.p50))
    for place, text, ratio in (
        (known, "RmsNorm<=9x", "1.20×"),
        (replace(known, call=replace(mean, medians_us=(1.0, 1.0))), "RmsNorm<=9x", "1.40×"),
        (known, "RmsNorm.per_token<=9x", "1.60×"),
        (known, "RmsNorm.p99<=9x", "1.80×"),
    ):
        assert judged_where(place, text).said.startswith(ratio)
    assert judged_where(replace(known, p99=None), "RmsNorm.p99<=9x").said == "the baseline has too few calls"
    new = replace(known, before=None, call=None, p50=None)
    assert judged_where(new, "RmsNorm<=9x").said == "it is new: the baseline lacks it"
    assert judged_where(replace(known, p50=None), "RmsNorm.per_token<=9x").said == "1.60× ± 0.00"
    # A baseline time of zero gives no ratio. A baseline time of half a microsecond gives one.
    for before_us, said in ((0.0, "the baseline has too few calls"), (0.5, "1.20× ± 0.00")):
        tiny = replace(known, mean=Change(before_us, 1.2 * before_us, 0.0))
        assert judged_where(tiny, "RmsNorm.per_token<=9x").said == said


def test_the_layer_with_most_of_the_extra_cost_is_named_if_a_brick_is_slower() -> None:
    (part,) = steady().parts
    places = {one.name: one for one in part.places}
    slower, most, faster = (Change(100.0, now, 1.0) for now in (120.0, 130.0, 60.0))
    for name, one in (("RmsNorm in Layer 1", slower), ("RmsNorm in Layer 3", most), ("RmsNorm in Layer 5", faster)):
        places[name] = replace(places[name], change=one)
    places["Attention in Layer 2"] = replace(places["Attention in Layer 2"], change=Change(100.0, 500.0, 1.0))
    found = replace(steady(), parts=(replace(part, places=tuple(places.values())),))
    for text, guilty in (
        ("RmsNorm<=0.1x", "RmsNorm, most in Layer 3"),
        ("RmsNorm@1<=0.1x", "RmsNorm in Layer 1"),
        ("DownProjection<=0.1x", "DownProjection"),
        ("step<=0.1x", "step"),
    ):
        assert judged_as(found, text).guilty == guilty


def test_a_brick_is_matched_by_name_then_by_category_then_by_its_beginning() -> None:
    (part,) = steady().parts
    named = [
        replace(one, brick=("Ffn", BrickCategory.ATTENTION)) if one.name == "QkvProjection" else one
        for one in part.places
    ]
    both = replace(steady(), parts=(replace(part, places=tuple(named)),))
    for found, name, bricks in (
        (steady(), "attention", ["Attention"]),
        (steady(), "attn", ["Attention", "QkvProjection"]),
        (steady(), "ffn", ["DownProjection"]),
        (steady(), "qkv", ["QkvProjection"]),
        (both, "FFN", ["Ffn"]),
        (both, "mlp", ["DownProjection"]),
    ):
        assert sorted(one.about for one in judge(parse(f"{name}<=9x"), found)) == [f"decode: {one}" for one in bricks]


def test_an_interval_of_a_call_reaches_two_readings_of_the_clock_further() -> None:
    base, now = (replace(made_run(seed, STEADY), clock_resolution_us=1.0) for seed in (1, 2))
    found = diff(base, now)
    (part,) = found.parts
    (norm,) = [one for one in part.bricks if one.name == "RmsNorm"]
    assert norm.now
    assert norm.now.p50
    half = change(Figure(0.0, 0.0, norm.now.p50.blocks), norm.now.p50, 1).half + 2.0
    for off, outcome in (
        (1.05, Outcome.HOLDS),
        (0.95, Outcome.UNSURE),
        (-0.95, Outcome.UNSURE),
        (-1.05, Outcome.BROKEN),
    ):
        assert judged_as(found, f"RmsNorm<={norm.now.p50.mean + off * half}us").outcome is outcome
    assert norm.change
    relative = norm.change.half / norm.change.before + 2.0 / norm.p50.before  # type: ignore[union-attr]
    for off, outcome in ((1.05, Outcome.HOLDS), (0.95, Outcome.UNSURE), (-1.05, Outcome.BROKEN)):
        limit = norm.change.now / norm.change.before + off * relative
        assert judged_as(found, f"RmsNorm<={limit}x").outcome is outcome


def test_budgets_are_of_the_mean_for_a_token_and_contract_bounds_of_a_call() -> None:
    base, now = made_run(1, STEADY), made_run(2, STEADY, slower=1.5, in_layer=None)
    (part,) = now.parts
    down, norm = ("DownProjection", BrickCategory.FFN), ("RmsNorm", BrickCategory.NORM)
    now = replace(now, parts=(replace(part, budgets={down: 6 * 240 * 1.4, norm: 6 * 20 * 1.4}),))
    of = {one.rule: one.outcome for one in of_definitions(diff(base, now)) if one.where == ("", 1)}
    assert of == {
        "DownProjection.per_token<=2016us, its budget": Outcome.BROKEN,
        "RmsNorm.per_token<=168us, its budget": Outcome.HOLDS,
    }
    uncounted = [replace(run, parts=(replace(run.parts[0], unit="step", tokens=None),)) for run in (base, now)]
    assert [one.outcome for one in of_definitions(diff(*uncounted))] == [Outcome.UNKNOWN] * 2
    found = of_contracts(diff(base, now), {down: (1.4, ("a.yaml", 3)), norm: (1.4, ("b.yaml", 4))})
    assert {(one.rule, one.outcome, one.where) for one in found} == {
        ("DownProjection<=1.4x, by contract", Outcome.BROKEN, ("a.yaml", 3)),
        ("RmsNorm<=1.4x, by contract", Outcome.HOLDS, ("b.yaml", 4)),
    }
    assert all(" (p50 " in one.said for one in found)


def test_a_layer_of_a_backward_is_found_by_its_number() -> None:
    found = steady()
    (part,) = found.parts
    places = [
        replace(one, brick=(f"{one.brick[0]} backward", one.brick[1]), layer=one.layer and f"{one.layer} (backward)")
        for one in part.places
        if one.brick
    ]
    both = replace(found, parts=(replace(part, places=(*part.places, *places)),))
    (judged,) = judge(parse("RmsNorm backward@2<=1s"), both)
    assert "Layer 2 (backward)" in judged.about
    (judged,) = judge(parse("RmsNorm@2<=1s"), both)
    assert "backward" not in judged.about
    with pytest.raises(UsageError, match=r"there is no layer '9'.* Layer 5 \(backward\)"):
        judge(parse("RmsNorm backward@9<=1s"), both)


def test_a_p99_of_too_few_calls_says_how_many_are_needed() -> None:
    (part,) = steady().parts
    step = replace(part.step, now=replace(part.now.places[WHOLE_STEP], p99=None, calls=Figure(1.0, 0.0, 60)))
    found = replace(steady(), parts=(replace(part, step=step),))
    (judged,) = judge(parse("step.p99<=9ms"), found)
    assert judged.said == "there are too few calls for a p99: 240 of 400 needed; use a longer run"


def test_decode_of_a_model_without_a_cache_has_a_way_out() -> None:
    (part,) = steady().parts
    found = replace(steady(), parts=(replace(part, now=replace(part.now, phase="forward")),))
    with pytest.raises(UsageError, match="there are forward, because a model called without a cache"):
        judge(parse("decode.step.p50<=9ms"), found)
