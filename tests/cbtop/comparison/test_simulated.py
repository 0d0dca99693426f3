"""Tests of bricks that do not run in every step: their time and their number of calls are judged.

All runs are simulated with the real profiler, ring, source and recording, and a fake clock. test_simulated_power.py
has the statistics of many comparisons of simulated runs.
"""

from __future__ import annotations

import json
import re
from functools import cache

import pytest

from cbtop.comparison.default_gate import default_gate, known_to_scatter
from cbtop.comparison.items import BETWEEN_BRICKS
from cbtop.comparison.judged import Judged, Outcome
from cbtop.comparison.part_diff import PartDiff, PlaceDiff
from cbtop.comparison.run_diff import RunDiff, diff, diff_of
from cbtop.comparison.runs import Run
from cbtop.comparison.threshold_grammar import parse
from cbtop.comparison.thresholds import judge
from cbtop.reports.run_diff import diff_json, diff_markdown, diff_text
from tests.cbtop.comparison.made_runs import Noise, made_run, place_of
from tests.cbtop.comparison.simulator import NOTHING, USUAL, Planted, Program, SimulatedBrick, simulated
from tests.representatives import first_by_default

RARE = tuple(SimulatedBrick(f"In {percent} %", 120.0, rate=percent / 100) for percent in (3, 10, 30, 70))
RATES = Program((*USUAL, *RARE), layers=2)
EXPERTS = Program(USUAL, layers=2, experts=2, of_experts=6)
MIXED = Program(
    (*USUAL, SimulatedBrick("In 30 %", 120.0, rate=0.3, us_a_token=5.0), SimulatedBrick("Several", 60.0, most=3)),
    layers=2,
    steps=600,
    batches=(1, 8),
    prefill=0.2,
    prefill_tokens=16,
    sample_every=2,
)
_RATIO = re.compile(r"(\d+\.\d+)× ± (\d+\.\d+)")


@cache
def run_of(program: Program, seed: int, planted: Planted = NOTHING) -> Run:
    return simulated(program, seed, planted=planted)


def named(found: RunDiff) -> list[tuple[str, str]]:
    """Return all bricks and layers that the comparison reports as changed.

    Time between bricks is excluded because each simulated call adds to it.
    """
    places = [place for part in found.parts for place in part.places if place.brick != BETWEEN_BRICKS]
    return [(place.name, place.verdict) for place in places if place.verdict]


def only(found: RunDiff, name: str) -> PlaceDiff:
    (part,) = found.parts
    return place_of(part, name)


def judged(found: RunDiff, text: str) -> Judged:
    (one,) = judge(parse(text), found)
    return one


def broken_quantiles(found: RunDiff) -> list[Judged]:
    """Return the thresholds that fail at 1.05 times the baseline.

    Each is for the p50 or the p99 of a brick, in one layer or over all layers.
    """
    texts = [
        f"{part.phase}.{place.brick[0]}{f'@{place.layer}' if place.layer else ''}.{figure}<=1.05x"
        for part in found.parts
        for place in (*part.bricks, *part.cells)
        if place.brick and place.p50
        for figure in ("p50", "p99")
    ]
    return [one for text in texts for one in judge(parse(text), found) if one.outcome is Outcome.BROKEN]


@first_by_default("program", [RATES, EXPERTS, MIXED], ids=["rates", "experts", "batches, phases and a sample"])
def test_two_runs_of_the_same_program_differ_in_nothing(program: Program) -> None:
    found = diff(run_of(program, 1), run_of(program, 2))
    assert found.parts
    assert named(found) == []
    assert broken_quantiles(found) == []
    assert not any(one.outcome is Outcome.BROKEN for one in default_gate(found))
    for part in found.parts:
        rare = next((one for one in part.bricks if one.name == "In 30 %"), None)
        if rare and rare.calls and rare.change:
            assert not rare.calls.is_exact
            # The brick is called more often. A single call does not take longer.
            assert abs(rare.change.now / rare.change.before - 1) < 0.03


@pytest.mark.slow
def test_a_p50_is_that_of_a_call_in_a_brick_of_a_tenth_of_the_steps() -> None:
    found = diff(run_of(RATES, 1), run_of(RATES, 3, Planted("In 10 %", call=1.8)))
    for text in ("In 10 %.p50<=1.05x", "In 10 %@1.p50<=1.05x"):
        one = judged(found, text)
        assert one.outcome is Outcome.BROKEN
        (ratio, half) = map(float, re.findall(r"(\d\.\d+)× ± (\d\.\d+)", one.said)[0])
        assert abs(ratio - 1.8) < half < 0.35
    assert {name.split(" in ")[0] for name, _ in named(found)} == {"In 10 %"}
    assert {verdict for _, verdict in named(found)} == {"slower"}
    assert broken_quantiles(diff(run_of(RATES, 3, Planted("In 10 %", call=1.8)), run_of(RATES, 1))) == []


def test_an_expert_that_became_faster_in_one_layer_is_named_there() -> None:
    found = diff(run_of(EXPERTS, 1), run_of(EXPERTS, 3, Planted("Expert 2", 1, call=0.8)))
    assert named(found)
    assert set(named(found)) <= {("Expert 2", "faster"), ("Expert 2 in Layer 1", "faster")}
    place = only(found, "Expert 2 in Layer 1")
    assert place.call
    assert abs(place.call.now / place.call.before - 0.8) < place.call.half / place.call.before < 0.1


