"""A baseline: the times of each phase, brick and layer of a process over one period, with the conditions during this
period.

All figures are derived from records.
"""

# The times of bricks are exclusive. They are in µs per token, or in µs per step if the number of tokens is not known.
# Only recorded steps count.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cbtop.comparison.items import Brick, Place, PlaceTimes
from cbtop.comparison.noise import Figure


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The program, machine and settings of a process during a measurement. If a field was not reported, it is None or
    empty.
    """

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
    """The work of a brick per token (or step), and its point on the roofline. The work is computed from the shapes of
    the brick's tensors.
    """

    flops: float
    intensity: float  # FLOP per byte
    gflops: float  # rate of work in GFLOP/s, as the roofline shows it


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The times of the steps, bricks and layers of one phase."""

    unit: str  # "token" or "step": the times of bricks and layers are in µs per this unit
    step_us: Figure  # time of a step; steps without recorded bricks also count
    tokens_per_sec: Figure | None  # tokens of this phase per second of wall-clock time
    # the times of each brick over all layers, of each brick in a single layer, and of each whole layer
    places: Mapping[Place, PlaceTimes]
    work: Mapping[Brick, BrickWork] = field(default_factory=dict)  # the work of each brick that declares its work

    @property
    def bricks(self) -> dict[Brick, Figure]:
        """The time of each brick over all layers and outside of layers.

        The time between bricks counts as a brick of its own.
        """
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
    """The steps of one phase. The times are None unless at least MIN_BLOCKS blocks of steps were recorded."""

    phase: str
    steps: int
    share: float  # number of steps of this phase, divided by the number of steps of all phases
    tokens: float | None  # mean number of tokens per step of this phase
    sequences: float | None  # mean number of sequences per step of this phase
    cached: float | None  # mean number of positions of a sequence that were cached before the step
    blocks: int  # number of blocks of steps that contain recorded steps
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
    lost_percent: float  # percentage of the records in this period that were lost

    @property
    def covers_s(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    def of(self, phase: str | None) -> PhaseFigures | None:
        """Return the figures of one phase, or None if the phase has not run."""
        return next((found for found in self.phases if found.phase == phase), None)
