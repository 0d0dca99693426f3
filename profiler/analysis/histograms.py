"""Histograms of durations, one per node: the number of calls in each bucket.

Buckets are log-linear (the layout of HdrHistogram, with 64 buckets per octave). Below 64 ns they are exact. Above, a
bucket is at most 1/64 of its value wide, so its midpoint is within 0.8 % of any duration in it. The counts cover the
source's whole life. Histograms of several nodes can be added, which gives the percentiles of all their calls.

The calls of a node fall into few octaves. Only octaves with counts take memory: one page each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]

SUB_BUCKET_BITS = 6
SUB_BUCKETS = 1 << SUB_BUCKET_BITS
MAX_DURATION_NS = (1 << 62) - 1  # durations above this are not counted
OCTAVES = 62 - SUB_BUCKET_BITS + 1
BUCKETS = OCTAVES * SUB_BUCKETS
# A page has the counts of one octave. It takes 128 bytes, or 256 or 512 for large counts. So all pages together take
# at most 64 MiB, even for a hostile source. 8,192 nodes with 16 octaves each fit.
MAX_PAGES = 1 << 17
MAX_CELLS = 1 << 20  # maximum number of cells in one message
_MIN_ROOM = 64  # minimum number of rows (nodes or pages) to allocate
_WIDER: dict[np.dtype[Any], type] = {np.dtype(np.uint16): np.uint32, np.dtype(np.uint32): np.int64}


def bucket_of(duration_ns: Column) -> Column:
    """Return the bucket of each duration, which is in ns and not negative."""
    value = np.clip(duration_ns, 0, MAX_DURATION_NS)
    octave = np.maximum(np.frexp(value.astype(np.float64))[1].astype(np.int64) - 1 - SUB_BUCKET_BITS, 0)
    found: Column = octave * SUB_BUCKETS + (value >> octave)
    return found


def bucket_middle_ns(bucket: Column) -> NDArray[np.float64]:
    """Return the middle of each bucket, in ns."""
    found: NDArray[np.float64] = _MIDDLES_NS[bucket]
    return found


def bucket_begin_ns(bucket: Column) -> Column:
    """Return the shortest duration that falls into each bucket, in ns."""
    octave = np.maximum(bucket // SUB_BUCKETS - 1, 0)
    found: Column = (bucket - octave * SUB_BUCKETS) << octave
    return found


def _middles_ns() -> NDArray[np.float64]:
    bucket = np.arange(BUCKETS)
    octave = np.maximum(bucket // SUB_BUCKETS - 1, 0)
    found: NDArray[np.float64] = bucket_begin_ns(bucket) + ((1 << octave) - 1) / 2
    return found


_MIDDLES_NS = _middles_ns()


def distinct(values: Column) -> Column:
    """Return the distinct `values` (>= 0), ascending. NumPy's `unique` takes ten times as long, because it hashes."""
    ordered = np.sort(values)
    is_first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    found: Column = ordered[is_first]
    return found


