"""The ring of records that a profiled process maps and writes: one file of fixed size. `ring_reader` reads it.

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
               that node has ended since; a step that is not recorded: since the last step inside it began), the size
               of its step: tokens, or sequences if these are unknown (0: neither is known)
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
- A command that asks something of the process writes one word, and nothing else.

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
import struct
import sys
import uuid
from _thread import allocate_lock
from collections.abc import Callable, Iterator
from itertools import chain, cycle, repeat
from pathlib import Path

from cbtop.protocol import clock
from cbtop.protocol.errors import RingError
from cbtop.protocol.filesystem import copies_on_write, in_words
from cbtop.protocol.process import boot_id, process_start
from cbtop.protocol.signals import is_ours, reraise_host_error, suppressed

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
NEVER_WRITTEN = 0  # as a whole tag
HELD = -1  # slot value inside a step that has no name yet: its parts have no nodes
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

# Writers may be inside this many slots beyond the cursor; the old records there may be half overwritten.
MAX_WRITERS_INSIDE = 64

HEADER = struct.Struct("<8sqqqqqqq16s")
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
            HEADER.pack_into(self._memory, 0, MAGIC, *header, clock.perf_counter_ns(), clock.time_ns(), boot)
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
