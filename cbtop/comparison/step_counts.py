"""Count what each recorded step contains, from its records.

Rules
- Warm-up steps count for the phase after the warm-up, because a step has the same contents from its second run on.
- The first recorded step of a phase is left out, because it compiles, tunes and fills caches. So are failed steps.
- A layer or brick has the same name in every run, however it was timed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.comparison.contents import BESIDE, TRANSFERS, PhaseContents, Piece, PieceKind, Range, Total
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.histograms import Column
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_CANCELLED, FLAG_FAILED, FLAG_LOOSE, FLAG_PLAIN
from cbtop.protocol.ring_reader import Batch
from cbtop.protocol.vocabulary import LAUNCH_BOUND, WARM_UP, NodeKind, TransferDirection

_TRANSFERS = {
    TransferDirection.H2D: Total.H2D,
    TransferDirection.D2H: Total.D2H,
    TransferDirection.D2D: Total.D2D,
}


class PlaceNames:
    """The phase and the place (layer, brick, label) of each of a process's nodes."""

    def __init__(self, table: NodeTable) -> None:
        self._table = table
        self._pieces: dict[int, Piece] = {}

    def phase_of(self, node: int) -> str:
        """Return the phase of `node`, without a warm-up suffix. "" outside of phases."""
        step = int(self._table.step_of[node])
        if step < 1:
            return ""
        found = self._table[step]
        return display_name(replace(found, name=found.name.removesuffix(WARM_UP)))

    def piece_of(self, node: int) -> Piece:
        """Return the piece of a step (such as a kernel) that a node belongs to. For a Python function, the piece
        around it.
        """
        found = self._pieces.get(node)
        if found is None:
            found = self._pieces[node] = self._made(self._table[node])
        return found

    def _made(self, node: Node) -> Piece:
        around = self.piece_of(node.parent) if node.parent else Piece(PieceKind.BRICK)
        if node.parent is None and node.kind is NodeKind.STEP:
            return around
        if node.kind is NodeKind.KERNEL:
            return Piece(PieceKind.KERNEL, *around.place, node.name, kernel=node.kernel)
        if node.kind is NodeKind.TRANSFER:
            return Piece(PieceKind.TRANSFER, *around.place, node.name)
        if node.kind is NodeKind.LAYER:
            return Piece(PieceKind.LAYER, _inside(around.layer, display_name(node)), around.brick, around.label)
        brick = _inside(f"{around.brick} {around.label}".strip(), node.name.removesuffix(f", {LAUNCH_BOUND}"))
        return Piece(PieceKind.BRICK, around.layer, brick, node.label, dtype=node.work.dtype)


def _inside(around: str, name: str) -> str:
    return BESIDE.join(filter(None, (around, name)))


@dataclass(slots=True)
class _Phase:
    """The counts of a phase's recorded steps. Arrays have an entry for each column of `StepCounts` (a piece or a
    total).
    """

    steps: int = 0
    plain: int = 0  # number of steps with unknown contents, which were timed only as a whole
    fewest: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    most: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


class StepCounts:
    """Counts the contents of the recorded steps of a process, by phase."""

    def __init__(self, table: NodeTable) -> None:
        self._table = table
        self._phases: dict[str, _Phase] = {}
        # (phase, piece or total) -> column in the arrays of counts
        self._columns: dict[tuple[str, Piece | Total], int] = {}
        self._seen: set[int] = set()  # columns with a count in any step
        # node -> column of its own counts, and column of the total that they belong to
        self._of_node: list[tuple[int, int]] = [(-1, -1)]

    def take(self, batch: Batch, ends: Column, owner: Column) -> None:
        """Count the steps that end with the records at the indices `ends`.

        `owner` has for each record the index in `ends` of its step.
        """
        self._know_nodes()
        names = PlaceNames(self._table)
        skipped = (batch.flags[ends] & FLAG_FAILED) != 0
        for step in batch.node[ends[batch.are(FLAG_PLAIN)[ends] & ~skipped]].tolist():
            self._phases.setdefault(names.phase_of(step), _Phase()).plain += 1
        for flag in (FLAG_PLAIN, FLAG_CANCELLED):
            skipped |= batch.are(flag)[ends]
        inside = ~batch.are(FLAG_AMOUNTS) & ~batch.are(FLAG_LOOSE)
        inside[ends] = False
        records = np.flatnonzero(inside)
        records = records[np.argsort(owner[records], kind="stable")]
        bounds = np.searchsorted(owner[records], np.arange(len(ends) + 1)).tolist()
        columns = np.array(self._of_node, np.int64)
        for at in np.flatnonzero(~skipped).tolist():
            step = int(batch.node[ends[at]])
            nodes = batch.node[records[bounds[at] : bounds[at + 1]]]
            counted = columns[nodes].reshape(-1)
            self._add(names.phase_of(step), np.bincount(counted[counted >= 0], minlength=len(self._columns)))

    def phases(self) -> list[PhaseContents]:
        """Return the contents of phases with recorded steps, by their first steps."""
        return [self._contents(name, phase) for name, phase in self._phases.items() if phase.steps]

    def _reported(self) -> list[Total]:
        """Return the totals that this process reports. If it reports one kind of copy, it reports all."""
        seen = {what for (_, what), column in self._columns.items() if column in self._seen}
        return [
            Total.BRICKS,
            *(total for total in Total if total in seen or (total in TRANSFERS and seen & {*TRANSFERS})),
        ]

    def _know_nodes(self) -> None:
        """Add a column to the counts for each node that was added to the table."""
        names = PlaceNames(self._table)
        for node in self._table.nodes[len(self._of_node) - 1 :]:
            phase, total = names.phase_of(node.id), self._total_of(node)
            known = (names.piece_of(node.id), total) if phase else (None, None)
            first, second = (
                -1 if one is None else self._columns.setdefault((phase, one), len(self._columns)) for one in known
            )
            self._of_node.append((first, second))

    @staticmethod
    def _total_of(node: Node) -> Total | None:
        if node.kind is NodeKind.BRICK:
            return Total.BRICKS
        if node.kind is NodeKind.KERNEL:
            return Total.LAUNCHES
        if node.transfer is not None:
            return _TRANSFERS.get(node.transfer.direction)
        return None

    def _add(self, name: str, counts: NDArray[Any]) -> None:
        phase = self._phases.setdefault(name, _Phase())
        phase.steps += 1
        self._seen.update(np.flatnonzero(counts).tolist())
        # The first step is special, so the second one replaces its counts.
        if phase.steps == 2 or not len(phase.most):
            phase.fewest, phase.most = counts, counts
            return
        # columns for nodes that were announced since the last step
        missing = len(counts) - len(phase.most)
        phase.fewest = np.minimum(np.pad(phase.fewest, (0, missing)), counts)
        phase.most = np.maximum(np.pad(phase.most, (0, missing)), counts)

    def _contents(self, name: str, phase: _Phase) -> PhaseContents:
        pieces: dict[Piece, Range] = {}
        totals: dict[Total, Range] = dict.fromkeys(self._reported(), (0, 0))
        for (of, what), column in self._columns.items():
            if of != name or column >= len(phase.most) or not phase.most[column]:
                continue
            found = int(phase.fewest[column]), int(phase.most[column])
            if isinstance(what, Total):
                totals[what] = found
            else:
                pieces[what] = found
        return PhaseContents(name, phase.steps, pieces, totals, phase.plain)
