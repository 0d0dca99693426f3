"""Make the contents of a run from its records and its process's announcements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cbtop.client.source_record import SourceRecord
from cbtop.comparison.contents import (
    BESIDE,
    OUTSIDE,
    Break,
    Compiled,
    Contents,
    PhaseContents,
    Piece,
    PieceKind,
    Range,
    Total,
)
from cbtop.comparison.step_counts import PlaceNames
from cbtop.protocol.kernel_messages import KernelBurst
from cbtop.protocol.messages import Node
from cbtop.protocol.structure_messages import StepOperations
from cbtop.protocol.vocabulary import NodeKind


def contents_of(record: SourceRecord, phases: Sequence[PhaseContents]) -> Contents:
    """Return the contents of a run's steps. `phases` has the phases that were counted from records."""
    return _Made(record).contents(phases)


class _Made:
    def __init__(self, record: SourceRecord) -> None:
        self._record = record
        self._names = PlaceNames(record.nodes)

    def contents(self, phases: Sequence[PhaseContents]) -> Contents:
        found = [self._with_announced(phase) for phase in phases]
        return Contents(tuple(found), self._compiled(), dict(self._record.contents.conditions))

    def _with_announced(self, phase: PhaseContents) -> PhaseContents:
        announced = self._record.contents
        pieces, totals = dict(phase.pieces), dict(phase.totals)
        for operations in announced.operations.values():
            if _phase_of(operations.phase, operations.model) == phase.phase:
                pieces |= self._operations(operations)
        for allocated in announced.allocations.values():
            if _phase_of(allocated.phase, allocated.model) == phase.phase:
                totals[Total.ALLOCATIONS] = allocated.fewest, allocated.most
        burst = self._record.burst
        if burst is not None and Total.LAUNCHES not in totals:
            kernels = self._kernels(burst, phase.phase)
            pieces |= kernels
            if kernels and not (burst.unplaced or burst.lost or burst.left_out):
                totals[Total.LAUNCHES] = (
                    sum(one for one, _ in kernels.values()),
                    sum(one for _, one in kernels.values()),
                )
        return replace(phase, pieces=pieces, totals=totals)

    def _node(self, number: int) -> Node | None:
        nodes = self._record.nodes
        return nodes[number] if 1 <= number <= len(nodes) else None

    def _operations(self, announced: StepOperations) -> dict[Piece, Range]:
        found: dict[Piece, Range] = {}
        for one in announced.operations:
            place = self._names.piece_of(one.node).place if self._node(one.node) else OUTSIDE
            piece = Piece(PieceKind.OPERATION, *place, one.name, one.dtype)
            fewest, most = found.get(piece, (0, 0))
            found[piece] = fewest + one.fewest, most + one.most
        return found

    def _kernels(self, burst: KernelBurst, phase: str) -> dict[Piece, Range]:
        found: dict[Piece, Range] = {}
        for one in burst.kernels:
            node = self._node(one.node)
            if node is None or node.kind is not NodeKind.KERNEL or self._names.phase_of(one.node) != phase:
                continue
            piece = self._names.piece_of(one.node)
            fewest, most = found.get(piece, (0, 0))
            # Older processes report only the sum over all steps, so divide it by their number.
            if one.fewest is None or one.most is None:
                least, rest = divmod(one.launches, one.steps)
                found[piece] = fewest + least, most + least + bool(rest)
            else:
                found[piece] = fewest + one.fewest, most + one.most
        return found

    def _compiled(self) -> Compiled | None:
        compiled = self._record.contents.compiled
        if compiled is None:
            return None
        breaks = tuple(Break(self._place(one.node), one.reason, one.count) for one in compiled.breaks)
        return Compiled(compiled.compilations, compiled.recompilations, breaks)

    def _place(self, number: int) -> str:
        """Return the place of a node, such as `Layer 3 › Activation act_fn`. Outside of bricks, the phase of its
        step.
        """
        if self._node(number) is None:
            return ""
        layer, brick, label = self._names.piece_of(number).place
        place = BESIDE.join(filter(None, (layer, f"{brick} {label}".strip())))
        return place or self._names.phase_of(number)


def _phase_of(phase: str, model: str) -> str:
    return f"{model} {phase}" if model else phase
