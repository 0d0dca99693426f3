"""The messages about training steps: the time of their parts."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.protocol.attributes import MAX_QUANTITY

MAX_TIMED_STEPS = 64  # training steps of a TrainingTimes
MAX_STEP_PARTS = 32  # parts of a training step, and kinds of its communication; this version knows nine parts


@dataclass(frozen=True, slots=True)
class PartTime:
    """The time of one part of a training step, for example `backward` (see `TrainingPart`).

    `sum_ns` is the sum over the steps, and `p50_ns` is the median of a step. A newer process may send a part that
    this version does not know.
    """

    name: str
    sum_ns: int
    p50_ns: int

    def __post_init__(self) -> None:
        if not 0 <= self.p50_ns <= self.sum_ns < MAX_QUANTITY:
            raise ValueError(f"part {self.name!r} took {self.sum_ns} ns, a median step {self.p50_ns} ns")


@dataclass(frozen=True, slots=True)
class CommunicationTimes:
    """The communication of the latest training steps of a model.

    `exposed` has the waits by kind, for example `AllGather, backward`. They are in the part `communication`.
    `overlapped_ns` is the time, at most, in which communication ran while the steps computed. It is in other parts.
    It is None if unknown, and `why_unknown` has the reason.
    """

    exposed: tuple[PartTime, ...]
    overlapped_ns: int | None = None
    why_unknown: str = ""

    def __post_init__(self) -> None:
        if len(self.exposed) > MAX_STEP_PARTS or len({kind.name for kind in self.exposed}) < len(self.exposed):
            raise ValueError(
                f"{len(self.exposed)} kinds of communication; expected up to {MAX_STEP_PARTS}, named once"
            )
        if self.overlapped_ns is not None and not 0 <= self.overlapped_ns < MAX_QUANTITY:
            raise ValueError(f"{self.overlapped_ns} ns of communication overlapped with computation")


@dataclass(frozen=True, slots=True)
class TrainingTimes:
    """The parts of the latest `steps` training steps of a model, recorded or not.

    The sums of the parts add up to `wall_ns`, the sum of the steps' times. A message replaces the previous one of the
    same phase and model.
    """

    phase: str
    model: str
    steps: int
    wall_ns: int
    parts: tuple[PartTime, ...]
    communication: CommunicationTimes | None = None  # None: no process waited for another

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MAX_TIMED_STEPS or not 0 < self.wall_ns < MAX_QUANTITY:
            raise ValueError(f"{self.phase!r}: {self.steps} steps of {self.wall_ns} ns together")
        if len(self.parts) > MAX_STEP_PARTS or len({part.name for part in self.parts}) < len(self.parts):
            raise ValueError(f"{self.phase!r}: {len(self.parts)} parts; expected up to {MAX_STEP_PARTS}, named once")
        total_ns = sum(part.sum_ns for part in self.parts)
        if total_ns != self.wall_ns:
            raise ValueError(f"{self.phase!r}: the parts take {total_ns} ns, the steps {self.wall_ns} ns")
        waited_ns = 0 if self.communication is None else sum(kind.sum_ns for kind in self.communication.exposed)
        if waited_ns > self.wall_ns:
            raise ValueError(f"{self.phase!r}: communication took {waited_ns} ns, the steps {self.wall_ns} ns")
