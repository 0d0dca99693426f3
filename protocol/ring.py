"""The ring of records that a profiled process writes: a mapped file of fixed size. `ring_reader` reads it.

Layout (little-endian; every word is a signed 64-bit integer; version 2)
    byte 0     magic b"CBTOPRNG"
    word 1     version            word 2  record size in bytes (32)      word 3  capacity in records (a power of 2)
    word 4     pid                word 5  process start, clock ticks since boot
    word 6, 7  monotonic ns and realtime ns, read together
    word 8, 9  boot id, 16 raw bytes
    word 10    number of announcements that the process has left out, see `cbtop.profiler.recorder`
    word 11    1 once the writer has closed the ring, even if the process still runs; else 0
    word 12    a command's request to the process; word 13: its answer, see `cbtop.protocol.requests`
    word 16    cursor: at least this many records have been begun (it has a cache line of its own)
    word 24    61 slots of 8 words, one per thread, task or greenlet: native thread id (0: free), the node it is in
               (0: none, -1: a step that has no name yet), since when in ns (0: not known, because a brick inside
               that node has ended since; a step that is not recorded: since the last step inside it began), the size
               of its step: tokens, or sequences if these are unknown (0: neither is known)
    byte 4096  the records, number n in slot n mod capacity: start ns, end ns, elements, tag
    tag        bits 0-23 node id, bits 24-27 flags, bits 28-31 lane, bits 32-62 (n + 1) mod 2^31. Amounts have no
               lane: if the lane's lowest bit is set, the record is a plain step instead (FLAG_PLAIN)

Rules
- There are two writers: the one in this file and the compiled hot path. Tests check that both use the same layout.
- The threads of a process share the ring without a lock. A thread reserves a slot by one atomic increment of a
  counter, and writes the tag of the slot last.
- The tag contains the record's number. From the number, a reader sees whether a record is complete, not written yet,
  or replaced by a newer record.
- The compiled writer moves the cursor at every record, but the Python writer only once per lap. A reader finds the
  records beyond the cursor by their tags.
- The slots at word 24 show which node each thread, task or greenlet is in, even after the process was killed. Only
  the compiled hot path writes these slots. In Python, that would make a start/stop pair a third slower.
- The writer allocates the whole file first, so a full disk is an error at the start and not a SIGBUS later. When the
  writer closes the ring, the part that was never written becomes a hole, which reads as zeros.
- A command that sends a request to the process writes one word, and nothing else.

File systems
- tmpfs, ext4 and XFS keep the space that was allocated for a file, so its mapping can be written when the disk is
  full.
- btrfs writes to a different place each time (copy-on-write). If space runs out, the process is killed by SIGBUS. The
  flag "no copy-on-write" (FS_NOCOW_FL) is not enough, as measured on Linux 6.18. It works until a snapshot is taken,
  and not at all if data and metadata share blocks (mkfs.btrfs --mixed). So no ring is created on btrfs, see
  `cbtop.protocol.filesystem`.
- ZFS also copies on write. According to its sources (OpenZFS 2.2, not measured here), mapped pages can be written
  when the disk is full. If a page cannot be stored later, it is lost from the file, but readers on this machine still
  see it.
- NFS is not recommended. A mapped page waits for the server, so the host could hang. If a different machine removes
  the file, the process gets a SIGBUS. Not measured here.

Why a record is never half old and half new
- The writer first sets the slot's tag to 0, then writes the data, then the new tag. The reader copies the tags, then
  the data, then the tags again. A record counts if the first copy of its tag is complete and the second copy is the
  same. If the reader has copied any newer data, the tag has changed.
- The reader makes the three copies by three reads of the file, because a single read may copy its words in any order.
- Stores must become visible in program order, and loads must happen in program order. x86 guarantees both. There, one
  `pack_into` is enough, because CPython clears the 32 bytes and then stores word by word, the tag last.
- Other machines (aarch64) may reorder loads and stores, so `pack_in_order` puts fences between the steps. The reader
  uses fences on every machine, because it reads rarely.
- The compiled writer does not clear the tag, but moves the cursor before it writes. So the reader reads the cursor
  again after the copy. It drops the oldest MAX_WRITERS_INSIDE records, whose slots may be overwritten already.
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
# The number of a madvise(2) call, from Linux's asm-generic/mman-common.h. Python has no name for this number.
MADV_POPULATE_WRITE = 23
LEFT_OUT_WORD = 10
CLOSED_WORD = 11
ASKED_WORD = 12
ANSWER_WORD = 13
CURSOR_WORD = 16
FIRST_RECORD = HEADER_BYTES
# The thread slots are next to the cursor, because processors fetch two neighbouring cache lines together.
FIRST_SLOT_WORD = 24
SLOT_WORDS = 8
SLOTS = 61

NODE_BITS = 24
MAX_NODE = (1 << NODE_BITS) - 1
NEVER_WRITTEN = 0  # the tag of a slot that no writer has written yet
HELD = -1  # the node of a thread's slot while its step has no name yet
NO_NODE = 0  # a record with this node is rejected: the host passed wrong arguments, or the node table was full
FLAG_FAILED = 1 << 24  # the brick of this record ended in an exception
FLAG_CANCELLED = 1 << 25  # the record is a cancelled step, or belongs to one; a cancelled step does not count
# The record's number of elements is unknown, because the host gave a value that is not a count.
FLAG_UNCOUNTED = 1 << 26
# The record is not a call. It has the FLOP (as start), bytes (as end) and elements of a call of its node. For a step,
# it contains the number of sequences, and how many positions each sequence had in the cache before.
FLAG_AMOUNTS = 1 << 27
# The record is a call that does not count: its brick was stopped twice, out of order or late.
FLAG_LOOSE = FLAG_CANCELLED | FLAG_AMOUNTS
UNKNOWN_AMOUNT = -1  # unknown FLOP or bytes in a FLAG_AMOUNTS record
LANE_SHIFT = 28  # The lane number in a record distinguishes steps that run at the same time.
LANES = 16  # the last lane is shared by all steps that found no free lane
# The record is a step that is timed as a whole, without records of its bricks.
FLAG_PLAIN = FLAG_AMOUNTS | 1 << LANE_SHIFT
SEQUENCE_SHIFT = 32
SEQUENCE_MASK = (1 << 31) - 1

# Threads may be writing in this many slots beyond the cursor. The oldest records are in these slots, and may be
# damaged.
MAX_WRITERS_INSIDE = 64

HEADER = struct.Struct("<8sqqqqqqq16s")
# The tag is packed as two halves, with the number last. So no record needs a shift. "n" packs the same eight bytes as
# "q", but faster: a record takes 62 ns instead of 81. "N" is unsigned, so a negative number of elements is refused,
# like other values that are not a count.
RECORD = struct.Struct("@nnNII")
# struct stores each word at once with "@", but byte by byte with "<q"
_DATA, _TAG = struct.Struct("@nnN"), struct.Struct("@n")
_TAG_AT = _DATA.size
# `reserve` returns this offset for the first record of each lap. Packing a record there fails, and the code that
# handles the error does the work that is needed once per lap. So all other records are written without a test for a
# new lap. This saves 10 ns of the 370 ns of a start/stop pair.
LAP_DUE = HEADER_BYTES + MAX_RING_BYTES

Record = Callable[[int, int, int, int], None]


def fence() -> None:
    """A fence. Other processors see the memory accesses before this call first, and only then the accesses after it.

    `release` completes all earlier accesses, and the second `acquire` delays all later accesses. One `acquire` and
    then one `release` would not be enough, because accesses from both sides could move in between. The lock is new,
    so no other thread can hold it.
    """
    lock = allocate_lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def pack_in_order(
    memory: memoryview | bytearray, at: int, start_ns: int, end_ns: int, elements: int, tag: int, number: int
) -> None:
    """Pack a record like RECORD.pack_into, but store its words in the same order on every machine.

    Raises struct.error in the same cases.
    """
    _TAG.pack_into(memory, at + _TAG_AT, NEVER_WRITTEN)
    fence()
    _DATA.pack_into(memory, at, start_ns, end_ns, elements)
    fence()
    _TAG.pack_into(memory, at + _TAG_AT, tag | number << SEQUENCE_SHIFT)


STORES_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64")
pack_record = RECORD.pack_into if STORES_IN_ORDER else pack_in_order


class RingWriter:
    """Writes records into a new ring file at `path` (mode 0600). Raises RingError if the file cannot be created.

    `record(tag, start_ns, end_ns, elements)` writes one record. A hot path that cannot afford this call does the same
    in three steps:
    - `next(reserve)` returns the record's offset in `memory` and the number for the tag,
    - `pack_record` writes the record at this offset,
    - if that raises, as at the first record of each lap, `refused` writes the record.

    `first` is the number of the first record. Tests set it, to see what happens when the numbers in tags wrap.
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
        # A reader must never find an incomplete ring, so the file gets its final name last.
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
        # This word of the ring has a command's request, see `asked`.
        self.asked_word = self._words[ASKED_WORD : ASKED_WORD + 1]
        self._laps = itertools.count(first + -first % capacity, capacity)
        # `next(reserve)` is one call into C, so no other thread can run meanwhile. The call creates no iterators
        # except iterators of ranges. Creating other iterators may start garbage collection, and garbage collection
        # can run any code. The record numbers wrap at the same value as in the tags.
        offsets, numbers = range(FIRST_RECORD, total, RECORD_BYTES), range(SEQUENCE_MASK + 1)
        lap_offsets = cycle((range(LAP_DUE, LAP_DUE + 1), offsets[1:]))
        self.reserve = zip(
            chain.from_iterable(chain((offsets[first % capacity or capacity :],), lap_offsets)),
            chain.from_iterable(chain((numbers[(first + 1) & SEQUENCE_MASK :],), repeat(numbers))),
            strict=False,
        )
        self.record: Record = _record_function(self)

    def refused(self, at: int, number: int, tag: int, start_ns: int, end_ns: int, elements: int) -> bool:
        """Write a record that `pack_record` refused. Returns whether its elements were a count.

        For the first record of a lap, moves the cursor. Elements that are not a count are marked as unknown.
        """
        if at == LAP_DUE:
            self._words[CURSOR_WORD] = next(self._laps)
            at = FIRST_RECORD
        count = -1
        try:
            count = operator.index(elements)
        except Exception as error:  # noqa: BLE001 - converting an object of the host may raise any error
            reraise_host_error(error)
        finally:
            # Write the record even if KeyboardInterrupt came during the conversion. The host gets the exception
            # afterwards.
            known = 0 <= count < 1 << 63
            if not known:
                count, tag = 0, tag | FLAG_UNCOUNTED
            try:
                pack_record(self.memory, at, start_ns, end_ns, count, tag, number)
            except (struct.error, TypeError, OverflowError):
                # The host's clock returned a value that is not a 64-bit integer, so the times become 0.
                pack_record(self.memory, at, 0, 0, 0, NO_NODE, number)
        return known

    def set_left_out(self, count: int) -> None:
        """Publish the number of announcements that have been left out."""
        self._words[LEFT_OUT_WORD] = count

    @property
    def asked(self) -> int:
        """The word with a command's request to this process, see `cbtop.protocol.requests`. 0 means none."""
        return self.asked_word[0]

    def answer(self, word: int) -> None:
        """Publish the answer to the request in `asked`, in the header of the ring."""
        self._words[ANSWER_WORD] = word

    def close(self) -> None:
        """Mark the ring as closed, and release the space that was never written.

        The memory stays mapped while a thread holds `record`, because it may still be writing. Then the mapping and
        its descriptor are freed at once: a process that never collects garbage may be attached many times.
        """
        self.record = _no_record
        self._words[CLOSED_WORD] = 1
        begun = max(self._words[CURSOR_WORD], next(self.reserve)[1] - 1)
        used_bytes = FIRST_RECORD + (begun + MAX_WRITERS_INSIDE) * RECORD_BYTES
        used_bytes += -used_bytes % mmap.PAGESIZE
        if used_bytes < len(self._memory) and hasattr(mmap, "MADV_REMOVE"):  # available on Linux
            with suppressed(OSError):  # a file system without holes keeps the space allocated
                self._memory.madvise(mmap.MADV_REMOVE, used_bytes, len(self._memory) - used_bytes)


