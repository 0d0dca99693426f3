"""Reads a ring: the records of a process, the current node of each of its threads, and its newest time.

Rules
- The reader never writes to the file and never maps it. So if the file is cut short during a read, that is an error
  and not a SIGBUS.
- `ring` describes the layout, and why a record is never half old and half new.
"""

from __future__ import annotations

import os
import stat
import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cbtop.protocol import clock
from cbtop.protocol.errors import RingError
from cbtop.protocol.open_file import OpenFile
from cbtop.protocol.ring import (
    CLOSED_WORD,
    CURSOR_WORD,
    FIRST_RECORD,
    FIRST_SLOT_WORD,
    FLAG_AMOUNTS,
    FLAG_CANCELLED,
    FLAG_LOOSE,
    FLAG_PLAIN,
    FLAG_UNCOUNTED,
    HEADER,
    HEADER_BYTES,
    HELD,
    LEFT_OUT_WORD,
    MAGIC,
    MAX_NODE,
    MAX_RING_BYTES,
    MAX_WRITERS_INSIDE,
    NEVER_WRITTEN,
    NO_NODE,
    NODE_BITS,
    RECORD,
    RECORD_BYTES,
    SEQUENCE_MASK,
    SEQUENCE_SHIFT,
    SLOT_WORDS,
    SLOTS,
    VERSION,
    fence,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# A cursor above this value is invalid: it would need more than a record per nanosecond for a century.
MAX_RECORDS = 1 << 62
MAX_THREAD_ID = 1 << 22  # PID_MAX_LIMIT of Linux
# If a slot stays incomplete for this long, the thread that began to write it was killed. Its record counts as lost.
ABANDONED_AFTER_S = 2.0
# Number of slots beyond the cursor that a reader searches first. If it finds a record near their end, it searches
# LOOK_FURTHER times as many slots. Most searches find nothing, and a daemon searches each ring four times per second.
LOOK_AHEAD = 2 * MAX_WRITERS_INSIDE
LOOK_FURTHER = 8
READ_TOGETHER = 1 << 15  # number of records per read, if only the tags of the records are needed

_WORD = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Batch:
    """The records of one read, and how many records were lost before them.

    Records are stored in columns (i64, one entry per record).
    """

    node: NDArray[np.int64]
    flags: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    elements: NDArray[np.int64]
    overwritten: int

    def calls(self) -> Batch:
        """Return the records of calls. Leave out the records of cancelled steps and of amounts."""
        others = self.are(FLAG_AMOUNTS) | self.are(FLAG_CANCELLED)
        return self.only(~others) if others.any() else self

    def are(self, what: int) -> NDArray[np.bool_]:
        """Return a mask of the records of a kind.

        The kind `what` is FLAG_AMOUNTS, FLAG_CANCELLED (cancelled steps), FLAG_PLAIN (plain steps) or FLAG_LOOSE
        (loose calls).
        """
        of_lane = FLAG_PLAIN & ~FLAG_AMOUNTS if what in (FLAG_AMOUNTS, FLAG_PLAIN) else 0
        found: NDArray[np.bool_] = (self.flags & (FLAG_LOOSE | of_lane)) == what
        return found

    def only(self, chosen: NDArray[np.bool_]) -> Batch:
        """Return a batch of the records that the mask `chosen` selects."""
        columns = (self.node, self.flags, self.start_ns, self.end_ns, self.elements)
        node, flags, start_ns, end_ns, elements = (column[chosen] for column in columns)
        return Batch(node, flags, start_ns, end_ns, elements, self.overwritten)


@dataclass(frozen=True, slots=True)
class InFlight:
    """The innermost node that a thread, task or greenlet is in. The nodes around it run, too.

    - `node` is NO_NODE outside all nodes, and HELD in a step that has no name yet.
    - `start_ns` is None if the start is unknown, because a brick inside the node has ended since.
    - `size` is the number of tokens or sequences of the step around the node (0: unknown).
    """

    thread_id: int
    node: int
    start_ns: int | None
    size: int = 0


class RingReader:
    """Reads the ring at `path`, starting at its oldest record. Each read continues at the end of the previous one.

    Raises RingError if the file is not a ring of this version, or if the file's header does not fit its size.
    """

    def __init__(self, path: Path, clock_s: Callable[[], float] = clock.monotonic) -> None:
        self.path = path
        self._clock_s = clock_s
        try:
            self._file = OpenFile(path)
        except OSError as error:
            raise RingError(f"ring {path}: {error.strerror}") from error
        try:
            size_bytes = self._size_bytes = self._file.status.st_size
            if not stat.S_ISREG(self._file.status.st_mode):
                raise RingError(f"ring {path}: not a regular file")
            if not HEADER_BYTES <= size_bytes <= HEADER_BYTES + MAX_RING_BYTES:
                raise RingError(f"ring {path}: {size_bytes} bytes, a ring has {HEADER_BYTES} to {MAX_RING_BYTES}")
            self._file.read_no_further()
            self._open_ring()
        except OSError as error:
            self._file.close()
            raise RingError(f"ring {path}: {error.strerror}") from error
        except BaseException:
            self._file.close()
            raise

    def _open_ring(self) -> None:
        path = self.path
        magic, version, record_bytes, capacity, pid, start, monotonic, realtime, boot = HEADER.unpack_from(
            self._pread(HEADER.size, 0)
        )
        if magic != MAGIC:
            raise RingError(f"ring {path}: not a ring file")
        if version != VERSION or record_bytes != RECORD_BYTES:
            raise RingError(f"ring {path}: version {version}, this cbtop reads version {VERSION}")
        fits = self._size_bytes == HEADER_BYTES + capacity * RECORD_BYTES
        if capacity < 1 or capacity & (capacity - 1) or not fits:
            raise RingError(f"ring {path}: the header speaks of {capacity} records, the file is not that long")
        self.capacity: int = capacity
        self.pid: int = pid
        self.process_start: int = start
        self.monotonic_ns: int = monotonic
        self.realtime_ns: int = realtime
        self.boot_id = str(uuid.UUID(bytes=boot))
        self._next = 0  # number of the record that will be read next
        self._begun = 0  # number of records that the writer has begun, or fewer
        self._stuck_at = -1
        self._stuck_since_s = 0.0

    @property
    def produced(self) -> int:
        """Number of records that the writer has begun. Raises RingError if the cursor is negative or too large."""
        cursor = self._word(CURSOR_WORD)
        if cursor < 0:
            raise RingError(f"ring {self.path}: the cursor went back from {self._begun} to {cursor}")
        if cursor > MAX_RECORDS:
            raise RingError(f"ring {self.path}: the cursor speaks of {cursor} records")
        self._begun = self._newest_from(max(cursor, self._begun))
        return self._begun

    @property
    def left_out(self) -> int:
        """Number of announcements that the writer has left out. Raises RingError if the number is not valid."""
        count = self._word(LEFT_OUT_WORD)
        if not 0 <= count <= MAX_RECORDS:
            raise RingError(f"ring {self.path}: it speaks of {count} announcements left out")
        return count

    @property
    def is_closed(self) -> bool:
        """Whether the writer has closed the ring."""
        return self._word(CLOSED_WORD) == 1

    @property
    def unread(self) -> int:
        """Number of records that had begun at the last read, but were not read."""
        return max(0, self._begun - self._next)

    @property
    def read_to(self) -> int:
        """The number of the next record to read. Earlier records were read or counted as overwritten."""
        return self._next

    def skip_to(self, number: int) -> None:
        """Let the next read begin at the record with this number. Earlier records do not count as overwritten."""
        self._next = number

    @property
    def is_filling(self) -> bool:
        """Whether an eighth of the ring was written since the last read. Looks only at one slot.

        Raises RingError if the file has been cut short.
        """
        number = self._next + self.capacity // 8
        at = FIRST_RECORD + number % self.capacity * RECORD_BYTES
        *_, tag, sequence = RECORD.unpack(self._pread(RECORD_BYTES, at))
        # The numbers in tags wrap. If a number seems to be ahead by more than half of the range, it is from an old
        # record.
        ahead = (sequence - number - 1) & SEQUENCE_MASK
        return bool(tag | sequence) and ahead <= SEQUENCE_MASK // 2

    def read(self, *, final: bool = False) -> Batch:
        """Return the complete records since the last read, at most as many as the ring holds.

        Stops at a record that was begun and is not complete. Such a record counts as lost after ABANDONED_AFTER_S, or
        at once if the writer has ended (`final`). Raises RingError if the cursor is negative or counts records that
        do not exist, or if the file has been cut short.
        """
        import numpy as np  # NumPy is imported here, because a profiled process does not need it

        self._refuse_cut_short()
        produced = self.produced
        if produced == self._next:
            nothing = np.zeros(0, np.int64)
            return Batch(nothing, nothing, nothing, nothing, nothing, overwritten=0)
        lost = max(0, produced - self.capacity - self._next)
        first = self._next + lost
        count = produced - first
        tag = self._tags(first, count)
        fence()
        records = self._records(first, count)
        fence()
        same = tag == self._tags(first, count)
        # Drop the oldest records, because the writer may have begun to overwrite them during the copy.
        margin = 0 if final else min(MAX_WRITERS_INSIDE, self.capacity // 16)
        unsafe = min(max(0, self.produced - self.capacity + margin - first), count)
        records, tag, same = records[unsafe:], tag[unsafe:], same[unsafe:]
        first, count, lost = first + unsafe, count - unsafe, lost + unsafe
        expected = np.arange(first + 1, first + count + 1, dtype=np.int64)
        age = ((tag >> SEQUENCE_SHIFT) - expected) & SEQUENCE_MASK
        age[tag == NEVER_WRITTEN] = SEQUENCE_MASK
        age[(age == 0) & ~same] = 1  # the record was complete in the first copy, but was replaced meanwhile
        if count > MAX_WRITERS_INSIDE and age.all():
            raise RingError(f"ring {self.path}: {produced} records by its cursor, where nothing was written")
        if age.any():
            overtaken = (age != 0) & (age < SEQUENCE_MASK // 2)  # the slot already contains a newer record
            missing = (age != 0) & ~overtaken  # the slot is reserved, but its record is not complete yet
            # Stop before the first incomplete record. The next read tries it again.
            if missing.any() and not (final or self._abandoned(first + int(missing.argmax()))):
                records = records[: int(missing.argmax())]
            complete = age[: len(records)] == 0
            lost += int(len(records) - complete.sum())
            self._next = first + len(records)
            records, tag = records[complete], tag[: len(records)][complete]
        else:
            self._next = produced
        elements = records[:, 2]
        flags = tag & (0xFF << NODE_BITS)
        # The Python hot path accepts elements of 2^63 or more. A reader sees these as negative numbers.
        if len(elements) and elements.min() < 0:
            flags = flags | np.where(elements < 0, FLAG_UNCOUNTED, 0)
            elements = np.maximum(elements, 0)
        return Batch(
            node=tag & MAX_NODE,
            flags=flags,
            start_ns=records[:, 0],
            end_ns=records[:, 1],
            elements=elements,
            overwritten=lost,
        )

    def in_flight(self) -> list[InFlight]:
        """Return the node that each thread, task or greenlet of the writer is in, or was in when the writer was
        killed.

        Threads outside all named nodes are left out. Raises RingError if the file has been cut short.
        """
        return [thread for thread in self.threads() if thread.node > NO_NODE]

    def threads(self) -> list[InFlight]:
        """Return each thread, task or greenlet that has a slot, and the node in the slot.

        Skips a slot that changes during the read or has impossible values. A writer with the Python hot path has no
        slots, so the result is [] then. Raises RingError if the file has been cut short.
        """
        import numpy as np  # NumPy is imported here, because a profiled process does not need it

        self._refuse_cut_short()
        size_bytes, at = 8 * SLOTS * SLOT_WORDS, 8 * FIRST_SLOT_WORD
        # The writer clears the node of a slot before it changes the start. So if two copies of a slot are equal,
        # their node and start belong together.
        before, after = (
            np.frombuffer(self._pread(size_bytes, at), "<i8").reshape(SLOTS, SLOT_WORDS)[:, :4] for _ in range(2)
        )
        found = after[(before == after).all(axis=1)].tolist()
        return [
            InFlight(thread_id, node, start_ns or None, max(0, size))
            for thread_id, node, start_ns, size in found
            if 0 < thread_id <= MAX_THREAD_ID and HELD <= node <= MAX_NODE and start_ns >= 0
        ]

    def newest_end_ns(self) -> int | None:
        """Return the time when the newest record ended, on the writer's clock, or None if no record has a time.

        A binary search beyond the cursor finds the newest record. So this method does not load NumPy, and reads
        little. Raises RingError if the cursor is not valid or the file has been cut short.
        """
        begun = self._word(CURSOR_WORD)
        if not 0 <= begun <= MAX_RECORDS:
            raise RingError(f"ring {self.path}: the cursor speaks of {begun} records")
        end = begun + self.capacity
        while begun < end:
            middle = (begun + end) // 2
            if self._ends(middle, 1):
                begun = middle + 1
            else:
                end = middle
        first = max(0, begun - min(MAX_WRITERS_INSIDE, self.capacity))
        newest_ns = max(self._ends(first, begun - first), default=0)
        return newest_ns if newest_ns > 0 else None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _pread(self, size_bytes: int, at: int) -> bytes:
        try:
            data = self._file.read_at(at, size_bytes)
        except OSError as error:
            raise RingError(f"ring {self.path}: {error.strerror}") from error
        if len(data) < size_bytes:
            raise RingError(f"ring {self.path}: the file has been cut short")
        return data

    def _word(self, index: int) -> int:
        word: int = _WORD.unpack(self._pread(_WORD.size, _WORD.size * index))[0]
        return word

    def _records(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the slots of `count` records from number `first` on. Each row of the array has the four words of a
        slot.
        """
        import numpy as np

        return np.frombuffer(self._slots(first, count), "<i8").reshape(-1, 4)

    def _slots(self, first: int, count: int) -> bytes:
        at = first % self.capacity
        before_end = min(count, self.capacity - at)
        data = self._pread(before_end * RECORD_BYTES, FIRST_RECORD + at * RECORD_BYTES)
        if before_end < count:
            data += self._pread((count - before_end) * RECORD_BYTES, FIRST_RECORD)
        return data

    def _tags(self, first: int, count: int) -> NDArray[np.int64]:
        """Return only the tags of `count` records from number `first` on."""
        import numpy as np

        end = first + count
        pieces = range(first, end, READ_TOGETHER)
        return np.concatenate([self._records(at, min(READ_TOGETHER, end - at))[:, 3] for at in pieces])

    def _newest_from(self, at_least: int) -> int:
        """Return how many records have been begun.

        The cursor may be too low. So this method starts at `at_least`, and searches for the newest complete record.
        """
        look = min(LOOK_AHEAD, self.capacity)
        while True:
            tag = self._tags(at_least, look)
            ahead = ((tag >> SEQUENCE_SHIFT) - at_least) & SEQUENCE_MASK
            # The numbers in tags wrap. If a number seems to be ahead by more than half of the range, it belongs to an
            # old record.
            ahead[(ahead > SEQUENCE_MASK // 2) | (tag == NEVER_WRITTEN)] = 0
            furthest = int(ahead.max())
            if furthest < look - MAX_WRITERS_INSIDE or look == self.capacity:
                return at_least + furthest
            look = min(LOOK_FURTHER * look, self.capacity)

    def _ends(self, first: int, count: int) -> list[int]:
        """Return the end times of the complete records among the `count` records from number `first` on."""
        found = []
        slots = RECORD.iter_unpack(self._slots(first, count))
        for number, (_start_ns, end_ns, _elements, tag, sequence) in enumerate(slots, first):
            if sequence == (number + 1) & SEQUENCE_MASK and tag | sequence:
                found.append(0 if tag & (FLAG_LOOSE | FLAG_PLAIN) == FLAG_AMOUNTS else end_ns)
        return found

    def _refuse_cut_short(self) -> None:
        status = self._file.status_now()
        # A process that daemonizes closes all its files. The ring's descriptor may then belong to a different file.
        if not os.path.samestat(status, self._file.status):
            raise RingError(f"ring {self.path}: it was closed under its reader")
        if status.st_size < self._size_bytes:
            raise RingError(f"ring {self.path}: the file has been cut short")

    def _abandoned(self, number: int) -> bool:
        now_s = self._clock_s()
        if number != self._stuck_at:
            self._stuck_at, self._stuck_since_s = number, now_s
        return now_s - self._stuck_since_s >= ABANDONED_AFTER_S
