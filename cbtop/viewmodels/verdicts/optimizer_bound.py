"""The verdict "optimizer-bound": the optimizer takes much of a training step."""

from __future__ import annotations

from cbtop.protocol.vocabulary import TrainingPart
from cbtop.units import count, duration, percent
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule
from cbtop.viewmodels.verdicts.input_bound import MIN_TRAINING_STEPS

# The optimizer is reported above this percentage of a training step. Adam in float32 moves 28 bytes per weight. The
# passes of some hundred tokens take several times as long.
OPTIMIZER_PERCENT = 25.0


def _find(view: SourceView) -> Finding | None:
    steps, training = view.steps, view.training
    optimizer = training.part(TrainingPart.OPTIMIZER) if training else None
    if steps is None or training is None or optimizer is None or training.steps < MIN_TRAINING_STEPS:
        return None
    if optimizer.percent < OPTIMIZER_PERCENT:
        return None
    return Finding(
        f"{percent(optimizer.percent)} of a {steps.phase} step is the optimizer: {duration(optimizer.mean_us)} of "
        f"{duration(training.mean_us)}, the mean of the latest {count(training.steps)}",
        (
            Evidence("optimizer", optimizer.percent, "%"),
            Evidence("optimizer a step", optimizer.mean_us, "µs"),
            Evidence("median optimizer a step", optimizer.p50_us, "µs"),
            Evidence("step", training.mean_us or 0.0, "µs"),
        ),
        Subject(About.STEPS, steps.phase),
    )


OPTIMIZER_BOUND = Rule(
    id="optimizer-bound",
    severity=Severity.WARNING,
    means="The optimizer takes much of a training step. Its time depends on the number of weights, not on the batch.",
    fires=f"In {MIN_TRAINING_STEPS} training steps or more, at most the latest 64, the optimizer takes "
    f"{OPTIMIZER_PERCENT:g} % of the time or more.",
    advice="Use fused=True or foreach=True if the optimizer has them. Let a step have larger or more micro-batches, "
    "so the optimizer runs less often. Do not pass frozen weights to it.",
    find=_find,
)
