"""The records of one process, iterated by end or by start with a bounded number in memory."""

# Rules
# - Records are read again in every iteration, chunk by chunk and batch by batch; they are never kept.
# - They are stored by end. An iteration by start repeatedly takes the first MAX_SORTED / 2 remaining records, and
#   skips chunks that start later. Records in recorded order are read twice. Records that overlap very long cost time
#   instead of memory.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cbtop.protocol.ring import FLAG_FAILED, FLAG_LOOSE, FLAG_PLAIN, FLAG_UNCOUNTED
from cbtop.protocol.ring_reader import Batch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]  # one column per record: start, ~end, node and number (the sort keys); then the rest

LISTED_RECORDS = 4_096  # number of records converted to objects at a time
MAX_SORTED = 1 << 18  # 48 bytes each, and twice as much again during sorting
_KEYS = 4

Chunk = Callable[[], Iterable[Batch]]


class TimedRecord(NamedTuple):
    """One run of a node, on the monotonic clock. Which thread ran it is not recorded."""

    node: int
    start_ns: int
    end_ns: int
    elements: int | None  # None if the caller gave no count
    failed: bool
    plain: bool = False  # a step timed only as a whole, whose inside was not recorded


class _Span(NamedTuple):
    """A chunk, the number of its first record, and the range of its records' starts."""

    read: Chunk
    number: int
    first_ns: int
    last_ns: int


class Records:
    """The records of `chunks` in the order they ended. Each chunk is called in every iteration."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self.read = 0  # includes records that are not calls: amounts of work, and cancelled steps
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
        """The start of the earliest record; 0 if there are none."""
        return min((span.first_ns for span in self._spans), default=0)

    def by_start(self) -> Iterator[TimedRecord]:
        """Yield the records by start, each before those it contains.

        A parent has a smaller id than its children, so it comes first if both have the same times.
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
    """Return the first records in `spans` after the key `after`, sorted, and whether these are all."""
    import numpy as np  # imported here: a command that exports nothing should not load it

    held = np.zeros((_KEYS + 2, 0), np.int64)
    waiting: list[Rows] = []
    count = 0
    until_ns: int | None = None  # later starts are not needed
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
    return rows[:, np.lexsort(rows[_KEYS - 1 :: -1])]  # lexsort takes its primary key last


def _is_after(rows: Rows, key: Rows) -> NDArray[np.bool_]:
    """Return which of `rows` sort after `key`."""
    import numpy as np

    found, alike = np.zeros(rows.shape[1], np.bool_), np.ones(rows.shape[1], np.bool_)
    for row, value in zip(rows, key, strict=False):
        found |= alike & (row > value)
        alike &= row == value
    return found


def _listed(*columns: Rows) -> Iterator[TimedRecord]:
    """Yield records from columns of node, start, end, elements and flags, converted only as they are iterated."""
    for first in range(0, len(columns[0]), LISTED_RECORDS):
        chunk = (column[first : first + LISTED_RECORDS].tolist() for column in columns)
        for node, start_ns, end_ns, elements, flags in zip(*chunk, strict=True):
            counted = None if flags & FLAG_UNCOUNTED else elements
            plain = flags & (FLAG_LOOSE | FLAG_PLAIN) == FLAG_PLAIN
            yield TimedRecord(node, start_ns, end_ns, counted, bool(flags & FLAG_FAILED), plain)
