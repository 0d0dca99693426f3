"""The messages about the memory of training steps."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.protocol.attributes import MAX_QUANTITY
from cbtop.protocol.training_messages import MAX_STEP_PARTS, MAX_TIMED_STEPS

MAX_BRICK_MEMORIES = 512  # A process announces the bricks with most memory.


@dataclass(frozen=True, slots=True)
class PartMemory:
    """The peak memory of one part of a training step, as torch's allocator counts it on one GPU.

    `allocated_bytes` is in tensors. `reserved_bytes` is the memory that the allocator holds for tensors.
    """

    name: str
    allocated_bytes: int
    reserved_bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.allocated_bytes < MAX_QUANTITY or not 0 <= self.reserved_bytes < MAX_QUANTITY:
            raise ValueError(
                f"part {self.name!r} has {self.allocated_bytes} bytes allocated, {self.reserved_bytes} reserved"
            )


@dataclass(frozen=True, slots=True)
class BrickMemory:
    """The memory of one brick in a training step.

    - `output_bytes` has the tensors that its calls returned, from shapes and types (0: none, or not noted).
    - On a GPU, `allocated_bytes` and `reserved_bytes` are the peaks of the whole step while the brick ran.
      `kept_bytes` is what its calls allocated and did not free, or less than 0 if they freed more.
    """

    node: int
    output_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    kept_bytes: int = 0

    def __post_init__(self) -> None:
        sizes = self.output_bytes, self.allocated_bytes, self.reserved_bytes, abs(self.kept_bytes)
        if self.node < 1 or min(sizes) < 0 or max(sizes) >= MAX_QUANTITY:
            raise ValueError(f"memory of node {self.node} is out of range: {sizes}")


@dataclass(frozen=True, slots=True)
class BrickMemories:
    """The memory of the bricks in the newest recorded training step. The bricks with the most memory come first.

    A message replaces the previous one of the same phase and model. `is_measured` says whether torch's allocator has
    counted it, as on a GPU.
    """

    phase: str
    model: str
    bricks: tuple[BrickMemory, ...]
    is_measured: bool = False

    def __post_init__(self) -> None:
        if len(self.bricks) > MAX_BRICK_MEMORIES:
            raise ValueError(f"{self.phase!r}: {len(self.bricks)} bricks; expected up to {MAX_BRICK_MEMORIES}")


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """The memory of the newest `steps` recorded training steps.

    A message replaces the previous one of the same phase and model. Memory is read when calls begin and end, so the
    peaks are lower bounds. If `steps` is 0, nothing is known, and `why_unknown` has the reason.
    """

    phase: str
    model: str
    steps: int
    parts: tuple[PartMemory, ...] = ()
    node: int = 0  # the brick that allocated the most memory; 0: unknown
    unused_bytes: int = 0  # memory that was reserved but not allocated, when the most memory was allocated
    # The peak that torch itself counts since the process started, or since the program reset the peak.
    torch_peak_bytes: int = 0
    # The most bytes that the process can have reserved, including what it has reserved already; 0 if unknown.
    limit_bytes: int = 0
    retries: int = 0  # how often torch had no memory and emptied its cache, in the latest `counted_steps` steps
    counted_steps: int = 0
    why_unknown: str = ""
    # The peak of the step with the lowest peak. The highest peak is in `parts`. 0: unknown.
    lowest_allocated_bytes: int = 0
    lowest_reserved_bytes: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.steps <= MAX_TIMED_STEPS or bool(self.steps) != bool(self.parts):
            raise ValueError(f"{self.phase!r}: memory of {self.steps} steps in {len(self.parts)} parts")
        if len(self.parts) > MAX_STEP_PARTS or len({part.name for part in self.parts}) < len(self.parts):
            raise ValueError(f"{self.phase!r}: {len(self.parts)} parts; expected up to {MAX_STEP_PARTS}, named once")
        sizes = (
            self.unused_bytes,
            self.torch_peak_bytes,
            self.limit_bytes,
            self.retries,
            self.counted_steps,
            self.node,
            self.lowest_allocated_bytes,
            self.lowest_reserved_bytes,
        )
        if min(sizes) < 0 or max(sizes) >= MAX_QUANTITY:
            raise ValueError(f"{self.phase!r}: a quantity of memory is out of range: {sizes}")
