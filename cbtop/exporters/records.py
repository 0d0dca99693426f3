"""The records of one process, walked by their end or by their start with a bounded number of them in memory."""

# Rules
# - Records are read anew at every walk, chunk by chunk, and a chunk batch by batch: nothing keeps them.
# - They are kept by their end. A walk by their start takes the first MAX_SORTED / 2 that are left, again and again,
#   and passes over the chunks where all start later: records that lie as they were recorded are read twice, and
#   those that overlap without end cost time instead of memory.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cbtop.protocol.ring import FLAG_FAILED, FLAG_LOOSE, FLAG_PLAIN, FLAG_UNCOUNTED, Batch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]  # one column a record: start, ~end, node and number, by which they are sorted; the rest

LISTED_RECORDS = 4_096  # that are objects at a time
MAX_SORTED = 1 << 18  # 48 bytes each, and as much again twice while they are sorted
_KEYS = 4

Chunk = Callable[[], Iterable[Batch]]


class TimedRecord(NamedTuple):
    """One run of a node, on the monotonic clock. Which thread ran it is not recorded."""

    node: int
    start_ns: int
    end_ns: int
    elements: int | None  # None where the caller gave no count
    failed: bool
    plain: bool = False  # a step that was timed as a whole: what lay in it was not recorded


class _Span(NamedTuple):
    """A chunk, the number of its first record, and when its records start."""

    read: Chunk
    number: int
    first_ns: int
    last_ns: int


class Records:
    """The records that `chunks` give when they are called, in the order they ended. Each is called at every walk."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self.read = 0  # with those that are no calls: amounts of work, and cancelled steps
        self._count = 0
        self._spans: list[_Span] = []
        for read in chunks:
            number = self._count
            starts_ns: list[int] = []
            for read_batch in read():
                self.read += len(read_batch.node)
                batch = read_batch.calls()
                self._count += len(batch.node)
                if len(batch.node):
                    starts_ns += int(batch.start_ns.min()), int(batch.start_ns.max())
                    starts_ns = [min(starts_ns), max(starts_ns)]
            if starts_ns:
                self._spans.append(_Span(read, number, *starts_ns))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[TimedRecord]:
        for span in self._spans:
            for read_batch in span.read():
                batch = read_batch.calls()
                yield from _listed(batch.node, batch.start_ns, batch.end_ns, batch.elements, batch.flags)

    @property
    def begin_ns(self) -> int:
        """When the first of them starts; 0 when there is none."""
        return min((span.first_ns for span in self._spans), default=0)

    def by_start(self) -> Iterator[TimedRecord]:
        """By their start, what contains before what it contains.

        A parent has a smaller id than what is inside it: it comes first where both have the same times.
        """
        left = sorted(self._spans, key=lambda span: span.first_ns)
        rows, is_all = _first(left, None)
        while rows.shape[1]:
            start_ns, end_ns, node, _, elements, flags = rows
            yield from _listed(node, start_ns, ~end_ns, elements, flags)
            if is_all:
                return
            left = [span for span in left if span.last_ns >= rows[0, -1]]
            rows, is_all = _first(left, rows[:_KEYS, -1])


def _first(spans: Sequence[_Span], after: Rows | None) -> tuple[Rows, bool]:
    """The first records in `spans` that come after the key `after`, sorted; and whether that is all of them."""
    import numpy as np  # a command line that exports nothing should not pay for it

    held = np.zeros((_KEYS + 2, 0), np.int64)
    waiting: list[Rows] = []
    count = 0
    until_ns: int | None = None  # nothing is wanted that starts later
    for span in spans:
        if until_ns is not None and span.first_ns > until_ns:
            break
        number = span.number
        for read_batch in span.read():
            batch = read_batch.calls()
            numbers = np.arange(number, number + len(batch.node))
            number += len(batch.node)
            rows = np.stack((batch.start_ns, ~batch.end_ns, batch.node, numbers, batch.elements, batch.flags))
            if after is not None:
                rows = rows[:, _is_after(rows, after)]
            if until_ns is not None:
                rows = rows[:, rows[0] <= until_ns]
            waiting.append(rows)
            count += rows.shape[1]
            if count > MAX_SORTED:
                held = _sorted((held, *waiting))[:, : MAX_SORTED // 2].copy()
                waiting, count, until_ns = [], held.shape[1], int(held[0, -1])
    held = _sorted((held, *waiting))
    return (held, True) if until_ns is None else (held[:, : MAX_SORTED // 2], False)


def _sorted(parts: Sequence[Rows]) -> Rows:
    import numpy as np

    rows = np.concatenate(parts, axis=1)
    return rows[:, np.lexsort(rows[_KEYS - 1 :: -1])]  # the last of the keys it is given sorts first


def _is_after(rows: Rows, key: Rows) -> NDArray[np.bool_]:
    """Which of `rows` sort after `key`."""
    import numpy as np

    found, alike = np.zeros(rows.shape[1], np.bool_), np.ones(rows.shape[1], np.bool_)
    for row, value in zip(rows, key, strict=False):
        found |= alike & (row > value)
        alike &= row == value
    return found


def _listed(*columns: Rows) -> Iterator[TimedRecord]:
    """Node, start, end, elements and flags as records, made as they are walked: the rest stays in its columns."""
    for first in range(0, len(columns[0]), LISTED_RECORDS):
        chunk = (column[first : first + LISTED_RECORDS].tolist() for column in columns)
        for node, start_ns, end_ns, elements, flags in zip(*chunk, strict=True):
            counted = None if flags & FLAG_UNCOUNTED else elements
            plain = flags & (FLAG_LOOSE | FLAG_PLAIN) == FLAG_PLAIN
            yield TimedRecord(node, start_ns, end_ns, counted, bool(flags & FLAG_FAILED), plain)
