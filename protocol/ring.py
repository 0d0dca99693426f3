"""The ring of records that a profiled process maps and writes, and the daemon reads: one file of fixed size.

Layout (little-endian; every word is a signed 64-bit integer; version 2)
    byte 0     magic b"CBTOPRNG"
    word 1     version            word 2  record size in bytes (32)      word 3  capacity in records (a power of 2)
    word 4     pid                word 5  process start, clock ticks since boot
    word 6, 7  monotonic ns and realtime ns, read together
    word 8, 9  boot id, 16 raw bytes
    word 10    number of announcements that the process has left out, see `cbtop.profiler.recorder`
    word 11    1 once the writer has closed it, even if its process still runs; else 0
    word 12    a command's request to the process; word 13: its answer, see `cbtop.protocol.requests`
    word 16    cursor: at least this many records were begun (a cache line of its own)
    word 24    61 slots of 8 words, one per thread, task or greenlet: native thread id (0: free), the node it is in
               (0: none, -1: a step that has no name yet), since when in ns (0: not known, because a brick inside
               that node has ended since), the tokens of its step (0: not known)
    byte 4096  the records, number n in slot n mod capacity: start ns, end ns, elements, tag
    tag        bits 0-23 node id, bits 24-27 flags, bits 28-31 lane, bits 32-62 (n + 1) mod 2^31. Amounts have no
               lane: if the lane's lowest bit is set, the record is a plain step instead (FLAG_PLAIN)

Rules
- The ring's cursor is moved in this file, and by the compiled hot path, which tests hold to the same layout.
- The threads of a process share the ring. Each reserves a slot by one atomic step of a counter, and writes the slot's
  tag last. There is no lock.
- The tag carries the record's number. So a reader can tell three things apart: a record that is complete, one that is
  not written yet, and one that a newer record has replaced.
- The cursor is a lower bound. The Python writer stores it once a lap, the compiled one at every record. A reader
  finds the records beyond it by their tags.
- A slot of word 24 tells what its thread, task or greenlet is in, even after the process was killed. Only the
  compiled hot path writes slots: in Python they would make a start/stop pair a third dearer. There are exactly 61.
- The writer allocates the whole file first: a full disk is an error at the start, not a SIGBUS later. When it closes
  the ring it gives back the part it never wrote, as a hole, which reads as zeros.
- The reader never writes, and never maps the file: a file cut short during a read is an error, not a SIGBUS. A
  command that asks something of the process writes one word, and nothing else.

File systems
- tmpfs, ext4 and XFS keep the room that was allocated for a file: its mapping can be written when the disk is full.
- btrfs does not: it writes to a different place each time (copy-on-write), and kills by SIGBUS if none is left.
  Measured on Linux 6.18: the flag "no copy-on-write" (FS_NOCOW_FL), set before the room is allocated, holds until a
  snapshot is taken. It does not hold if data and metadata share their blocks (mkfs.btrfs --mixed). So no ring is made
  on btrfs, see `cbtop.protocol.filesystem`.
- ZFS copies on write, too. By its sources (OpenZFS 2.2, not measured here) a mapped page is accepted when the disk is
  full. Pages that cannot be written out later are lost from the file, but readers on this machine still see them.
- NFS is not recommended: a mapped page waits for the server (a host could hang with it), and a file removed by a
  different machine is a SIGBUS. Not measured here.

Why a record is never half old and half new
- The writer first sets the slot's tag to 0, then writes the data, then the new tag. The reader copies the tags, then
  the data, then the tags again. A record counts if its first tag is complete and its second is the same: a reader
  that has seen one word of newer data finds the tag changed.
- The three copies are three reads of the file, because the words of a single read arrive in no particular order.
- This needs stores that become visible in their order, and loads that happen in theirs. x86 guarantees both, so one
  `pack_into` is enough: CPython clears the 32 bytes and then stores word by word, the tag last.
- Other machines (aarch64) may reorder both. There `pack_in_order` puts a fence between the steps. The reader has its
  fences everywhere, because it reads seldom.
- The compiled writer does not clear the tag; it moves the cursor first. So the reader looks at the cursor again after
  the copy, and gives up the oldest MAX_WRITERS_INSIDE records, whose slots are the next to be written.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import operator
import os
import platform
import resource
import stat
import struct
import sys
import uuid
from _thread import allocate_lock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import TYPE_CHECKING

from cbtop.protocol import clock
from cbtop.protocol.errors import RingError
from cbtop.protocol.filesystem import copies_on_write, in_words
from cbtop.protocol.open_file import OpenFile
from cbtop.protocol.process import boot_id, process_start
from cbtop.protocol.signals import is_ours, reraise_host_error, suppressed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAGIC = b"CBTOPRNG"
VERSION = 2
HEADER_BYTES = 4096
RECORD_BYTES = 32
DEFAULT_RING_BYTES = 8 << 20
MAX_RING_BYTES = 1 << 30
MADV_POPULATE_WRITE = 23  # Linux, asm-generic/mman-common.h: Python has no name for it
LEFT_OUT_WORD = 10
CLOSED_WORD = 11
ASKED_WORD = 12
ANSWER_WORD = 13
CURSOR_WORD = 16
FIRST_RECORD = HEADER_BYTES
FIRST_SLOT_WORD = 24  # next to the cursor: processors fetch such a pair of cache lines together
SLOT_WORDS = 8
SLOTS = 61

NODE_BITS = 24
MAX_NODE = (1 << NODE_BITS) - 1
MAX_THREAD_ID = 1 << 22  # PID_MAX_LIMIT of Linux
NEVER_WRITTEN = 0  # as a whole tag
HELD = -1  # in a slot: in a step that has no name yet, where what runs has no node of its own
NO_NODE = 0  # a record with it counts as rejected: bad arguments, or a node table that was full
FLAG_FAILED = 1 << 24  # the brick ended in an exception
FLAG_CANCELLED = 1 << 25  # a step that does not count, nor does anything that ran in it
FLAG_UNCOUNTED = 1 << 26  # the number of elements is not known: the host gave something that is not a count
FLAG_AMOUNTS = 1 << 27  # no call: the FLOP (in place of the start), bytes (end) and elements of a call of the node
# For a step, which has no work of its own, they are its sequences and the positions each of them held before.
FLAG_LOOSE = FLAG_CANCELLED | FLAG_AMOUNTS  # a call that was stopped twice, out of order or late: not counted
UNKNOWN_AMOUNT = -1  # of FLOP or bytes, in such a record
LANE_SHIFT = 28  # the lane of the step that this is, or is inside: one of the steps that run at the same time
LANES = 16  # the last one is shared by all further steps
FLAG_PLAIN = FLAG_AMOUNTS | 1 << LANE_SHIFT  # a step that is timed as a whole: its inside is not recorded
SEQUENCE_SHIFT = 32
SEQUENCE_MASK = (1 << 31) - 1

# A reserved slot that stays empty this long belongs to a thread that was killed in the middle: it is lost.
ABANDONED_AFTER_S = 2.0
# Writers may be inside this many slots beyond the cursor; the old records there may be half overwritten.
MAX_WRITERS_INSIDE = 64
# A reader searches this many slots beyond the cursor, and LOOK_FURTHER times as many if it found records to the end.
# Few at first, because most looks find nothing: a daemon reads each of its rings four times a second.
LOOK_AHEAD = 2 * MAX_WRITERS_INSIDE
LOOK_FURTHER = 8
MAX_RECORDS = 1 << 62  # a century of one record per nanosecond: a cursor beyond it is wrong
READ_TOGETHER = 1 << 15  # records per piece, if only their tags are kept

_HEADER = struct.Struct("<8sqqqqqqq16s")
_WORD = struct.Struct("<q")
# The tag in two halves, its number last: no shifting at every record. A size of this machine ("n") packs the same
# eight bytes: a record takes 62 ns, against 81 with "<q" and 65 with a long. Elements are unsigned ("N"): a negative
# number is refused like anything else that is not a count.
RECORD = struct.Struct("@nnNII")
_DATA, _TAG = struct.Struct("@nnN"), struct.Struct("@n")  # each is stored whole; "<q" goes byte by byte
_TAG_AT = _DATA.size
# The place given for a lap's first record; RECORD refuses it. So the work due once a lap slows no other record, which
# saves 10 ns of a start/stop pair's 370.
LAP_DUE = HEADER_BYTES + MAX_RING_BYTES

Record = Callable[[int, int, int, int], None]


def fence() -> None:
    """Make other processors see every load and store before this call ahead of those after it.

    The new lock is released (nothing before may come later), then acquired (nothing after may come earlier). The
    other order would let both sides meet in between. No other thread can hold the lock, because it is new.
    """
    lock = allocate_lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def pack_in_order(
    memory: memoryview | bytearray, at: int, start_ns: int, end_ns: int, elements: int, tag: int, number: int
) -> None:
    """Do the same as RECORD.pack_into, in its order on every machine. Raises struct.error in the same cases."""
    _TAG.pack_into(memory, at + _TAG_AT, NEVER_WRITTEN)
    fence()
    _DATA.pack_into(memory, at, start_ns, end_ns, elements)
    fence()
    _TAG.pack_into(memory, at + _TAG_AT, tag | number << SEQUENCE_SHIFT)


STORES_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64")
pack_record = RECORD.pack_into if STORES_IN_ORDER else pack_in_order


class RingWriter:
    """Writes records into a new ring file at `path` (mode 0600).

    `record(tag, start_ns, end_ns, elements)` writes one record. A hot path that cannot afford this call takes the
    same three steps itself. `next(reserve)` gives the place in `memory` and the number for the tag. `pack_record`
    writes the record there. If it raises, as it does at the first record of each lap, `refused` writes it. `first` is
    the first record's number: a test begins just before the numbers in the tags start again at 0. Raises RingError if
    the file cannot be made.
    """

    record: Record
    reserve: Iterator[tuple[int, int]]

    def __init__(self, path: Path, size_bytes: int = DEFAULT_RING_BYTES, first: int = 0) -> None:
        capacity = size_bytes // RECORD_BYTES
        if capacity < 1 or capacity & (capacity - 1) or size_bytes > MAX_RING_BYTES:
            raise RingError(
                f"a ring of {size_bytes} bytes; a power of two from {RECORD_BYTES} to {MAX_RING_BYTES} is wanted"
            )
        if RECORD.size != RECORD_BYTES or sys.byteorder != "little":
            raise RingError("a ring is written by 64-bit little-endian processes only")
        self.path = path
        total = HEADER_BYTES + capacity * RECORD_BYTES
        # A reader must never meet a half-made ring: the file gets its name once it is complete.
        unfinished = path.with_suffix(".new")
        try:
            descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RingError(f"ring {path}: {in_words(error)}") from error
        try:
            try:
                if copies_on_write(descriptor):
                    raise RingError(
                        f"ring {path}: its file system copies on write (btrfs) and would kill this process when it "
                        "is full; set CBTOP_RUNTIME_DIR to a directory of a tmpfs, such as /dev/shm"
                    )
                _allocate(descriptor, total)
                self._memory = mmap.mmap(descriptor, total)
                _fault_in(self._memory)
            finally:
                os.close(descriptor)
            boot = uuid.UUID(boot_id() or "0" * 32).bytes
            pid = os.getpid()
            header = (VERSION, RECORD_BYTES, capacity, pid, process_start(pid) or 0)
            _HEADER.pack_into(self._memory, 0, MAGIC, *header, clock.perf_counter_ns(), clock.time_ns(), boot)
            os.rename(unfinished, path)
        except BaseException as error:
            with suppressed(OSError):
                unfinished.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise RingError(f"ring {path} of {total} bytes: {in_words(error)}") from error
            raise
        self.memory = memoryview(self._memory)
        self.capacity = capacity
        self._words = self.memory.cast("q")
        self._words[CURSOR_WORD] = first
        self.asked_word = self._words[ASKED_WORD : ASKED_WORD + 1]  # a command's request, see `asked`
        self._laps = itertools.count(first + -first % capacity, capacity)
        # `next` of this is one C call, so no other thread comes in between. It is made of ranges alone, because
        # making any other iterator may collect garbage, and that may run any code. The numbers start again as in the
        # tags.
        offsets, numbers = range(FIRST_RECORD, total, RECORD_BYTES), range(SEQUENCE_MASK + 1)
        lap_offsets = cycle((range(LAP_DUE, LAP_DUE + 1), offsets[1:]))
        self.reserve = zip(
            chain.from_iterable(chain((offsets[first % capacity or capacity :],), lap_offsets)),
            chain.from_iterable(chain((numbers[(first + 1) & SEQUENCE_MASK :],), repeat(numbers))),
            strict=False,
        )
        self.record = _record_function(self)

    def refused(self, at: int, number: int, tag: int, start_ns: int, end_ns: int, elements: int) -> bool:
        """Write the record nevertheless: begin a lap that is due, and leave out elements that are not a count.

        Returns whether the elements were a count.
        """
        if at == LAP_DUE:
            self._words[CURSOR_WORD] = next(self._laps)
            at = FIRST_RECORD
        count = -1
        try:
            count = operator.index(elements)
        except Exception as error:  # noqa: BLE001 - whatever an object of the host's raises when asked for a number
            reraise_host_error(error)
        finally:  # an interrupt raised there goes on to the host, and the record is written
            known = 0 <= count < 1 << 63
            if not known:
                count, tag = 0, tag | FLAG_UNCOUNTED
            try:
                pack_record(self.memory, at, start_ns, end_ns, count, tag, number)
            except (struct.error, TypeError, OverflowError):  # a host's clock that does not give 64-bit integers
                pack_record(self.memory, at, 0, 0, 0, NO_NODE, number)
        return known

    def set_left_out(self, count: int) -> None:
        """Publish that `count` announcements have been left out."""
        self._words[LEFT_OUT_WORD] = count

    @property
    def asked(self) -> int:
        """A command's request to this process, as `cbtop.protocol.requests` reads it; 0: none."""
        return self.asked_word[0]

    def answer(self, word: int) -> None:
        """Publish the answer to that request."""
        self._words[ANSWER_WORD] = word

    def close(self) -> None:
        """Mark the ring as closed, and give back the room that was never written.

        The memory stays mapped, because a thread may still be writing a record that it has begun.
        """
        self._words[CLOSED_WORD] = 1
        begun = max(self._words[CURSOR_WORD], next(self.reserve)[1] - 1)
        used_bytes = FIRST_RECORD + (begun + MAX_WRITERS_INSIDE) * RECORD_BYTES
        used_bytes += -used_bytes % mmap.PAGESIZE
        if used_bytes < len(self._memory) and hasattr(mmap, "MADV_REMOVE"):  # Linux has it
            with suppressed(OSError):  # a file system without holes: the room stays taken
                self._memory.madvise(mmap.MADV_REMOVE, used_bytes, len(self._memory) - used_bytes)