def test_more_calls_are_said_as_calls_and_not_as_slower_calls() -> None:
    found = diff(run_of(RATES, 1), run_of(RATES, 4, Planted("In 30 %", rate=2.0)))
    place = only(found, "In 30 %")
    assert (place.verdict, place.calls and place.calls.is_exact) == ("slower", False)
    assert place.calls
    assert place.calls.ratio
    assert abs(place.calls.ratio - 2) < (place.calls.ratio_half or 0) < 1
    assert judged(found, "In 30 %.p50<=1.1x").outcome is Outcome.HOLDS
    assert " as many calls a step" in diff_text(found)
    # If this brick is called more often, its layers also take longer. So its layers may be reported, too.
    bricks = {name for name, _ in named(found) if not name.startswith("Layer")}
    assert bricks <= {"In 30 %", "In 30 % in Layer 0", "In 30 % in Layer 1"}
    fewer = diff(run_of(RATES, 4, Planted("In 30 %", rate=2.0)), run_of(RATES, 1))
    assert only(fewer, "In 30 %").verdict == "faster"


def test_a_second_call_in_every_step_is_structure() -> None:
    found = diff(run_of(RATES, 1), run_of(RATES, 5, Planted("Attention", 1, rate=2.0)))
    place = only(found, "Attention in Layer 1")
    assert place.calls
    assert (place.verdict, place.calls.is_exact) == ("slower", True)
    assert place.calls.text == "2 calls a step instead of 1"
    assert "2 calls a step instead of 1" in diff_text(found)
    (broken,) = [one for one in default_gate(found) if one.brick == "Attention"]
    assert "3 calls a step instead of 2" in broken.said
    # The brick changed in both layers, so the result names no layer.
    assert (broken.outcome, broken.guilty) == (Outcome.BROKEN, "Attention")


@pytest.mark.slow
@first_by_default(("brick", "call"), [("In 30 %", 1.5), ("Attention", 1.3)])
def test_a_renamed_brick_is_judged_as_that_brick_by_noisy_base_runs(brick: str, call: float) -> None:
    bases = [run_of(RATES, seed) for seed in (1, 2, 6, 7, 8, 9)]
    now = run_of(RATES, 3, Planted(brick, call=call, name="Another"))
    place = only(found := diff_of(bases, [now]), "Another")
    assert (place.renamed_from, place.verdict) == (brick, "slower")
    assert place.call
    assert abs(place.call.now / place.call.before - call) < place.call.half / place.call.before
    (broken,) = [one for one in known_to_scatter(default_gate(found), found.base.runs) if one.brick]
    assert (broken.outcome, broken.brick) == (Outcome.BROKEN, "Another")
    three = diff_of(bases[:3], [now])
    assert only(three, "Another").renamed_from == brick


@pytest.mark.slow
def test_a_rare_brick_that_a_run_does_not_call_is_not_gone() -> None:
    rarest = Program((*USUAL, SimulatedBrick("In 1 %", 120.0, rate=0.01)), layers=1, steps=80)
    runs = [run_of(rarest, seed) for seed in range(1, 7)]
    with_it = [run for run in runs if any(brick[0] == "In 1 %" for brick in run.parts[0].bricks)]
    without = [run for run in runs if run not in with_it]
    assert with_it
    assert without
    for found in (diff(with_it[0], without[0]), diff(without[0], with_it[0]), diff_of(runs[:5], runs[5:])):
        assert named(found) == []
        assert not any("no longer there" in note or "new:" in note for note in found.notes)


def intervals(found: RunDiff) -> list[tuple[float, float]]:
    """Return the ratios and intervals of all verdicts, as text, Markdown and JSON show them."""
    lines = [line for text in (diff_text(found), diff_markdown(found)) for line in text.splitlines()]
    words = [line for line in lines if "slower" in line or "faster" in line]
    printed = [(float(one[1]), float(one[2])) for line in words if (one := _RATIO.search(line))]
    places = [place for part in json.loads(diff_json(found))["parts"] for place in part["places"]]
    told = [one["decisive_us"] for one in places if one["verdict"] in ("slower", "faster")]
    return printed + [(one["ratio"], one["ratio_half"]) for one in told]


@pytest.mark.slow
def test_nothing_is_called_slower_or_faster_if_its_interval_includes_one() -> None:
    drifting, scattered = Noise(drift=0.06), Noise(call=0.2, run=0.02)
    diffs = [diff(run_of(RATES, 1), run_of(RATES, 4, Planted("In 30 %", rate=2.0)))]
    for noise in (drifting, scattered):
        diffs += [diff(made_run(seed, noise, 120), made_run(seed + 50, noise, 120, slower=1.3)) for seed in range(3)]
    told = [each for found in diffs for each in intervals(found)]
    assert len(told) > 20
    assert [each for each in told if abs(each[0] - 1) < each[1] - 0.001] == []


def test_parts_of_a_sample_have_calls_of_recorded_steps() -> None:
    found = diff(run_of(MIXED, 1), run_of(MIXED, 2))
    assert {part.phase for part in found.parts} == {"decode", "prefill"}
    for part in found.parts:
        assert calls_of(part, "RmsNorm") == 2.0  # one call in each of the two layers
        assert calls_of(part, "In 30 %") == pytest.approx(0.6, abs=0.2)


def calls_of(part: PartDiff, name: str) -> float:
    calls = place_of(part, name).calls
    assert calls is not None
    return calls.now