def _no_record(tag: int, start_ns: int, end_ns: int, elements: int) -> None:
    """Write nothing, because the ring is closed."""


def _record_function(ring: RingWriter) -> Record:
    """Return the ring's `record` as a closure. It is fast because it uses only local and closure variables."""
    memory, reserve, pack_into = ring.memory, ring.reserve, pack_record

    def record(tag: int, start_ns: int, end_ns: int, elements: int) -> None:
        at, number = next(reserve)
        try:
            pack_into(memory, at, start_ns, end_ns, elements, tag, number)
        except BaseException as error:
            ring.refused(at, number, tag, start_ns, end_ns, elements)
            if not is_ours(error):  # A signal handler of the host raised this error, so it must not be suppressed.
                raise

    return record


def _allocate(descriptor: int, size_bytes: int) -> None:
    """Allocate the whole file. Raises OSError if the disk is full or the file's size exceeds the limit."""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Writing beyond the limit for the size of files would send SIGXFSZ, which may end the process.
    if most != resource.RLIM_INFINITY and size_bytes > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    # posix_fallocate is missing on macOS, and some file systems do not support it.
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
    """Map every page for writing. This takes 7 ms for 8 MiB on ext4 and 2 ms on a tmpfs.

    Otherwise, a step would wait for the kernel whenever it reached a new page of the ring. In a decode of 3 ms, this
    took 0.9 % of the time.
    """
    if sys.platform == "linux":
        # Linux before 5.14 does not have this call. There, a page is mapped when it is first written.
        with suppressed(OSError):
            memory.madvise(MADV_POPULATE_WRITE)
