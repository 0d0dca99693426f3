"""The messages about training steps: the time of their parts, their gradients and their loss scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cbtop.protocol.attributes import MAX_QUANTITY

MAX_TIMED_STEPS = 64  # a TrainingTimes covers at most this many training steps
# Most parts that a message may contain, and most kinds of communication. This version knows eleven parts.
MAX_STEP_PARTS = 32


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
    """The communication of the newest training steps of a model.

    `exposed` has the waits for communication by kind, for example `AllGather, backward`. Their time counts for the
    part `communication`.

    `overlapped_ns` is the most time that communication can have run while the steps computed. It counts for other
    parts. If it is unknown, it is None, and `why_unknown` has the reason.
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
    """The parts of the newest `steps` training steps of a model, recorded or not.

    The sums of the parts add up to `wall_ns`, the sum of the steps' times. A message replaces the previous one of the
    same phase and model. `by_kernels` is the number of recorded steps whose kernels give the parts' times. It is 0 if
    the host's clock timed all steps, or if the process is older than this field. `own_ns` is cbtop's own work in
    these steps, so far as it was timed. It is in no part and not in `wall_ns`.
    """

    phase: str
    model: str
    steps: int
    wall_ns: int
    parts: tuple[PartTime, ...]
    # None: the process did not wait for communication with another process.
    communication: CommunicationTimes | None = None
    by_kernels: int = 0
    own_ns: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MAX_TIMED_STEPS or not 0 < self.wall_ns < MAX_QUANTITY:
            raise ValueError(f"{self.phase!r}: {self.steps} steps of {self.wall_ns} ns together")
        if not 0 <= self.own_ns < MAX_QUANTITY:
            raise ValueError(f"{self.phase!r}: the own work of cbtop took {self.own_ns} ns")
        if not 0 <= self.by_kernels <= MAX_TIMED_STEPS:
            raise ValueError(f"{self.phase!r}: kernels of {self.by_kernels} steps; expected up to {MAX_TIMED_STEPS}")
        if len(self.parts) > MAX_STEP_PARTS or len({part.name for part in self.parts}) < len(self.parts):
            raise ValueError(f"{self.phase!r}: {len(self.parts)} parts; expected up to {MAX_STEP_PARTS}, named once")
        total_ns = sum(part.sum_ns for part in self.parts)
        if total_ns != self.wall_ns:
            raise ValueError(f"{self.phase!r}: the parts take {total_ns} ns, the steps {self.wall_ns} ns")
        waited_ns = 0 if self.communication is None else sum(kind.sum_ns for kind in self.communication.exposed)
        if waited_ns > self.wall_ns:
            raise ValueError(f"{self.phase!r}: communication took {waited_ns} ns, the steps {self.wall_ns} ns")


@dataclass(frozen=True, slots=True)
class GradientNorm:
    """The L2 norm of the gradients that an optimizer used, over all of its parameters.

    `norm` is of the step `step`. Steps count from 1. Steps that a gradient scaler skipped count, too. `p50` and
    `highest` are the median and the maximum of the newest `measured` norms. A message replaces the previous one of
    the same phase and model.
    """

    phase: str
    model: str
    step: int
    norm: float
    p50: float
    highest: float
    measured: int
    # When the norm was measured: "before" or "after" the program clips the gradients; "": no clipping was seen.
    clipping: str = ""
    is_shard: bool = False  # whether this process has only shards of some gradients

    def __post_init__(self) -> None:
        if not 1 <= self.measured <= MAX_TIMED_STEPS or not self.measured <= self.step < MAX_QUANTITY:
            raise ValueError(f"{self.phase!r}: {self.measured} norms of {self.step} steps")
        if not 0 <= min(self.norm, self.p50) <= max(self.norm, self.p50) <= self.highest < math.inf:
            raise ValueError(f"{self.phase!r}: norms {self.norm}, {self.p50} and {self.highest}")


@dataclass(frozen=True, slots=True)
class GradientFault:
    """The first step in which a gradient was NaN or Inf, and the first parameter with such a gradient.

    The order of parameters is the order of the backward pass, which begins with the last layers.

    - In `step`, `faulty` of `parameters` gradients were not finite.
    - In `finite_step`, all gradients were finite (0: never seen).
    - In `last_step`, some gradients were not finite.
    - `checked_step` is the newest step that was checked.

    Steps are counted as in `GradientNorm`.
    """

    phase: str
    model: str
    parameter: str
    kind: str  # "NaN" or "Inf"
    step: int
    finite_step: int
    last_step: int
    checked_step: int
    faulty: int
    parameters: int

    def __post_init__(self) -> None:
        if not 0 <= self.finite_step < self.step <= self.last_step <= self.checked_step < MAX_QUANTITY:
            raise ValueError(
                f"{self.phase!r}: gradients finite in step {self.finite_step}, not in {self.step} to "
                f"{self.last_step}, checked in {self.checked_step}"
            )
        if not 1 <= self.faulty <= self.parameters < MAX_QUANTITY:
            raise ValueError(f"{self.phase!r}: {self.faulty} of {self.parameters} gradients are not finite")


@dataclass(frozen=True, slots=True)
class LossScale:
    """The loss scale: a gradient scaler multiplies the loss by this factor.

    If gradients overflow, the scaler skips the step and lowers the scale. The scale fell in `falls` of the `updates`
    updates. The first updates of a scaler are left out, because it is then still looking for its scale.

    The newest `latest` updates begin with a fall of the scale. During these updates, it fell `latest_falls` times and
    grew `latest_rises` times. `before` is the scale before them.

    A message replaces the previous one of the same phase and model.
    """

    phase: str
    model: str
    scale: float
    updates: int
    falls: int
    before: float
    latest: int
    latest_falls: int
    latest_rises: int

    def __post_init__(self) -> None:
        if not 0 <= self.latest <= MAX_TIMED_STEPS or not self.latest_falls + self.latest_rises <= self.latest:
            raise ValueError(
                f"{self.phase!r}: the scale fell {self.latest_falls} times and grew {self.latest_rises} times in "
                f"{self.latest} updates"
            )
        if min(self.scale, self.before, self.latest_falls, self.latest_rises) < 0:
            raise ValueError(f"{self.phase!r}: a scale of {self.scale}, {self.before} before")
        if not max(self.latest, self.falls) <= self.updates < MAX_QUANTITY or not self.latest_falls <= self.falls:
            raise ValueError(f"{self.phase!r}: the scale fell {self.falls} times in {self.updates} updates")


GradientMessage = GradientNorm | GradientFault | LossScale
