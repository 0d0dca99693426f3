"""The communication of one training step, and of several steps together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from cbtop.protocol.training_messages import MAX_STEP_PARTS, CommunicationTimes, PartTime

OTHERS = "others"  # name for all kinds of communication after the first MAX_STEP_PARTS - 1


class StepCommunication:
    """The waits of a training step for communication, and the computation that overlapped with communication."""

    __slots__ = ("overlapped_ns", "unknown", "waits_ns")

    def __init__(self) -> None:
        self.waits_ns: dict[str, int] = {}  # by kind, for example `AllGather, backward`
        self.overlapped_ns = 0  # longest possible overlap: computation after the first gradients had been sent
        self.unknown = ""  # reason why some of these times are not known; "" if all are known

    def waited(self, kind: str, wait_ns: int) -> None:
        """Add a wait for communication."""
        if kind not in self.waits_ns and len(self.waits_ns) >= MAX_STEP_PARTS - 1:
            kind = OTHERS
        self.waits_ns[kind] = self.waits_ns.get(kind, 0) + wait_ns


def together(steps: Sequence[StepCommunication]) -> CommunicationTimes | None:
    """Return the times of all `steps`, or None if they did not communicate.

    The overlapped time of some steps may be unknown, for example before DistributedDataParallel has rebuilt its
    buckets. If it is known for at least half of the steps, the other steps count with the mean. Otherwise it is None.
    """
    known = [step.overlapped_ns for step in steps if not step.unknown]
    is_known = 2 * len(known) >= len(steps)
    unknown = "" if is_known else next(step.unknown for step in reversed(steps) if step.unknown)
    kinds = dict.fromkeys(kind for step in steps for kind in step.waits_ns)
    if not kinds and not unknown:
        return None
    exposed = []
    for kind in list(kinds)[:MAX_STEP_PARTS]:
        each = [step.waits_ns.get(kind, 0) for step in steps]
        exposed.append(PartTime(kind, sum(each), round(statistics.median(each))))
    overlapped_ns = round(sum(known) / len(known) * len(steps)) if is_known else None
    return CommunicationTimes(tuple(exposed), overlapped_ns, unknown)
