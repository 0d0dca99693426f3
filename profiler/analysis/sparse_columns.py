"""Columns of values that only few nodes have."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.analysis.histograms import Column
from cbtop.profiler.analysis.node_columns import EXTREMES, MOMENTS, SPARSE_COLUMNS

SPARSE_BYTES = 200  # approximate memory of a value: a dict entry, its key and its number


class SparseColumns:
    """The values of the columns in SPARSE_COLUMNS. Each column maps node ids to values."""

    def __init__(self) -> None:
        self._values: dict[str, dict[int, int]] = {name: {} for name in SPARSE_COLUMNS}

    def __getitem__(self, name: str) -> dict[int, int]:
        """Return one column, as a dict from node ids to values."""
        return self._values[name]

    def sum(self, name: str, nodes: Iterable[int]) -> int:
        """Return the sum of a column over `nodes`."""
        values = self._values[name]
        return sum(values.get(node, 0) for node in nodes) if values else 0

    def dense(self, name: str, size: int) -> Column:
        """Return a column as an array with one entry for each node id below `size`."""
        found = np.zeros(size, np.int64)
        for node, value in self._values[name].items():
            if node < size:
                found[node] = value
        return found

    def nodes(self) -> set[int]:
        """Return every node that has a value in any column."""
        return {node for values in self._values.values() for node in values}

    def values_of(self, nodes: Iterable[int]) -> tuple[Column, Column, NDArray[np.float64]]:
        """Return the values of `nodes` as columns: node, index into SPARSE_COLUMNS, value.

        Values are float64, because FLOP may exceed 64 bits. This rounds times above a hundred days to two
        nanoseconds.
        """
        wanted = set(nodes)
        found = [
            (node, at, value)
            for at, values in enumerate(self._values.values())
            for node, value in values.items()
            if node in wanted
        ]
        keys = np.array([key[:2] for key in found], np.int64).reshape(-1, 2)
        return keys[:, 0], keys[:, 1], np.array([float(value) for _, _, value in found], np.float64)

    def add(self, name: str, node: Column, value: Column) -> None:
        """Add `value` to the column `name` at `node`, entry by entry."""
        values = self._values[name]
        for one, number in zip(node.tolist(), value.tolist(), strict=True):
            values[one] = values.get(one, 0) + number

    def reach(self, name: str, node: int, value: int) -> None:
        """Lower the minimum, or raise the maximum, of `node` to `value`."""
        known = self._values[name].get(node, value)
        self._values[name][node] = min(known, value) if name.endswith("_least") else max(known, value)

    def add_all(self, other: SparseColumns, place: Column) -> None:
        """Add the values of `other`. Its node n has the id `place[n]` here.

        Points in time are left out, because the clocks of two processes differ.
        """
        for name, ours in self._values.items():
            theirs = [(node, value) for node, value in other[name].items() if node < len(place)]
            for node, value in theirs if name not in MOMENTS else ():
                here = int(place[node])
                if name in EXTREMES:
                    self.reach(name, here, value)
                else:
                    ours[here] = ours.get(here, 0) + value

    def count(self, increases: dict[tuple[int, int], int], times: int) -> None:
        """Add each of `increases` times `times`. The keys are (index into SPARSE_COLUMNS, node). Values of 0 are
        removed.
        """
        for (at, node), value in increases.items():
            values = self._values[SPARSE_COLUMNS[at]]
            values[node] = values.get(node, 0) + times * value
            if not values[node]:
                del values[node]

    def take_recent(self, whole: SparseColumns, counted: SparseColumns) -> None:
        """Copy the values of `counted`, which has some of the counts of `whole`. Points in time are copied from
        `whole`.
        """
        for name in SPARSE_COLUMNS:
            self._values[name] = dict((whole if name in MOMENTS else counted)[name])

    @property
    def size_bytes(self) -> int:
        """The approximate memory of all values, in bytes."""
        return SPARSE_BYTES * sum(map(len, self._values.values()))
