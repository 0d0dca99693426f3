"""What was counted between two points in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.analysis.histograms import Column
from cbtop.profiler.analysis.node_columns import SUMS
from cbtop.profiler.analysis.sparse_columns import SPARSE_BYTES

NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Growth:
    """What was counted between two points in time: sums by node, calls by histogram cell, and columns that few nodes
    have.
    """

    node: NDArray[np.int32]  # ids of the nodes with counts, each once
    sums: NDArray[np.int64]  # shape (SUMS, nodes)
    cell: NDArray[np.int32]  # histogram cells with counts (see `Histograms`), each once
    count: NDArray[np.uint32] | Column
    # The increase of columns that few nodes have, by (index into SPARSE_COLUMNS, node). Times, minima and maxima are
    # missing, because they cannot be added.
    rare: dict[tuple[int, int], int]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted between the two points in time."""
        return not (len(self.node) or len(self.cell) or self.rare)

    @property
    def size_bytes(self) -> int:
        arrays = self.node.nbytes + self.sums.nbytes + self.cell.nbytes + self.count.nbytes
        return arrays + SPARSE_BYTES * len(self.rare)

    def column(self, name: str) -> Column:
        """Return the row `name` of `sums`, with one entry for each id in `node`."""
        found: Column = self.sums[SUMS.index(name)]
        return found

    @classmethod
    def made(
        cls, node: Column, sums: Column, cell: Column, count: Column, rare: dict[tuple[int, int], int]
    ) -> Growth:
        """Make a Growth in the smallest data types that hold the counts, without zeros. `sums` has one row for each
        name in SUMS.
        """
        grew = (sums > 0).any(axis=0)
        counted = count > 0
        count = count[counted]
        return cls(
            node[grew].astype(np.int32),
            sums[:, grew],
            cell[counted].astype(np.int32),
            _narrow(count),
            {key: value for key, value in rare.items() if value > 0},
        )

    @classmethod
    def of(cls, parts: Sequence[Growth]) -> Growth:
        """Return the sum of all `parts`."""
        node, add_up = _each_once([part.node for part in parts])
        sums = add_up([np.zeros((len(SUMS), 0), np.int64), *(part.sums for part in parts)])
        cell, add_up = _each_once([part.cell for part in parts])
        count = add_up([NONE, *(part.count for part in parts)])
        rare: Counter[tuple[int, int]] = Counter()
        for part in parts:
            rare.update(part.rare)
        return cls(node.astype(np.int32), sums, cell.astype(np.int32), _narrow(count), dict(rare))


def _each_once(parts: Sequence[NDArray[Any]]) -> tuple[Column, Callable[[Sequence[NDArray[Any]]], Column]]:
    """Return the distinct values, ascending, and a function. The function takes an amount for each value, and adds up
    the amounts of equal values.
    """
    values = np.concatenate([NONE, *parts])
    # The parts are sorted already, so a stable sort merges them.
    order = np.argsort(values, kind="stable")
    values = values[order]
    begins = np.flatnonzero(np.diff(values, prepend=-1))

    def add_up(amounts: Sequence[NDArray[Any]]) -> Column:
        found: Column = np.add.reduceat(np.concatenate(amounts, axis=-1)[..., order], begins, axis=-1)
        return found

    return values[begins], add_up


def _narrow(count: Column) -> NDArray[np.uint32] | Column:
    return count.astype(np.uint32) if int(count.max(initial=0)) >> 32 == 0 else count
