"""A baseline: the times of each phase, brick and layer of a process over a period, and the conditions in it. All
figures are derived from records.
"""

# Times of bricks are exclusive, in µs per token (if tokens are unknown: per step). Only recorded steps count.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cbtop.comparison.items import Brick, Place, PlaceTimes
from cbtop.comparison.noise import Figure


@dataclass(frozen=True, slots=True)
class Surroundings:
    """A process's program, machine and settings during a measurement. None or empty: not reported."""

    program: str
    pid: int
    rank: int | None
    model: str | None
    architecture: str | None
    quantization: str | None
    layers: int | None
    backend: str | None
    threads: int | None
    host: str
    devices: tuple[str, ...]  # names of the GPUs that the process uses
    sample_every: int


@dataclass(frozen=True, slots=True)
class BrickWork:
    """A brick's work per token (or step) and its point on the roofline, from the shapes of its tensors."""

    flops: float
    intensity: float  # FLOP per byte
    gflops: float  # GFLOP/s, as in the roofline


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The times of the steps, bricks and layers of one phase."""

    unit: str  # The times of a phase's steps, bricks and layers.
    step_us: Figure  # "token" or "step": the unit of times of bricks and layers (µs per unit)
    tokens_per_sec: Figure | None  # time of a step, also of steps without recorded bricks
    # the times of each brick over all layers, of each brick in a single layer, and of each whole layer
    places: Mapping[Place, PlaceTimes]
    work: Mapping[Brick, BrickWork] = field(default_factory=dict)  # the work of each brick that declares its work

    @property
    def bricks(self) -> dict[Brick, Figure]:
        """Each brick's time, in and outside of layers. The time between bricks is an entry, too."""
        return {brick: one.time for (brick, layer), one in self.places.items() if brick and layer is None}

    @property
    def cells(self) -> dict[tuple[Brick, str], Figure]:
        """The time of each brick in each single layer."""
        return {(brick, layer): one.time for (brick, layer), one in self.places.items() if brick and layer}

    @property
    def layers(self) -> dict[str, Figure]:
        """The time of each whole layer, by the name of the layer."""
        return {layer: one.time for (brick, layer), one in self.places.items() if brick is None and layer}


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """The steps of one phase. Times are None with fewer than MIN_BLOCKS recorded blocks."""

    phase: str
    steps: int
    share: float  # steps of this phase divided by all steps
    tokens: float | None  # mean tokens per step
    sequences: float | None  # mean sequences per step
    cached: float | None  # mean cached positions per sequence before a step
    blocks: int  # number of blocks with recorded steps
    times: PhaseTimes | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The figures of one process over some seconds, such as its recent window."""

    key: str
    surroundings: Surroundings
    phases: tuple[PhaseFigures, ...]
    begin_ns: int  # begin of the period on the monotonic clock of the process's host, in ns
    end_ns: int
    ended_s: float | None  # the time `end_ns` as Unix time, on the clock of the process's host
    lost_percent: float  # lost records in this period, in percent

    @property
    def covers_s(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    def of(self, phase: str | None) -> PhaseFigures | None:
        """Return the figures of one phase, or None if it has not run."""
        return next((found for found in self.phases if found.phase == phase), None)
