"""Tests of the parts and bricks of training steps, with a process in which all times are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.protocol.training_messages import PartTime, TrainingTimes
from cbtop.protocol.vocabulary import TRAIN, WARM_UP, TrainingPart
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import source_view
from cbtop.viewmodels.training import TrainingView, pass_of, passes_of_layer, training_view
from tests.cbtop.made_training import Seen, Training, trained
from tests.cbtop.viewmodels.verdicts.streams import Decoding, run

SHORT = Training(steps=30)


def training_of(seen: Seen, phase: str | None = None, *, window: bool = False) -> TrainingView:
    found = seen.one(phase, window=window).training
    assert found is not None
    return found


def with_times(seen: Seen, *times: TrainingTimes) -> TrainingView | None:
    """Replace the reports of the process by `times`. Return the view of its training steps."""
    (record,) = seen.store.sources.values()
    record.training_times = {(one.phase, one.model): one for one in times}
    return source_view(record, TRAIN).training


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return trained(tmp_path_factory.mktemp("seen"), SHORT)


def times(phase: str, model: str, forward_ns: int) -> TrainingTimes:
    return TrainingTimes(phase, model, 1, forward_ns, (PartTime("forward", forward_ns, forward_ns),))


def test_the_parts_of_a_step_have_their_times_and_close(tmp_path: Path) -> None:
    found = training_of(trained(tmp_path, SHORT))
    assert found.steps == 30
    assert found.mean_us == pytest.approx(33_000)
    assert {part.name: part.mean_us for part in found.parts} == pytest.approx(
        {
            "data wait": 600, "forward": 9_000, "loss": 400, "backward": 18_400, "clip": 300,
            "optimizer": 4_000, "zero grad": 100, "other": 200,
        }
    )  # fmt: skip
    rare = TrainingPart.COMMUNICATION, TrainingPart.EVALUATION, TrainingPart.NO_KERNEL
    assert [part.name for part in found.parts] == [part.value for part in TrainingPart if part not in rare]
    assert found.communication is None
    assert [part.p50_us for part in found.parts] == [part.mean_us for part in found.parts]
    assert sum(part.percent for part in found.parts) == pytest.approx(100)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=8).filter(any), st.integers(1, 64))
def test_parts_close_to_the_mean_step_whatever_they_take(seen: Seen, taken_ns: list[int], steps: int) -> None:
    names = [part.value for part in TrainingPart]
    parts = tuple(PartTime(name, ns, ns // 2) for name, ns in zip(names, taken_ns, strict=False))
    found = with_times(seen, TrainingTimes(TRAIN, "", steps, sum(taken_ns), parts))
    assert found is not None
    assert found.mean_us is not None
    assert sum(part.percent for part in found.parts) == pytest.approx(100)
    assert sum(part.mean_us for part in found.parts) == pytest.approx(found.mean_us)
    assert found.part(TrainingPart.DATA_WAIT) == found.parts[0]


@pytest.mark.parametrize(("overlapped_us", "why"), [(2_000.0, ""), (None, "nobody knows")])
def test_exposed_communication_is_a_part_and_overlapped_communication_is_none(
    tmp_path: Path, overlapped_us: float | None, why: str
) -> None:
    found = training_of(trained(tmp_path, replace(SHORT, exposed_us=5_000, overlapped_us=overlapped_us)))
    part = found.part(TrainingPart.COMMUNICATION)
    assert part is not None
    assert part.mean_us == pytest.approx(5_000)
    assert sum(part.mean_us for part in found.parts) == pytest.approx(found.mean_us) == pytest.approx(38_000)
    assert found.communication is not None
    assert [(row.name, row.mean_us) for row in found.communication.exposed] == [("GradientSync, backward", 5_000)]
    assert (found.communication.overlapped_us, found.communication.why_unknown) == (overlapped_us, why)


def test_forward_backward_and_recompute_of_a_brick_are_one_row(tmp_path: Path) -> None:
    found = training_of(trained(tmp_path, replace(SHORT, recomputes=True)))
    rows = {row.name: row for row in found.bricks}
    down = rows["DownProjection"]
    assert (down.forward_us, down.backward_us, down.recompute_us) == pytest.approx((5_400, 10_800, 5_400))
    assert down.us == pytest.approx(21_600)
    assert down.percent == pytest.approx(100 * 21_600 / 42_000)
    assert (rows["Loss"].forward_us, rows["Loss"].recompute_us) == (pytest.approx(400), None)
    assert (rows["Optimizer"].us, rows["Optimizer"].forward_us) == (pytest.approx(4_000), None)
    assert [row.us for row in found.bricks] == sorted((row.us for row in found.bricks), reverse=True)
    assert sum(row.percent or 0 for row in found.bricks) == pytest.approx(100 * 41_800 / 42_000)


def test_the_passes_of_a_layer_and_the_time_between_bricks_are_its_time(tmp_path: Path) -> None:
    layers = trained(tmp_path, replace(SHORT, recomputes=True, is_stacked=False)).one().layer_times
    assert layers is not None
    for row in layers.rows:
        assert passes_of_layer(layers, row) == pytest.approx((3_000, 9_000))
        assert sum(passes_of_layer(layers, row)) + row.between_us == pytest.approx(row.us)


def test_the_bricks_of_a_window_are_of_a_mean_step(tmp_path: Path) -> None:
    found = training_of(trained(tmp_path, replace(SHORT, steps=400)), window=True)
    assert {row.name: row.us for row in found.bricks}["QkvProjection"] == pytest.approx(9_000)


def test_a_part_of_a_later_version_comes_last_under_its_name(seen: Seen) -> None:
    later = TrainingTimes(TRAIN, "", 1, 30, (PartTime("all-reduce", 10, 10), PartTime("other", 20, 20)))
    found = with_times(seen, later)
    assert found is not None
    assert [part.name for part in found.parts] == ["other", "all-reduce"]


def test_times_of_other_steps_and_models_are_not_shown(seen: Seen) -> None:
    found = with_times(seen, times(f"{TRAIN} SGD 2", "", 10))
    assert found is not None
    assert (found.steps, found.mean_us, found.parts) == (0, None, ())
    assert len(found.bricks) == 8


def test_a_step_that_names_no_model_takes_the_only_reported_times(seen: Seen) -> None:
    one = with_times(seen, times(TRAIN, "Llama", 10))
    assert one is not None
    assert one.mean_us == 0.01
    two = with_times(seen, times(TRAIN, "Llama", 10), times(TRAIN, "Critic", 20))
    assert two is not None
    assert two.parts == ()
    exact = with_times(seen, times(TRAIN, "Llama", 10), times(TRAIN, "", 20))
    assert exact is not None
    assert exact.mean_us == 0.02


def test_several_optimizers_have_their_own_steps(tmp_path: Path) -> None:
    found = trained(tmp_path, replace(SHORT, phase=f"{TRAIN} Adam 2")).one().training
    assert found is not None
    assert found.steps == 30


def test_warm_up_steps_have_bricks_but_no_parts(tmp_path: Path) -> None:
    seen = trained(tmp_path, replace(SHORT, warm_up=5))
    assert training_of(seen, TRAIN).steps == 25
    warm = training_of(seen, TRAIN + WARM_UP)
    assert (warm.parts, len(warm.bricks)) == ((), 8)


def test_steps_that_do_not_train_have_no_training_view(tmp_path: Path) -> None:
    made = run(tmp_path, Decoding(seconds=0.4))
    assert made.one().training is None
    (record,) = made.store.sources.values()
    totals = PhaseTotals.of(record.nodes, record.stats, "decode")
    assert training_view(record, totals, lambda: pytest.fail("bricks are made in vain")) is None


def test_a_sum_of_processes_has_bricks_but_no_parts(tmp_path: Path) -> None:
    found = trained(tmp_path, SHORT).merged(MergeMode.SUM)
    assert found is not None
    assert found.training is not None
    assert found.training.parts == ()
    slowest = trained_again(tmp_path / "max").merged(MergeMode.MAX)
    assert slowest is not None
    assert slowest.training is None


def trained_again(directory: Path) -> Seen:
    directory.mkdir()
    return trained(directory, SHORT)


def test_steps_that_have_not_ended_have_no_bricks(tmp_path: Path) -> None:
    (record,) = trained(tmp_path, SHORT).store.sources.values()
    totals = PhaseTotals.of(record.nodes, type(record.stats)(), TRAIN)
    found = training_view(record, totals, list)
    assert found is not None
    assert found.bricks == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("RmsNorm", ("RmsNorm", "")),
        ("RmsNorm backward", ("RmsNorm", " backward")),
        ("RmsNorm recompute", ("RmsNorm", " recompute")),
        ("backward", ("backward", "")),
    ],
)
def test_the_pass_of_a_brick_is_the_end_of_its_name(name: str, expected: tuple[str, str]) -> None:
    assert pass_of(name) == expected
