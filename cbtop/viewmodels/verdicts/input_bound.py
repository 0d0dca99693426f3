"""Verdict "input-bound": training steps wait for their data."""

from __future__ import annotations

from cbtop.protocol.vocabulary import TrainingPart
from cbtop.units import count, duration, number, percent
from cbtop.viewmodels.cpu_samples import mostly
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.training import TrainingPartRow, TrainingView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import LIKE_ALL, Finding, Rule, gain, rates_us
from cbtop.viewmodels.verdicts.starved import is_explained_by_waiting

# At least this many training steps are needed. At first, a loader may have a full queue, or start its workers.
MIN_TRAINING_STEPS = 20
# Even a fast loader takes a few percent to hand over a batch and copy it to a device. A wait above this percentage of
# a step is reported.
WAIT_PERCENT = 10.0


def _find(view: SourceView) -> Finding | None:
    steps, training = view.steps, view.training
    wait = training.part(TrainingPart.DATA_WAIT) if training else None
    if steps is None or training is None or wait is None or training.steps < MIN_TRAINING_STEPS:
        return None
    if wait.percent < WAIT_PERCENT or is_explained_by_waiting(view, wait.percent):
        return None
    is_certain = _is_certain(view, training, wait)
    more = gain(view, wait.percent) if is_certain else None
    faster = _samples_per_sec(view, wait) if is_certain else None
    tail = f"; without the wait, {number(faster)} samples/s at most" if faster and more is None else ""
    return Finding(
        f"{percent(wait.percent)} of a {steps.phase} step waits for data: {duration(wait.mean_us)} of "
        f"{duration(training.mean_us)}, the mean of the latest {count(training.steps)}{tail}"
        f"{mostly(view.sampled, TrainingPart.DATA_WAIT)}",
        (
            Evidence("data wait", wait.percent, "%"),
            Evidence("data wait a step", wait.mean_us, "µs"),
            Evidence("median data wait a step", wait.p50_us, "µs"),
            Evidence("step", training.mean_us or 0.0, "µs"),
            *((Evidence("without the wait", faster, "samples/s"),) if faster else ()),
        ),
        Subject(About.STEPS, steps.phase),
        more,
        "no step waited for its data",
    )


def _is_certain(view: SourceView, training: TrainingView, wait: TrainingPartRow) -> bool:
    """Whether most training steps wait for data, and the newest ones took as long as all shown steps."""
    mean_us, shown_us = training.mean_us, view.steps.mean_us if view.steps else None
    if not mean_us or not shown_us:
        return False
    return 100 * wait.p50_us / mean_us >= WAIT_PERCENT and 1 / LIKE_ALL <= mean_us / shown_us <= LIKE_ALL


def _samples_per_sec(view: SourceView, wait: TrainingPartRow) -> float | None:
    """Return the training's samples/s without waits for data.

    None if steps do not report their samples or overlap, or in a merge.
    """
    steps = view.steps
    if steps is None or steps.samples_per_sec is None or steps.overlap or view.merged is not None:
        return None
    time_range = view.time_range
    ran_us = sum(phase.us for phase in time_range.by_phase if phase.name == steps.phase) if time_range else 0.0
    if time_range is None or not time_range.wall_us or wait.percent >= 100:
        return None
    return steps.samples_per_sec / (1 - wait.percent / 100 * min(1.0, ran_us / rates_us(steps, time_range)))


INPUT_BOUND = Rule(
    id="input-bound",
    severity=Severity.WARNING,
    means="Training steps wait for data: the loader delivers batches more slowly than the model takes them. Faster "
    "kernels change little.",
    fires=f"In {MIN_TRAINING_STEPS} training steps or more, at most the latest 64, waiting for data takes "
    f"{WAIT_PERCENT:g} % of the time or more. Not if waits for a processor may explain half of it. A gain is given "
    "if the median step waits as much, and these steps took as long as those shown.",
    advice="Use more workers (DataLoader num_workers), keep them alive between epochs (persistent_workers), prefetch "
    "batches, pin memory and copy with non_blocking=True. Or prepare the data once and store it.",
    find=_find,
)
