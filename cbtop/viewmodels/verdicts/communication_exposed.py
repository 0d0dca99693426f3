"""Verdict "communication exposed": training steps wait for communication that could overlap with computation."""

from __future__ import annotations

from cbtop.protocol.vocabulary import TrainingPart
from cbtop.units import count, duration, percent
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.training import TrainingPartRow, TrainingView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, gain
from cbtop.viewmodels.verdicts.input_bound import MIN_TRAINING_STEPS
from cbtop.viewmodels.verdicts.starved import is_explained_by_waiting

# A few percent of a step are always exposed, because the last bucket of gradients cannot overlap with computation.
# Above this percentage it is reported.
EXPOSED_PERCENT = 10.0


def _find(view: SourceView) -> Finding | None:
    steps, training = view.steps, view.training
    part = training.part(TrainingPart.COMMUNICATION) if training else None
    if steps is None or training is None or part is None or training.steps < MIN_TRAINING_STEPS:
        return None
    exposed_us = _exposed_us(training, part)
    share = 100 * exposed_us / training.mean_us if training.mean_us else 0.0
    if share < EXPOSED_PERCENT or is_explained_by_waiting(view, share):
        return None
    found = training.communication
    most = found.exposed[0] if found and found.exposed else None
    overlapped_us = found.overlapped_us if found else None
    is_compared = found is not None and found.ranks is not None
    what = "waits for communication" if is_compared else "is exposed communication or a wait for another rank"
    return Finding(
        f"{percent(share)} of a {steps.phase} step {what}: {duration(exposed_us)} of {duration(training.mean_us)}, "
        f"of the latest {count(training.steps)}" + (f", most of it in {most.name}" if most else ""),
        (
            Evidence("exposed communication", share, "%"),
            Evidence("exposed communication a step", exposed_us, "µs"),
            *((Evidence("overlapped with computation at most", overlapped_us, "µs"),) if overlapped_us else ()),
            Evidence("step", training.mean_us or 0.0, "µs"),
        ),
        Subject(About.STEPS, steps.phase),
        gain(view, share) if is_compared else None,
        "all of it were overlapped with computation",
    )


def _exposed_us(training: TrainingView, part: TrainingPartRow) -> float:
    """Return the communication per step that does not overlap with computation: the mean or median over steps,
    whichever is smaller.

    If all ranks are visible, this rank's wait for slower ones is subtracted.
    """
    ranks = training.communication.ranks if training.communication else None
    return min(part.mean_us, part.p50_us) if ranks is None else ranks.communication_us


COMMUNICATION_EXPOSED = Rule(
    id="communication-exposed",
    severity=Severity.WARNING,
    means="Training steps wait for gradients or weights of other ranks, and do not compute meanwhile.",
    fires=f"In {MIN_TRAINING_STEPS} training steps or more, exposed communication takes {EXPOSED_PERCENT:g} % of the "
    "mean and the median step. If all ranks are seen, the least of any rank counts. Otherwise it may be a wait for "
    "another rank, without a gain. Not if waits for a processor may explain half of it.",
    advice="Communicate less often (larger batches, no_sync()) or fewer bytes (a bfloat16 hook). Overlap more: "
    "smaller buckets, or one fully_shard for each layer.",
    find=_find,
)
