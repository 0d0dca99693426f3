"""Step metrics are those of the training steps since the last call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import cbtop.trackers
from cbtop import BrickProfiler
from cbtop.protocol.vocabulary import STEP_BRICKS
from cbtop.trackers.step_metrics import PARTS, StepMetrics
from tests.cbtop.recorded import Clock, profiler_in


def train(
    profiler: BrickProfiler, clock: Clock, forward_us: int, phase: str = "train", tokens: int = 8, model: str = ""
) -> None:
    """Record a step: the forward, twice this time for the backward, and 40 µs for the optimizer and in no brick."""
    with profiler.step(phase, tokens=tokens, model=model):
        for name, us in (("UpProjection", forward_us), ("UpProjection backward", 2 * forward_us), ("Optimizer", 30)):
            with profiler.brick(name):
                clock.now_ns += 1000 * us
        clock.now_ns += 10_000


@pytest.fixture
def made(runtime: Path) -> Iterator[tuple[StepMetrics, BrickProfiler, Clock]]:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    metrics = StepMetrics(profiler, bricks=2)
    metrics.begin()
    yield metrics, profiler, clock
    metrics.end()  # or the next test of a process that has torch reads this profiler, as under `cbtop run`


def test_only_the_steps_since_the_last_call_count(made: tuple[StepMetrics, BrickProfiler, Clock]) -> None:
    metrics, profiler, clock = made
    for _ in range(3):
        train(profiler, clock, 120)
    assert metrics.since_last() == {
        "cbtop/step_ms": pytest.approx(0.4),
        "cbtop/tokens_per_sec": pytest.approx(20_000),
        "cbtop/percent/forward": pytest.approx(30),
        "cbtop/percent/backward": pytest.approx(60),
        "cbtop/percent/optimizer": pytest.approx(7.5),
        "cbtop/percent/other": pytest.approx(2.5),
        "cbtop/brick_percent/UpProjection backward": pytest.approx(60),
        "cbtop/brick_percent/UpProjection": pytest.approx(30),
    }
    train(profiler, clock, 20)
    assert metrics.since_last()["cbtop/step_ms"] == pytest.approx(0.1)
    assert metrics.since_last() == {}


def test_warm_up_evaluation_and_unknown_tokens_are_left_out(
    made: tuple[StepMetrics, BrickProfiler, Clock],
) -> None:
    metrics, profiler, clock = made
    train(profiler, clock, 120, "train (warm-up)")
    train(profiler, clock, 120, "forward")
    assert metrics.since_last() == {}
    train(profiler, clock, 120, tokens=0)
    found = metrics.since_last()
    assert found["cbtop/step_ms"] == pytest.approx(0.4)
    assert "cbtop/tokens_per_sec" not in found


def test_samples_are_counted_if_every_step_reports_them(made: tuple[StepMetrics, BrickProfiler, Clock]) -> None:
    metrics, profiler, clock = made

    def step(samples: int | None) -> None:
        with profiler.step("train", None) as step:
            step.sequences = samples
            clock.now_ns += 400_000

    step(4)
    step(8)
    assert metrics.since_last()["cbtop/samples_per_sec"] == pytest.approx(12 / 800e-6)
    step(4)
    step(None)
    assert "cbtop/samples_per_sec" not in metrics.since_last()


def test_each_model_and_optimizer_has_metrics_of_its_own(
    made: tuple[StepMetrics, BrickProfiler, Clock],
) -> None:
    metrics, profiler, clock = made
    for _ in range(2):
        train(profiler, clock, 120)
        train(profiler, clock, 320, "train Adam 2", tokens=16, model="Critic")
    found = metrics.since_last()
    assert found["cbtop/step_ms"] == pytest.approx(0.4)
    assert found["cbtop/tokens_per_sec"] == pytest.approx(20_000)
    assert found["cbtop/Critic train Adam 2/step_ms"] == pytest.approx(1.0)
    assert found["cbtop/Critic train Adam 2/tokens_per_sec"] == pytest.approx(16_000)
    assert found["cbtop/Critic train Adam 2/percent/backward"] == pytest.approx(64)
    train(profiler, clock, 320, "train Adam 2", model="Critic")
    assert {name.rpartition("/")[0] for name in metrics.since_last()} == {
        f"cbtop/Critic train Adam 2{end}" for end in ("", "/percent", "/brick_percent")
    }


def test_a_model_that_trains_after_another_one_ran_has_the_plain_names(
    made: tuple[StepMetrics, BrickProfiler, Clock],
) -> None:
    metrics, profiler, clock = made
    train(profiler, clock, 120, "forward")  # such as the teacher of a distillation
    train(profiler, clock, 120, "train (warm-up)", model="Student")
    train(profiler, clock, 120, "trainer", model="Student")  # no training step, but a name of the program
    assert metrics.since_last() == {}
    train(profiler, clock, 120, model="Student")
    assert metrics.since_last()["cbtop/step_ms"] == pytest.approx(0.4)


def test_before_begin_and_after_end_there_are_no_metrics(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    metrics = StepMetrics(profiler)
    assert metrics.since_last() == {}
    train(profiler, clock, 120)
    metrics.begin()
    metrics.begin()
    assert metrics.since_last() == {}  # that step was before
    metrics.end()
    train(profiler, clock, 120)
    assert metrics.since_last() == {}
    metrics.end()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cbtop.trackers.StepMetrics is StepMetrics
    monkeypatch.setitem(__import__("sys").modules, "cbtop.trackers.lightning_callback", None)
    with pytest.raises(
        ImportError, match=r"^cbtop.trackers.LightningCallback needs lightning; pip install lightning"
    ):
        _ = cbtop.trackers.LightningCallback
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = cbtop.trackers.Nothing  # type: ignore[attr-defined]


def test_every_brick_of_a_step_has_a_part_and_the_loop_is_no_forward(
    made: tuple[StepMetrics, BrickProfiler, Clock],
) -> None:
    metrics, profiler, clock = made
    assert set(STEP_BRICKS) <= set(PARTS)
    with profiler.step("train", tokens=8):
        for name, us in (("UpProjection", 50), ("Loop", 30)):
            with profiler.brick(name):
                clock.now_ns += 1000 * us
        clock.now_ns += 20_000
    found = metrics.since_last()
    assert found["cbtop/percent/forward"] == pytest.approx(50)
    assert found["cbtop/percent/other"] == pytest.approx(50)
