"""A baseline: the time of each phase, brick and layer of a process over one period, with its surroundings.

All figures are derived.
"""

# Times are exclusive and in µs per token, or per step if tokens are not known. They cover recorded steps only.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cbtop.comparison.items import Brick, Place, PlaceTimes
from cbtop.comparison.noise import Figure


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Program, machine and settings of a measurement. A field is None or empty if it was not reported."""

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
    devices: tuple[str, ...]  # names of the GPUs
    sample_every: int


@dataclass(frozen=True, slots=True)
class BrickWork:
    """The work of a brick per token (or step), derived from shapes, with its point on the roofline."""

    flops: float
    intensity: float  # FLOP per byte
    gflops: float  # the GFLOP/s that the roofline shows


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The times of a phase."""

    unit: str  # "token" or "step": the µs of bricks and layers are per this unit
    step_us: Figure  # time of a step, over all steps, even those without recorded bricks
    tokens_per_sec: Figure | None  # per second of wall-clock time
    places: Mapping[Place, PlaceTimes]  # bricks over all layers and outside, bricks in one layer, and whole layers
    work: Mapping[Brick, BrickWork] = field(default_factory=dict)  # only bricks that declare their work

    @property
    def bricks(self) -> dict[Brick, Figure]:
        """The time of each brick, over all layers and outside. The time between bricks counts as a brick, too."""
        return {brick: one.time for (brick, layer), one in self.places.items() if brick and layer is None}

    @property
    def cells(self) -> dict[tuple[Brick, str], Figure]:
        """The time of each brick in each layer."""
        return {(brick, layer): one.time for (brick, layer), one in self.places.items() if brick and layer}

    @property
    def layers(self) -> dict[str, Figure]:
        """The time of each whole layer."""
        return {layer: one.time for (brick, layer), one in self.places.items() if brick is None and layer}


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """The steps of one phase. Their times are known if they cover at least MIN_BLOCKS blocks."""

    phase: str
    steps: int
    share: float  # share of this phase in the steps of all phases
    tokens: float | None  # mean per step
    sequences: float | None  # mean per step
    cached: float | None  # mean positions in the cache of each sequence before a step
    blocks: int  # number of blocks with recorded steps
    times: PhaseTimes | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The figures of one process over some seconds."""

    key: str
    surroundings: Surroundings
    phases: tuple[PhaseFigures, ...]
    begin_ns: int  # on the monotonic clock of the process's host
    end_ns: int
    ended_s: float | None  # `end_ns` as Unix time on that host
    lost_percent: float  # share of the records in this period that were lost

    @property
    def covers_s(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    def of(self, phase: str | None) -> PhaseFigures | None:
        """Return the figures of one phase, or None if it has not run."""
        return next((found for found in self.phases if found.phase == phase), None)