def _record_function(ring: RingWriter) -> Record:
    """Return it as a closure: everything it touches is a local or a cell, nothing is looked up."""
    memory, reserve, pack_into = ring.memory, ring.reserve, pack_record

    def record(tag: int, start_ns: int, end_ns: int, elements: int) -> None:
        at, number = next(reserve)
        try:
            pack_into(memory, at, start_ns, end_ns, elements, tag, number)
        except BaseException as error:
            ring.refused(at, number, tag, start_ns, end_ns, elements)
            if not is_ours(error):  # an interrupt is not ours to swallow
                raise

    return record


def _allocate(descriptor: int, size_bytes: int) -> None:
    """Allocate the whole file. Raises OSError if the disk is full, or if the file may not be that large."""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY and size_bytes > most:  # trying would send SIGXFSZ, which may end the process
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    # macOS has no such call, and some file systems refuse it.
    fallocate = getattr(os, "posix_fallocate", None)
    if fallocate is not None:
        try:
            fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        else:
            return
    zeros = bytes(min(size_bytes, 1 << 20))
    written = 0
    while written < size_bytes:
        written += os.pwrite(descriptor, zeros[: size_bytes - written], written)


def _fault_in(memory: mmap.mmap) -> None:
    """Map every page for writing, which takes 7 ms for 8 MiB on ext4 and 2 on a tmpfs. Otherwise a step that comes to
    a new page waits for it, until the ring has been filled once: 0.9 % of a decode of 3 ms.
    """
    if sys.platform == "linux":
        with suppressed(OSError):  # before Linux 5.14: they are mapped as they are written
            memory.madvise(MADV_POPULATE_WRITE)


