"""Adds up the time that training steps spend on communication between processes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from cbtop.protocol.training_messages import MAX_STEP_PARTS, CommunicationTimes, PartTime

# The first MAX_STEP_PARTS - 1 kinds of communication keep their names. All other kinds are added up under this name.
OTHERS = "others"


class StepCommunication:
    """The time that a training step waited for communication, and the overlap of communication with computation."""

    __slots__ = ("overlapped_ns", "unknown", "waits_ns")

    def __init__(self) -> None:
        self.waits_ns: dict[str, int] = {}  # kind of wait, for example `AllGather, backward` -> its time in ns
        # The overlap in ns: the computation after the first gradients had been sent. This is a maximum.
        self.overlapped_ns = 0
        self.unknown = ""  # why a time is not known; "" if all are known

    def waited(self, kind: str, wait_ns: int) -> None:
        """Add a wait for communication."""
        if kind not in self.waits_ns and len(self.waits_ns) >= MAX_STEP_PARTS - 1:
            kind = OTHERS
        self.waits_ns[kind] = self.waits_ns.get(kind, 0) + wait_ns


def together(steps: Sequence[StepCommunication]) -> CommunicationTimes | None:
    """Return the times of all `steps`, or None if they did not communicate.

    The overlap of some steps may be unknown, for example before DistributedDataParallel has rebuilt its buckets. If
    at least half of the steps have it, the others count with the mean. Otherwise it is None.
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
