"""The verdict "waits for rank": a rank of a training job waits for a slower rank."""

from __future__ import annotations

from cbtop.protocol.vocabulary import TrainingPart
from cbtop.units import count, duration, percent
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, gain
from cbtop.viewmodels.verdicts.communication_exposed import EXPOSED_PERCENT
from cbtop.viewmodels.verdicts.input_bound import MIN_TRAINING_STEPS
from cbtop.viewmodels.verdicts.starved import is_explained_by_waiting


def _find(view: SourceView) -> Finding | None:
    steps, training = view.steps, view.training
    part = training.part(TrainingPart.COMMUNICATION) if training else None
    ranks = training.communication.ranks if training and training.communication else None
    if steps is None or training is None or part is None or ranks is None or not training.mean_us:
        return None
    if view.straggler is not None and view.straggler.others_wait:
        return None  # the verdict "straggler" says the same with more facts
    share = 100 * ranks.waiting_us / training.mean_us
    if training.steps < MIN_TRAINING_STEPS or share < EXPOSED_PERCENT or is_explained_by_waiting(view, share):
        return None
    return Finding(
        f"{percent(share)} of a {steps.phase} step waits for rank {ranks.slowest}: {duration(ranks.waiting_us)} of "
        f"{duration(training.mean_us)}, of the latest {count(training.steps)}; communication itself takes "
        f"{duration(ranks.communication_us)} at most",
        (
            Evidence("waiting for the slowest rank", share, "%"),
            Evidence("waiting a step", ranks.waiting_us, "µs"),
            Evidence("exposed communication a step", part.mean_us, "µs"),
            Evidence("communication itself a step", ranks.communication_us, "µs"),
            Evidence("step", training.mean_us, "µs"),
        ),
        Subject(About.RANK, f"rank {ranks.slowest}"),
        gain(view, share),
        f"rank {ranks.slowest} were as fast as this one",
    )


WAITS_FOR_RANK = Rule(
    id="waits-for-rank",
    severity=Severity.WARNING,
    means="This rank waits in communication for a slower rank of its training job.",
    fires=f"All ranks are seen, and their steps are equally long. In {MIN_TRAINING_STEPS} training steps or more, it "
    f"waits longer than the slowest one, by {EXPOSED_PERCENT:g} % of the mean and the median step. Not if waits "
    "for a processor may explain half of it, or if there is a straggler.",
    advice="Look at the slowest rank: its data, its work, its machine.",
    find=_find,
)
