"""Tests of the parts of the shown time: the parts add up, and a warm-up is a separate part. The clock is fake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cbtop.client.store import Store
from cbtop.profiler.profiler import BrickProfiler
from cbtop.reports import REPORTS
from cbtop.reports.summary import summary
from cbtop.viewmodels.source import SourceView, source_view
from tests.cbtop.recorded import Clock, apply, profiler_in, seen_at, source_of

WARM_UP = "encode (warm-up)"


def recorded(
    directory: Path, program: Callable[[BrickProfiler, Clock], None], phase: str | None = None
) -> SourceView:
    """Run the profiled function `program`. Return the view of its process."""
    clock = Clock(0)
    profiler = profiler_in(directory, clock)
    program(profiler, clock)
    store = Store()
    apply(store, seen_at(source_of(directory), clock.now_ns))
    (record,) = store.sources.values()
    view = source_view(record, phase)
    profiler.close()
    return view


def step(profiler: BrickProfiler, clock: Clock, name: str, seconds: float, model: str = "") -> None:
    with profiler.step(name, tokens=100, model=model):
        clock.sleep_us(1e6 * seconds)


def wall_line(view: SourceView) -> str:
    """Return the line about the shown time in the text report.

    Check in the JSON report that the parts of this time add up.
    """
    text = REPORTS["text"]([view], ["bricks"])
    part = json.loads(REPORTS["json"]([view], []))["sources"][0]["stretch"]
    parts = [part["in_steps_us"], part["warm_up_us"] or 0, part["between_steps_us"], part["since_last_step_us"]]
    assert part["wall_us"] == pytest.approx(sum(parts))
    return next(line for line in text.splitlines() if line.startswith("wall clock "))


def continues(profiler: BrickProfiler, clock: Clock) -> None:
    """Run a warm-up of 5 s. Its last step still runs during the first step after the warm-up, which takes 2 s."""
    step(profiler, clock, WARM_UP, 1)
    with profiler.step(WARM_UP):
        clock.sleep_us(3e6)
        step(profiler, clock, "encode", 2)
    for _ in range(10):
        step(profiler, clock, "encode", 1)


def test_a_warm_up_that_goes_on_next_to_steps_is_not_in_their_time(tmp_path: Path) -> None:
    view = recorded(tmp_path, continues)
    assert view.time_range is not None
    assert (view.time_range.wall_us, view.time_range.in_steps_us) == (12e6, 12e6)
    assert [(phase.name, phase.us) for phase in view.time_range.by_phase] == [("encode", 12e6)]
    assert wall_line(view).startswith("wall clock 12.00 s = in steps 12.00 s + between steps 0.00 µs")


def two_models(profiler: BrickProfiler, clock: Clock) -> None:
    for _ in range(10):
        step(profiler, clock, "decode", 1, "policy")
    step(profiler, clock, "prefill (warm-up)", 2, "reward")
    for _ in range(4):
        step(profiler, clock, "prefill", 1, "reward")
        clock.sleep_us(1e6)
    step(profiler, clock, "decode", 1, "policy")


def test_a_later_models_warm_up_is_a_part_of_its_own_in_the_shown_time(tmp_path: Path) -> None:
    line = wall_line(recorded(tmp_path, two_models))
    assert line.startswith(
        "wall clock 21.00 s = in steps 15.00 s (policy decode 11.00 s, reward prefill 4.00 s) + warm-up 2.00 s + "
        "between steps 4.00 s (19.0 %)"
    )


def test_a_model_has_the_time_of_its_rates_in_the_line_below_them(tmp_path: Path) -> None:
    view = recorded(tmp_path, two_models)
    text = REPORTS["text"]([view], ["bricks"])
    (steps,) = (steps for steps in view.phases if steps.phase == "reward prefill")
    assert steps.tokens_per_sec == pytest.approx(400 / (steps.wall_us / 1e6))
    assert steps.wall_us == 9e6
    assert "steps ran 4.00 s of the 9.00 s of this model's rates" in text
    assert "steps ran 11.00 s of 21.00 s" in text


def test_a_warm_up_has_no_rates_over_a_time_that_is_not_its_own(tmp_path: Path) -> None:
    view = recorded(tmp_path, two_models, "reward prefill (warm-up)")
    assert view.steps is not None
    assert (view.steps.tokens_per_sec, view.steps.steps_per_sec, view.steps.samples_per_sec) == (None, None, None)
    assert view.steps.tokens_per_sec_in_steps == 50
    text = REPORTS["text"]([view], ["bricks"])
    assert "reward prefill (warm-up): 1 step, 100 tokens, n/a tokens/s, step p50 2.00 s" in text
    assert "50.00 tok/s without pauses: steps ran 2.00 s; ms/token" in text


def test_the_rates_of_a_process_with_only_a_warm_up_stay(tmp_path: Path) -> None:
    view = recorded(tmp_path, lambda profiler, clock: step(profiler, clock, WARM_UP, 2))
    assert view.steps is not None
    assert view.steps.tokens_per_sec == 50
    assert "in steps 2.00 s + between" in wall_line(view)


def nested(profiler: BrickProfiler, clock: Clock) -> None:
    """Run a step inside a step of another phase, and then a step of the warm-up."""
    with profiler.step("outer", tokens=1):
        step(profiler, clock, "inner", 1)
        clock.sleep_us(1e6)
    step(profiler, clock, "other (warm-up)", 1)
    clock.sleep_us(1e6)
    step(profiler, clock, "outer", 1)


def test_phases_that_overlap_next_to_a_warm_up_include_it_and_a_line_tells(tmp_path: Path) -> None:
    view = recorded(tmp_path, nested)
    assert view.time_range is not None
    assert view.time_range.warm_up_us is None
    line = wall_line(view)
    assert "= in steps, warm-ups included, 4.00 s (" in line
    assert "other (warm-up) 1.00 s" in line
    assert "; they overlap) + between steps 1.00 s" in line


def test_a_summary_has_other_phases_while_they_ran_and_their_share(tmp_path: Path) -> None:
    view = recorded(tmp_path, two_models)
    assert "also: reward prefill 100.0 tokens/s while it ran, 19.0 % of the time" in summary(view, "cbtop")
    said = json.loads(REPORTS["json"]([view], []))["sources"][0]["phases"]
    assert {one["phase"]: one["tokens_per_sec_in_steps"] for one in said}["reward prefill"] == 100


def test_other_phases_without_tokens_have_samples_while_they_ran(tmp_path: Path) -> None:
    def two_pictures(profiler: BrickProfiler, clock: Clock) -> None:
        for name, seconds in (("encode", 3.0), ("forward", 1.0)) * 10:
            with profiler.step(name) as running:
                running.sequences = 4
                clock.sleep_us(1e6 * seconds)

    view = recorded(tmp_path, two_pictures, "encode")
    assert "also: forward 1.00 steps/s, 4.00 samples/s while it ran, 25.0 % of the time" in summary(view, "cbtop")
