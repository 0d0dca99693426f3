"""The records of one process, by their ends or by their starts. An iteration keeps a limited number of records in
memory.
"""

# Rules
# - Each iteration reads the records again, by chunk and batch. No record stays in memory.
# - Records are stored by their ends. To iterate by start, sort MAX_SORTED / 2 records at a time: find those that
#   start first among the remaining ones, and skip chunks that start later.
# - If records are already in order, each is read twice. Long overlaps cost more time, but no more memory.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cbtop.protocol.ring import FLAG_FAILED, FLAG_LOOSE, FLAG_PLAIN, FLAG_UNCOUNTED
from cbtop.protocol.ring_reader import Batch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    # An array of shape (fields, records). The first rows are the sort keys of the records: start, ~end, node and
    # number.
    Rows = NDArray[np.int64]

LISTED_RECORDS = 4_096  # Number of records that are converted to Python objects at a time.
# Maximum number of records in memory. A record takes 48 bytes. Sorting needs twice this memory in addition.
MAX_SORTED = 1 << 18
_KEYS = 4

Chunk = Callable[[], Iterable[Batch]]


class TimedRecord(NamedTuple):
    """One call of a node, with times on the monotonic clock. The thread is not recorded."""

    node: int
    start_ns: int
    end_ns: int
    elements: int | None  # number of elements that the call processed, or None if the program did not count them
    failed: bool
    plain: bool = False  # whether this is a step that was timed only as a whole


class _Span(NamedTuple):
    """A chunk of records. It has the number of the first record, and the smallest and the largest start time of all
    records.
    """

    read: Chunk
    number: int
    first_ns: int
    last_ns: int


class Records:
    """The records of `chunks` in the order of their ends. Each iteration calls every function in `chunks` again."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        # Number of all records that were read. This includes amounts and cancelled steps, which are not calls.
        self.read = 0
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
        for batch in self.batches():
            yield from listed(batch.calls())

    def batches(self) -> Iterator[Batch]:
        """Yield the batches with all records that were read. Records of amounts and of cancelled steps are
        included.
        """
        for span in self._spans:
            yield from span.read()

    @property
    def begin_ns(self) -> int:
        """Start of the earliest record in ns. 0 if there are no records."""
        return min((span.first_ns for span in self._spans), default=0)

    def by_start(self) -> Iterator[TimedRecord]:
        """Yield the records by start. A record precedes the records that it contains.

        With equal times, a parent comes before its child, because its id is smaller.
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
    """Return the first records of `spans` after the key `after`, in sorted order. Also return whether these are the
    last records.
    """
    import numpy as np  # NumPy is imported here, so that commands that export nothing do not load it.

    held = np.zeros((_KEYS + 2, 0), np.int64)
    waiting: list[Rows] = []
    count = 0
    # Leave out records that start after this time, because they are not among the first records.
    until_ns: int | None = None
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
    # lexsort sorts by its last row first, so pass the rows in reverse order.
    return rows[:, np.lexsort(rows[_KEYS - 1 :: -1])]


def _is_after(rows: Rows, key: Rows) -> NDArray[np.bool_]:
    """Return a mask of the records (columns of `rows`) that come after `key` in the sort order."""
    import numpy as np

    found, alike = np.zeros(rows.shape[1], np.bool_), np.ones(rows.shape[1], np.bool_)
    for row, value in zip(rows, key, strict=False):
        found |= alike & (row > value)
        alike &= row == value
    return found


def listed(batch: Batch) -> Iterator[TimedRecord]:
    """Yield the records of `batch`, which must contain only calls."""
    return _listed(batch.node, batch.start_ns, batch.end_ns, batch.elements, batch.flags)


def _listed(*columns: Rows) -> Iterator[TimedRecord]:
    """Yield records from columns of node, start, end, elements and flags.

    A record is converted when it is requested.
    """
    for first in range(0, len(columns[0]), LISTED_RECORDS):
        chunk = (column[first : first + LISTED_RECORDS].tolist() for column in columns)
        for node, start_ns, end_ns, elements, flags in zip(*chunk, strict=True):
            counted = None if flags & FLAG_UNCOUNTED else elements
            plain = flags & (FLAG_LOOSE | FLAG_PLAIN) == FLAG_PLAIN
            yield TimedRecord(node, start_ns, end_ns, counted, bool(flags & FLAG_FAILED), plain)
