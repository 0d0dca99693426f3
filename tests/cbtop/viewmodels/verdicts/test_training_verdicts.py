"""Tests of verdicts on training steps: their text, their gain, and when they are withheld."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.protocol.training_messages import GradientMessage
from cbtop.protocol.vocabulary import TRAIN, WARM_UP, TrainingPart
from cbtop.viewmodels.guard import GuardFaultView, GuardView
from cbtop.viewmodels.on_demand import with_parts
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.training import TrainingPartRow
from cbtop.viewmodels.verdict import Severity, Verdict
from cbtop.viewmodels.verdicts import judged
from tests.cbtop.made_training import FALLING_SCALE, NAN, NORM, Training, memory, of_ranks, trained
from tests.representatives import first_by_default

WAITS = Training(data_us=12_000)
EXPOSED = Training(exposed_us=9_000, overlapped_us=2_000)
SLOW = Training(exposed_us=200, other_us=9_000)


def verdict_of(view: SourceView) -> Verdict:
    (found,) = view.verdicts
    return found


def test_a_wait_for_data_names_its_share_and_the_rate_without_it(tmp_path: Path) -> None:
    view = trained(tmp_path, WAITS).one()
    found = verdict_of(view)
    assert found.sentence == (
        "27.0 % of a train step waits for data: 12.00 ms of 44.40 ms, the mean of the latest 64; "
        "without the wait, 246.9 samples/s at most"
    )
    assert found.gain_tokens_per_sec is None
    assert {one.name: one.value for one in found.evidence}["without the wait"] == pytest.approx(8 / 32.4e-3)


def test_the_gain_is_the_rate_of_the_same_steps_without_the_wait(tmp_path: Path) -> None:
    view = trained(tmp_path, Training(data_us=12_000, tokens=444)).one()
    found = verdict_of(view)
    assert view.steps is not None
    assert view.steps.tokens_per_sec == pytest.approx(444 / 44.4e-3)
    assert found.gain_tokens_per_sec == pytest.approx(444 / 32.4e-3 - 444 / 44.4e-3)
    assert "samples/s" not in found.sentence


def test_of_one_rank_alone_communication_may_be_a_wait_and_no_gain_is_given(tmp_path: Path) -> None:
    found = verdict_of(trained(tmp_path, replace(EXPOSED, tokens=444)).one())
    assert found.sentence == (
        "21.4 % of a train step is exposed communication or a wait for another rank: 9.00 ms of 42.00 ms, "
        "of the latest 64, most of it in GradientSync, backward"
    )
    assert found.gain_tokens_per_sec is None


def test_the_least_exposed_time_of_any_rank_is_communication_and_could_overlap(tmp_path: Path) -> None:
    plan = replace(EXPOSED, tokens=444)
    view, _ = of_ranks(tmp_path, plan, replace(plan, exposed_us=8_000, other_us=1_200))
    found = verdict_of(view)
    assert found.sentence.startswith("19.0 % of a train step waits for communication: 8.00 ms of 42.00 ms")
    assert found.gain_tokens_per_sec == pytest.approx(444 / 34e-3 - 444 / 42e-3)
    evidence = {one.name: one.value for one in found.evidence}
    assert evidence["overlapped with computation at most"] == pytest.approx(2_000)


def test_a_rank_that_waits_for_a_slower_one_names_it_and_the_slower_one_does_not_wait(tmp_path: Path) -> None:
    waits, slow = of_ranks(tmp_path, EXPOSED, SLOW)
    found = verdict_of(waits)
    assert found.id == "waits-for-rank"
    assert found.sentence == (
        "21.0 % of a train step waits for rank 1: 8.80 ms of 42.00 ms, of the latest 64; "
        "communication itself takes 200.0 µs at most"
    )
    assert slow.verdicts == ()


def test_ranks_are_not_compared_if_one_is_missing_or_their_steps_differ(tmp_path: Path) -> None:
    view, _ = of_ranks(tmp_path, EXPOSED, replace(SLOW, other_us=20_000))
    assert view.training is not None
    assert view.training.communication is not None
    assert view.training.communication.ranks is None
    assert "or a wait for another rank" in verdict_of(view).sentence


def test_waits_in_few_steps_have_no_gain(tmp_path: Path) -> None:
    view = trained(tmp_path, Training(data_us=12_000, tokens=444)).one()
    assert view.training is not None
    wait, *others = view.training.parts
    rare = type(view.training)(
        64, view.training.mean_us, (type(wait)(wait.name, wait.percent, wait.mean_us, 10.0), *others), ()
    )
    found = verdict_of(judged(with_parts(view, training=rare)))
    assert (found.id, found.gain_tokens_per_sec) == ("input-bound", None)
    assert len(found.evidence) == 4


def test_other_steps_than_those_shown_give_no_gain(tmp_path: Path) -> None:
    view = trained(tmp_path, Training(data_us=12_000, tokens=444)).one()
    assert view.training is not None
    longer = type(view.training)(64, 2 * (view.training.mean_us or 0), view.training.parts, ())
    assert verdict_of(judged(with_parts(view, training=longer))).gain_tokens_per_sec is None


@first_by_default("plan", [WAITS, Training(optimizer_us=15_000), Training(recomputes=True), EXPOSED], 2)
def test_a_process_that_waits_for_a_processor_is_only_starved(tmp_path: Path, plan: Training) -> None:
    view = with_parts(trained(tmp_path, plan).one(), waiting_percent=40.0)
    assert [verdict.id for verdict in judged(view).verdicts] == ["starved"]


@pytest.mark.parametrize(("waited", "ids"), [(15.0, []), (13.0, ["input-bound"])])
def test_waits_for_a_processor_may_explain_waits_for_data(tmp_path: Path, waited: float, ids: list[str]) -> None:
    view = with_parts(trained(tmp_path, WAITS).one(), waiting_percent=waited)
    assert [verdict.id for verdict in judged(view).verdicts] == ids


def test_warm_up_steps_have_no_verdict_on_their_speed(tmp_path: Path) -> None:
    plan = Training(warm_up=100, data_us=12_000, optimizer_us=15_000, exposed_us=9_000, recomputes=True)
    assert trained(tmp_path, plan).one(TRAIN + WARM_UP).verdicts == ()


def test_the_brick_that_is_repeated_most_is_named(tmp_path: Path) -> None:
    found = verdict_of(trained(tmp_path, Training(recomputes=True)).one())
    assert found.sentence == (
        "21.4 % of a train step repeats forward passes: 9.00 ms of 42.00 ms in 3 bricks, most of it in DownProjection"
    )


def test_time_between_training_steps_is_not_idle_time(tmp_path: Path) -> None:
    assert trained(tmp_path, Training(between_us=30_000)).one().verdicts == ()


@pytest.mark.parametrize(("percent", "ids"), [(19.0, []), (21.0, ["launch-bound"])])
def test_a_gpu_without_kernels_for_a_fifth_of_a_step_waits_for_its_host(
    tmp_path: Path, percent: float, ids: list[str]
) -> None:
    view = trained(tmp_path).one()
    training = view.training
    assert training is not None
    idle = TrainingPartRow(TrainingPart.NO_KERNEL, percent, 4_000.0, 4_000.0)
    others = [part for part in training.parts if part.name != TrainingPart.NO_KERNEL]
    on_gpu = replace(training, parts=(*others, idle))
    found = judged(with_parts(view, training=on_gpu)).verdicts
    assert [verdict.id for verdict in found] == ids
    for verdict in found:
        assert verdict.sentence.startswith("Launch-bound: no kernel runs in 21.0 % of a train step")


@pytest.mark.parametrize(
    ("by_kernels", "shown", "ids"),
    [(3, 1, ["launch-bound"]), (2, 1, []), (2, 9, []), (0, 3, ["launch-bound"]), (0, 2, [])],
)
def test_launch_bound_counts_the_recorded_steps_of_the_parts(
    tmp_path: Path, by_kernels: int, shown: int, ids: list[str]
) -> None:
    view = trained(tmp_path).one()
    training, steps = view.training, view.steps
    assert training is not None
    assert steps is not None
    idle = TrainingPartRow(TrainingPart.NO_KERNEL, 47.0, 24_000.0, 24_000.0)
    on_gpu = replace(training, parts=(*training.parts, idle), by_kernels=by_kernels)
    found = judged(with_parts(view, training=on_gpu, steps=replace(steps, recorded=shown))).verdicts
    assert [verdict.id for verdict in found] == ids
    evidence = [(one.name, one.value) for verdict in found for one in verdict.evidence]
    assert not ids or ("steps recorded by their kernels", by_kernels or shown) in evidence


def test_a_training_step_without_device_times_is_not_launch_bound(tmp_path: Path) -> None:
    view = trained(tmp_path, Training(other_us=30_000)).one()
    assert "launch-bound" not in {verdict.id for verdict in view.verdicts}


def test_memory_near_its_limit_is_named_with_the_brick_at_its_peak(tmp_path: Path) -> None:
    found = verdict_of(trained(tmp_path, Training(gradients=(memory(60, 76, 78, node=5),))).one())
    assert (found.id, found.severity) == ("memory-near-limit", Severity.NOTE)
    assert found.sentence == (
        "A train step allocates at least 76.0 GB, 96.2 % of the 79.0 GB that it can get, most in Layer 0 → "
        "QkvProjection"
    )


def test_memory_that_is_reserved_in_fragments_is_named(tmp_path: Path) -> None:
    found = verdict_of(trained(tmp_path, Training(gradients=(memory(30, 50, 78),))).one())
    assert found.id == "memory-near-limit"
    assert found.sentence == (
        "Memory is fragmented: at least 35.9 % of 78.0 GB reserved is not allocated at the peak of a train step; "
        "the limit is 79.0 GB"
    )


def test_memory_is_not_called_fragmented_if_torchs_own_peak_fills_it(tmp_path: Path) -> None:
    """Counters are read between calls. So a call may have taken and given back what seems unused."""
    told = replace(memory(30, 50, 78), torch_peak_bytes=77_000_000_000)
    assert trained(tmp_path, Training(gradients=(told,))).one().verdicts == ()


def test_retries_of_the_allocator_are_counted_with_what_is_unused(tmp_path: Path) -> None:
    found = verdict_of(trained(tmp_path, Training(gradients=(memory(30, 42, 60, retries=6),))).one())
    assert (found.id, found.severity) == ("allocator-retries", Severity.WARNING)
    assert found.sentence == (
        "The GPU had no memory left 6 times in 240 train steps, so torch emptied its cache; "
        "at most 30.0 % of 60.0 GB is unused"
    )
    assert ("retries", 6) in [(one.name, one.value) for one in found.evidence]


ALL = replace(NAN, faulty=39, finite_step=100)


@first_by_default(
    ("fault", "sentence"),
    [
        (NAN, "Gradient of layers.2.down.bias is NaN since step 118; so were 25 of the 38 others"),
        (replace(NAN, faulty=2), "Gradient of layers.2.down.bias is NaN since step 118; so was 1 of the 38 others"),
        (replace(NAN, faulty=1, kind="Inf"), "Gradient of layers.2.down.bias is Inf since step 118"),
        (
            replace(NAN, faulty=1, parameter="", finite_step=0),
            "Gradient of a parameter is NaN since step 118 at the latest",
        ),
        (
            ALL,
            "Gradients of all 39 parameters are NaN since step 118 at the latest (all were finite in step 100)",
        ),
        (
            replace(ALL, last_step=120),
            "Gradients of all 39 parameters were NaN from step 118 to step 120; all are finite again",
        ),
        (
            replace(NAN, faulty=1, last_step=118),
            "Gradient of layers.2.down.bias was NaN in step 118; all are finite again",
        ),
    ],
    3,
)
def test_a_gradient_that_is_not_finite_is_named_with_its_step(
    tmp_path: Path, fault: GradientMessage, sentence: str
) -> None:
    assert verdict_of(trained(tmp_path, Training(gradients=(NORM, fault))).one()).sentence == sentence


@pytest.mark.parametrize(
    ("fault", "is_first"),
    [
        (replace(NAN, step=117, finite_step=116), True),
        # The gradients were last finite in step 100, so the problem may be older than step 118.
        (replace(ALL, step=118, finite_step=100), True),
        (replace(NAN, step=118, finite_step=117), False),
    ],
)
def test_gradients_stand_before_the_weight_that_they_may_have_made(
    tmp_path: Path, fault: GradientMessage, is_first: bool
) -> None:
    view = trained(tmp_path, Training(gradients=(NORM, fault))).one()
    for weight in ("weight", None):
        found = GuardFaultView("NaN", "Down", "down", 2, "train", 118, 120, "finite", None, weight, None)
        ids = [verdict.id for verdict in judged(with_parts(view, guard=GuardView(None, 120, 120, 3, found))).verdicts]
        expected = ["not-finite", "gradient-not-finite"]
        assert ids[:2] == (expected[::-1] if is_first and weight else expected)


def test_a_fault_in_the_warm_up_is_an_error_too(tmp_path: Path) -> None:
    view = trained(tmp_path, Training(warm_up=100, gradients=(NAN,))).one(TRAIN + WARM_UP)
    assert verdict_of(view).id == "gradient-not-finite"


def test_a_loss_scale_that_falls_names_both_ends_and_the_skipped_steps(tmp_path: Path) -> None:
    view = trained(tmp_path, Training(gradients=(FALLING_SCALE,))).one()
    assert verdict_of(view).sentence == (
        "Loss scale fell from 65,536 to 16 in 40 steps; 12 of these steps were skipped"
    )


def test_a_loss_scale_of_0_is_said(tmp_path: Path) -> None:
    view = trained(tmp_path, Training(gradients=(replace(FALLING_SCALE, scale=0.0),))).one()
    assert verdict_of(view).sentence == "Loss scale is 0 in 40 steps; 12 of these steps were skipped"