class Histograms:
    """Counts by cell, which is node * BUCKETS + bucket. Cells beyond MAX_PAGES are not counted.

    All counts take two bytes each, or four or eight once a count is too large. A full table grows by a quarter,
    because doubling would waste memory.
    """

    def __init__(self) -> None:
        # Node and octave -> number of the page; 0 without counts.
        self._pages = np.zeros((1, OCTAVES), np.int32)
        # Page 0 is all zeros. It is the page of octaves without counts.
        self._counts: NDArray[Any] = np.zeros((1, SUB_BUCKETS), np.uint16)
        self._used = 1

    @property
    def size_bytes(self) -> int:
        return self._pages.nbytes + self._counts.nbytes

    def counts(self, cell: Column) -> Column:
        """Return the count of each cell."""
        page = self._page_of(cell)
        found: Column = self._counts[page, cell % SUB_BUCKETS].astype(np.int64)
        return found

    def add(self, cell: Column, count: Column) -> None:
        """Add `count` to the histogram cells `cell`, entry by entry. No cell may occur twice."""
        page = self._make_pages(cell)
        room = page > 0
        if not room.all():
            page, cell, count = page[room], cell[room], count[room]
        at = page.astype(np.int64) * SUB_BUCKETS + cell % SUB_BUCKETS
        self._put(at, self._counts.ravel()[at] + count)

    def set(self, cell: Column, count: Column) -> Column:
        """Set the counts of these cells to `count` (>= 0), and return their increases. No cell may occur twice.

        The increase of a cell without room is its whole count.
        """
        page = self._make_pages(cell)
        at = page.astype(np.int64) * SUB_BUCKETS + cell % SUB_BUCKETS
        # A cell without a page reads 0, from page 0.
        more: Column = count - self._counts.ravel()[at]
        if not page.all():
            at, count = at[page > 0], count[page > 0]
        self._put(at, count)
        return more

    def _put(self, at: Column, count: Column) -> None:
        while int(count.max(initial=0)) > np.iinfo(self._counts.dtype).max:
            self._counts = self._counts.astype(_WIDER[self._counts.dtype])
        self._counts.ravel()[at] = count

    def cells(self) -> Column:
        """Return every cell with a count, ascending."""
        slot = np.flatnonzero(self._pages)
        owner, inside, _ = self._cells_in(self._pages.ravel()[slot])
        return slot[owner] * SUB_BUCKETS + inside

    def cells_of(self, nodes: Column) -> tuple[Column, Column, Column]:
        """Return the cells of `nodes` with a count, as columns: index in `nodes`, bucket, count. They are ordered by
        index, then by bucket.
        """
        known = np.flatnonzero(nodes < len(self._pages))
        pages = self._pages[nodes[known]]
        place, octave = (pages != 0).nonzero()  # NumPy's `nonzero` is three times as fast for booleans
        owner, inside, count = self._cells_in(pages[place, octave])
        return known[place][owner], (octave * SUB_BUCKETS)[owner] + inside, count

    def sum(self, nodes: Iterable[int]) -> Column:
        """Return the sum of the histograms of `nodes`, by bucket."""
        _, bucket, count = self.cells_of(np.fromiter(nodes, np.int64))
        summed = np.zeros(BUCKETS, np.int64)
        np.add.at(summed, bucket, count)
        return summed

    def _cells_in(self, page: NDArray[np.int32]) -> tuple[Column, Column, Column]:
        """Return the cells with a count in the pages `page`, as columns: index in `page`, bucket in the octave,
        count.
        """
        counts = self._counts[page].ravel()
        at = (counts != 0).nonzero()[0]
        return at >> SUB_BUCKET_BITS, at & (SUB_BUCKETS - 1), counts[at].astype(np.int64)

    def _page_of(self, cell: Column) -> NDArray[np.int32]:
        slot = cell // SUB_BUCKETS
        page: NDArray[np.int32] = self._pages.ravel().take(slot, mode="clip")
        page[slot >= self._pages.size] = 0
        return page

    def _make_pages(self, cell: Column) -> NDArray[np.int32]:
        """Return the page of each cell. Missing pages are made. 0 if there is not enough room."""
        page = self._page_of(cell)
        if page.all():
            return page
        slot = distinct(cell[page == 0] // SUB_BUCKETS)[: MAX_PAGES - self._used]
        if not len(slot):
            return page
        nodes = int(slot[-1]) // OCTAVES + 1
        if nodes > len(self._pages):
            self._pages = _grown(self._pages, nodes)
        used, self._used = self._used, self._used + len(slot)
        if self._used > len(self._counts):
            self._counts = _grown(self._counts, self._used)
        self._pages.ravel()[slot] = np.arange(used, self._used)
        return self._page_of(cell)


def _grown(table: NDArray[Any], rows: int) -> NDArray[Any]:
    """Return a copy of `table` with room for `rows` rows, and at least a quarter more than before."""
    grown = np.zeros((max(rows, len(table) + len(table) // 4, _MIN_ROOM), table.shape[1]), table.dtype)
    grown[: len(table)] = table
    return grown