@dataclass(frozen=True, slots=True)
class Batch:
    """The records of one read, in columns (i64, one entry per record), and the number of records lost before them."""

    node: NDArray[np.int64]
    flags: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    elements: NDArray[np.int64]
    overwritten: int

    def calls(self) -> Batch:
        """Return it without cancelled steps and without the records of FLOP and bytes, which have no times."""
        others = self.are(FLAG_AMOUNTS) | self.are(FLAG_CANCELLED)
        return self.only(~others) if others.any() else self

    def are(self, what: int) -> NDArray[np.bool_]:
        """Return a mask of the records that are amounts (FLAG_AMOUNTS), cancelled steps (FLAG_CANCELLED), plain steps
        (FLAG_PLAIN) or loose calls (FLAG_LOOSE).
        """
        of_lane = FLAG_PLAIN & ~FLAG_AMOUNTS if what in (FLAG_AMOUNTS, FLAG_PLAIN) else 0
        found: NDArray[np.bool_] = (self.flags & (FLAG_LOOSE | of_lane)) == what
        return found

    def only(self, chosen: NDArray[np.bool_]) -> Batch:
        """Return the chosen records."""
        columns = (self.node, self.flags, self.start_ns, self.end_ns, self.elements)
        node, flags, start_ns, end_ns, elements = (column[chosen] for column in columns)
        return Batch(node, flags, start_ns, end_ns, elements, self.overwritten)


