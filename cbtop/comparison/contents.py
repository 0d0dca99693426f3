"""The contents of a run's steps: layers, bricks, kernels and operations, and how often a step runs each.

A number is a range (fewest, most) over the steps of a phase. It is exact if both are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from cbtop.protocol.attributes import NO_KERNEL, KernelAttributes

MIN_STEPS = 3  # At least this many steps of a phase must be recorded for exact numbers.
Range = tuple[int, int]  # (fewest, most)
# (layer, brick, label of the brick); "" is outside of layers, outside of bricks, or without a label
Place = tuple[str, str, str]
OUTSIDE: Place = ("", "", "")
BESIDE = " › "  # separator in texts that name a place, such as `Layer 3 › DownProjection`


class PieceKind(StrEnum):
    """The kind of a piece of a step, such as a brick or a kernel."""

    LAYER = "layer"
    BRICK = "brick"
    KERNEL = "kernel"
    OPERATION = "operation"  # an operation of torch that ran on a processor
    TRANSFER = "transfer"


class Total(StrEnum):
    """What is counted over a whole step, such as kernel launches."""

    BRICKS = "bricks"
    LAUNCHES = "launches"
    ALLOCATIONS = "allocations"
    H2D = "transfers.h2d"
    D2H = "transfers.d2h"
    D2D = "transfers.d2d"


TRANSFERS = (Total.H2D, Total.D2H, Total.D2D)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a step: one layer, brick, kernel or operation.

    `name` is "" if the piece is the layer or brick itself. The `dtype` of a brick is what it multiplies. The `dtype`
    of an operation is the type of its result. "" means unknown.
    """

    kind: PieceKind
    layer: str = ""  # layer around the piece, or ""
    brick: str = ""  # brick around the piece, or ""
    label: str = ""  # tells apart bricks with the same name in a layer
    name: str = ""
    dtype: str = ""
    kernel: KernelAttributes = NO_KERNEL

    @property
    def place(self) -> Place:
        return self.layer, self.brick, self.label


@dataclass(frozen=True, slots=True)
class PhaseContents:
    """The contents of one phase's steps, with warm-up steps but without the first step.

    `steps` counts the recorded steps, with the first. A total that is missing in `totals` is unknown. `plain` counts
    steps with unknown contents, which sampling timed only as a whole.
    """

    phase: str
    steps: int
    pieces: Mapping[Piece, Range]
    totals: Mapping[Total, Range]
    plain: int = 0

    def has(self, kind: PieceKind) -> bool:
        """Whether pieces of this kind were recorded."""
        return any(piece.kind is kind for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Break:
    """Graph breaks of torch.compile with the same reason at one place, such as `Layer 3 › Activation` ("": outside of
    layers).
    """

    place: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """Counts of Dynamo (the tracer of torch.compile) in a watched process."""

    compilations: int
    recompilations: int
    breaks: tuple[Break, ...]

    @property
    def graph_breaks(self) -> int:
        return sum(one.count for one in self.breaks)


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of all phases of a run, and its conditions. `compiled` is None if unknown."""

    phases: tuple[PhaseContents, ...] = ()
    compiled: Compiled | None = None
    conditions: Mapping[str, str] = field(default_factory=dict)

    def of(self, phase: str) -> PhaseContents | None:
        """Return the contents of one phase, or None if it was not recorded."""
        return next((one for one in self.phases if one.phase == phase), None)


def contents_together(runs: Sequence[Contents], *, needs_all: bool = False) -> Contents:
    """Return the contents of several runs as one. Numbers that differ become ranges.

    A run with too few steps of a phase is left out for this phase if other runs have enough. With `needs_all`, no run
    is left out. Instead, a phase is left out if one run lacks it. A condition becomes unknown if it differs between
    runs, and a total if one run does not know it.
    """
    first = runs[0]
    if len(runs) == 1:
        return first
    names = dict.fromkeys(one.phase for run in runs for one in run.phases)
    phases = [[found for run in runs if (found := run.of(name))] for name in names]
    if needs_all:
        phases = [found for found in phases if len(found) == len(runs)]
    else:
        phases = [[one for one in found if one.steps >= MIN_STEPS] or found for found in phases]
    return Contents(
        tuple(_together(found) for found in phases),
        _compiled_together([run.compiled for run in runs]),
        {
            name: value
            for name, value in first.conditions.items()
            if all(run.conditions.get(name) == value for run in runs)
        },
    )


def _together(phases: Sequence[PhaseContents]) -> PhaseContents:
    pieces = dict.fromkeys(piece for one in phases for piece in one.pieces)
    known = [total for total in phases[0].totals if all(total in one.totals for one in phases)]
    return replace(
        phases[0],
        steps=min(one.steps for one in phases),
        plain=max(one.plain for one in phases),
        pieces={piece: _range([one.pieces.get(piece, (0, 0)) for one in phases]) for piece in pieces},
        totals={total: _range([one.totals[total] for one in phases]) for total in known},
    )


def _compiled_together(runs: Sequence[Compiled | None]) -> Compiled | None:
    """Return the graph breaks of the run with the most of them. Each other total is the maximum over all runs."""
    known = [run for run in runs if run is not None]
    if len(known) < len(runs):
        return None
    most = max(known, key=lambda run: run.graph_breaks)
    return replace(
        most,
        compilations=max(run.compilations for run in known),
        recompilations=max(run.recompilations for run in known),
    )


def _range(ranges: Sequence[Range]) -> Range:
    return min(fewest for fewest, _ in ranges), max(most for _, most in ranges)
