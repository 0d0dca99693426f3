"""A baseline: the time of each phase, brick and layer of a process over one period, with its surroundings.

Derived.
"""

# Times are exclusive, of the recorded steps, in µs per token; per step if tokens are not known.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cbtop.comparison.items import Brick, Place, PlaceTimes
from cbtop.comparison.noise import Figure


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Program, machine and settings of a measurement. None or empty if not reported."""

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
    devices: tuple[str, ...]  # GPUs
    sample_every: int


@dataclass(frozen=True, slots=True)
class BrickWork:
    """The work of a brick per token (or step), derived from shapes, and its point on the roofline."""

    flops: float
    intensity: float  # FLOP per byte
    gflops: float  # as the roofline shows it


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The times of a phase."""

    unit: str  # "token" or "step": the µs of bricks and layers are per this unit
    step_us: Figure  # of all steps, recorded inside or not
    tokens_per_sec: Figure | None  # over wall-clock time
    places: Mapping[Place, PlaceTimes]  # bricks over all layers and outside, bricks in one layer, and whole layers
    work: Mapping[Brick, BrickWork] = field(default_factory=dict)  # only bricks that declare it

    @property
    def bricks(self) -> dict[Brick, Figure]:
        """Each brick, over all layers and outside. The time between bricks counts as one of them."""
        return {brick: one.time for (brick, layer), one in self.places.items() if brick and layer is None}

    @property
    def cells(self) -> dict[tuple[Brick, str], Figure]:
        """Each brick in one layer."""
        return {(brick, layer): one.time for (brick, layer), one in self.places.items() if brick and layer}

    @property
    def layers(self) -> dict[str, Figure]:
        """Each whole layer."""
        return {layer: one.time for (brick, layer), one in self.places.items() if brick is None and layer}


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """The steps of one phase, with times if they cover at least MIN_BLOCKS blocks."""

    phase: str
    steps: int
    share: float  # of the steps of all phases
    tokens: float | None  # mean per step
    sequences: float | None  # mean per step
    cached: float | None  # mean positions in the cache of each sequence before a step
    blocks: int  # with recorded steps
    times: PhaseTimes | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The figures of one process over some seconds."""

    key: str
    surroundings: Surroundings
    phases: tuple[PhaseFigures, ...]
    begin_ns: int  # on the clock of its host
    end_ns: int
    ended_s: float | None  # `end_ns` as Unix time of its host
    lost_percent: float  # of the records seen in its window

    @property
    def covers_s(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    def of(self, phase: str | None) -> PhaseFigures | None:
        """Return the figures of one phase, or None if it has not run."""
        return next((found for found in self.phases if found.phase == phase), None)