@dataclass(frozen=True, slots=True)
class InFlight:
    """The innermost node that a thread, task or greenlet has started and not ended; its parents run too.

    `node` is NO_NODE if it is in none, and HELD in a step that has no name yet. `start_ns` is None if it is not
    known, because a brick inside the node has ended since. `tokens` are those of the step around it; 0: not known.
    """

    thread_id: int
    node: int
    start_ns: int | None
    tokens: int = 0


class RingReader:
    """Reads the ring at `path`, from its oldest record on. Each read continues where the last one ended.

    Raises RingError if the file is not a ring of this version, or if its header and size disagree.
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
        magic, version, record_bytes, capacity, pid, start, monotonic, realtime, boot = _HEADER.unpack_from(
            self._pread(_HEADER.size, 0)
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
        self._next = 0  # number of the next record to read
        self._begun = 0  # at least this many records were begun
        self._stuck_at = -1
        self._stuck_since_s = 0.0

    @property
    def produced(self) -> int:
        """Number of records that the writer has begun. Raises RingError if its cursor is negative or too large."""
        cursor = self._word(CURSOR_WORD)
        if cursor < 0:
            raise RingError(f"ring {self.path}: the cursor went back from {self._begun} to {cursor}")
        if cursor > MAX_RECORDS:
            raise RingError(f"ring {self.path}: the cursor speaks of {cursor} records")
        self._begun = self._newest_from(max(cursor, self._begun))
        return self._begun

    @property
    def left_out(self) -> int:
        """Number of announcements that the writer has left out. Raises RingError if it makes no sense."""
        count = self._word(LEFT_OUT_WORD)
        if not 0 <= count <= MAX_RECORDS:
            raise RingError(f"ring {self.path}: it speaks of {count} announcements left out")
        return count

    @property
    def is_closed(self) -> bool:
        """Whether the writer has closed it."""
        return self._word(CLOSED_WORD) == 1

    @property
    def unread(self) -> int:
        """Number of begun records, as of the last look, that were not read."""
        return max(0, self._begun - self._next)

    @property
    def read_to(self) -> int:
        """The number of the next record: everything below it was read or counted as overwritten."""
        return self._next

    @property
    def is_filling(self) -> bool:
        """Whether an eighth of it was written since the last read: the number in one slot tells.

        Raises RingError if the file has been cut short.
        """
        number = self._next + self.capacity // 8
        at = FIRST_RECORD + number % self.capacity * RECORD_BYTES
        *_, tag, sequence = RECORD.unpack(self._pread(RECORD_BYTES, at))
        ahead = (sequence - number - 1) & SEQUENCE_MASK  # more than half of all numbers ahead is an old one
        return bool(tag | sequence) and ahead <= SEQUENCE_MASK // 2

    def read(self, *, final: bool = False) -> Batch:
        """Return the complete records since the last read, at most as many as the ring holds.

        With `final` (the writer is gone) a slot that was begun and never completed counts as lost at once; else
        reading stops there until ABANDONED_AFTER_S have passed. Raises RingError if the cursor is negative or counts
        records that do not exist, or if the file has been cut short.
        """
        import numpy as np  # the daemon's side only: a profiled process need not load it

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
        # Records that the writer may have begun to overwrite during the copy are given up, not guessed at.
        margin = 0 if final else min(MAX_WRITERS_INSIDE, self.capacity // 16)
        unsafe = min(max(0, self.produced - self.capacity + margin - first), count)
        records, tag, same = records[unsafe:], tag[unsafe:], same[unsafe:]
        first, count, lost = first + unsafe, count - unsafe, lost + unsafe
        expected = np.arange(first + 1, first + count + 1, dtype=np.int64)
        age = ((tag >> SEQUENCE_SHIFT) - expected) & SEQUENCE_MASK
        age[tag == NEVER_WRITTEN] = SEQUENCE_MASK
        age[(age == 0) & ~same] = 1  # complete at first, and then a newer one came
        if count > MAX_WRITERS_INSIDE and age.all():
            raise RingError(f"ring {self.path}: {produced} records by its cursor, where nothing was written")
        if age.any():
            overtaken = (age != 0) & (age < SEQUENCE_MASK // 2)  # a newer record is there already
            missing = (age != 0) & ~overtaken  # reserved, not yet complete
            # An incomplete record is waited for: reading stops before it.
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
        if len(elements) and elements.min() < 0:  # 2^63 or more, which Python's hot path does not check
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
        """Return the node that each thread, task or greenlet of the writer is in, or was in when it was killed.

        Threads in no named node are left out. Raises RingError as `threads`.
        """
        return [thread for thread in self.threads() if thread.node > NO_NODE]

    def threads(self) -> list[InFlight]:
        """Return each thread, task or greenlet that has a slot, and the node it is in.

        A slot that changes during the look is left out, as is one with values that no writer would write. The list is
        always empty with the Python hot path. Raises RingError if the file has been cut short.
        """
        import numpy as np  # the daemon's side only: a profiled process need not load it

        self._refuse_cut_short()
        size_bytes, at = 8 * SLOTS * SLOT_WORDS, 8 * FIRST_SLOT_WORD
        # The writer clears the node before it changes the start. So when two copies agree, node and start belong
        # together.
        before, after = (
            np.frombuffer(self._pread(size_bytes, at), "<i8").reshape(SLOTS, SLOT_WORDS)[:, :4] for _ in range(2)
        )
        found = after[(before == after).all(axis=1)].tolist()
        return [
            InFlight(thread_id, node, start_ns or None, max(0, tokens))
            for thread_id, node, start_ns, tokens in found
            if 0 < thread_id <= MAX_THREAD_ID and HELD <= node <= MAX_NODE and start_ns >= 0
        ]

    def newest_end_ns(self) -> int | None:
        """Return when the newest record ended, by the writer's clock, or None if there is no record with a time.

        Needs no numpy and few reads: it searches the records beyond the cursor by halves, and takes the newest time
        among the last ones. Raises RingError as `produced`.
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
        """Return the slots of `count` records from number `first` on, as rows of four words, in one piece."""
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
        """Return the tags of these records alone."""
        import numpy as np

        end = first + count
        pieces = range(first, end, READ_TOGETHER)
        return np.concatenate([self._records(at, min(READ_TOGETHER, end - at))[:, 3] for at in pieces])

    def _newest_from(self, at_least: int) -> int:
        """Return how many records were begun: one more than the newest complete number from `at_least` on."""
        look = min(LOOK_AHEAD, self.capacity)
        while True:
            tag = self._tags(at_least, look)
            ahead = ((tag >> SEQUENCE_SHIFT) - at_least) & SEQUENCE_MASK
            # A number more than half of all numbers ahead is an old one.
            ahead[(ahead > SEQUENCE_MASK // 2) | (tag == NEVER_WRITTEN)] = 0
            furthest = int(ahead.max())
            if furthest < look - MAX_WRITERS_INSIDE or look == self.capacity:
                return at_least + furthest
            look = min(LOOK_FURTHER * look, self.capacity)

    def _ends(self, first: int, count: int) -> list[int]:
        """Return the end times of the records that exist among the `count` from number `first` on."""
        found = []
        slots = RECORD.iter_unpack(self._slots(first, count))
        for number, (_start_ns, end_ns, _elements, tag, sequence) in enumerate(slots, first):
            if sequence == (number + 1) & SEQUENCE_MASK and tag | sequence:
                found.append(0 if tag & (FLAG_LOOSE | FLAG_PLAIN) == FLAG_AMOUNTS else end_ns)
        return found

    def _refuse_cut_short(self) -> None:
        status = self._file.status_now()
        # A process that becomes a daemon closes every file it finds.
        if not os.path.samestat(status, self._file.status):
            raise RingError(f"ring {self.path}: it was closed under its reader")
        if status.st_size < self._size_bytes:
            raise RingError(f"ring {self.path}: the file has been cut short")

    def _abandoned(self, number: int) -> bool:
        now_s = self._clock_s()
        if number != self._stuck_at:
            self._stuck_at, self._stuck_since_s = number, now_s
        return now_s - self._stuck_since_s >= ABANDONED_AFTER_S
