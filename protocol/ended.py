"""The files of ended processes in a runtime directory: whether a process has ended, and which files are kept.

Whether a process runs
- A process runs while it holds the lock on its catalog.
- Without a lock (the system has none, or the process closed all its files), it runs while a process with the same pid
  and start time has the ring mapped. Start times from a different time namespace are not compared.
- A closed ring belongs to no process, even if its process still runs.

Which files are kept
- The age of an ended process is the time since its newest record, or since the last change of its files, whichever is
  later. The times of the files are not enough, because writing through a mapping does not update them on tmpfs. Times
  in the future are ignored.
- The files of at most MAX_ENDED ended processes are kept. Together they take at most MAX_ENDED_BYTES, and at most a
  quarter of the file system. Beyond these limits, the oldest files are deleted, but never the newest. A starting host
  deletes them (`sweep`), and so does a daemon.
- Only regular files of this user are removed, and only files with these names.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cbtop.protocol import clock
from cbtop.protocol.catalog import is_locked
from cbtop.protocol.errors import RingError
from cbtop.protocol.process import boot_id, has_mapped, is_running
from cbtop.protocol.ring_reader import RingReader
from cbtop.protocol.signals import reraise_host_error, suppressed

MAX_ENDED = 256  # limit for the ended processes whose files are kept
MAX_ENDED_BYTES = 512 << 20
LARGEST_SHARE = 4  # the files take at most 1 / LARGEST_SHARE of the file system
# If a limit is exceeded, more files are deleted than needed, until 1 / SPARE of the limit is free. So not every start
# has to delete files.
SPARE = 4
BEGINS_WITHIN_S = 600.0  # a process that has no ring after this time in seconds will not create a ring
SWEPT_NAMES = 1024  # number of file names that a starting host looks at
# A sweep removes the files of at most this many processes. A host sweeps once for every SWEPT_AT_ONCE rings that it
# opens.
SWEPT_AT_ONCE = 16
SUFFIXES = (".ring", ".catalog", ".new")
# Group 1 of the pattern has the pid, the process start and the serial number. Group 2 has the suffix of the file
# name.
_FILE_NAME = re.compile(r"([0-9]{1,20}-[0-9]{1,20}-[0-9]{1,20})\.(ring|catalog|new)")


@dataclass(frozen=True, slots=True)
class EndedProcess:
    """The files of one ended process. `ring_path` is the path of its ring, even if the ring does not exist."""

    ring_path: Path
    last_sign_s: float  # Unix time of the newest record or of the last change to a file, whichever is later
    size_bytes: int
    has_ring: bool = True  # False if the process recorded nothing; the next sweep then removes its files

    def remove(self) -> None:
        """Delete the files. Raises OSError."""
        for suffix in SUFFIXES:
            self.ring_path.with_suffix(suffix).unlink(missing_ok=True)


def rings_of(names: Iterable[str]) -> set[str]:
    """Return the names of the rings that these file names belong to. The rings need not exist."""
    return {f"{found[1]}.ring" for name in names if (found := _FILE_NAME.fullmatch(name))}


def rings_of_latest(names: Iterable[str], pid: int) -> list[str]:
    """Return the names of the rings of the latest process with this pid. Rings of ended processes stay for hours."""
    starts: dict[int, list[str]] = {}
    for ring in rings_of(names):
        of_pid, start, _serial = ring.removesuffix(".ring").split("-")
        if int(of_pid) == pid:
            starts.setdefault(int(start), []).append(ring)
    return starts[max(starts)] if starts else []


def ring_of(key: str) -> str:
    """Return the name of the ring of the source with the key `host:pid:start:serial`.

    The host is not part of the name.
    """
    return f"{'-'.join(key.rsplit(':', 3)[1:])}.ring"


def runs(ring_path: Path) -> bool:
    """Whether the process of this ring still writes it, or is about to create it. True if unknown."""
    pid, start, _serial = (int(part) for part in ring_path.stem.split("-"))
    catalog = ring_path.with_suffix(".catalog")
    try:
        if not ring_path.exists() and _is_young(ring_path):
            # A new process may be about to lock its catalog. Testing the lock now could make the process fail to
            # lock.
            return True
        if not is_running(pid, start):
            # The process may run in a different pid namespace. Its pid then cannot be found. So test the lock.
            return is_locked(catalog)
        return not _is_closed(ring_path) and (is_locked(catalog) or has_mapped(pid, ring_path))
    except OSError as error:  # this process cannot open the files of the ring, because it has no descriptor left
        reraise_host_error(error)
        return True


def left_by(ring_path: Path) -> EndedProcess | None:
    """Return the files of this ring's process, or None if they belong to another user or are not regular files."""
    now_s, size_bytes, signs_s = clock.time(), 0, []
    for suffix in SUFFIXES:
        try:
            status = os.lstat(ring_path.with_suffix(suffix))
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return None
        size_bytes += 512 * status.st_blocks
        signs_s.append(status.st_mtime)
    # A file that is not a ring has no records, so the times of the files give the age.
    with suppressed(RingError):
        signs_s.append(_newest_record_s(ring_path, now_s))
    last_sign_s = max((sign_s for sign_s in signs_s if sign_s <= now_s), default=0.0)
    return EndedProcess(ring_path, last_sign_s, size_bytes, ring_path.exists())


def beyond_bounds(left: Collection[EndedProcess], directory: Path) -> list[EndedProcess]:
    """Return the processes whose files must go, oldest first. Returns [] if the files are within the limits."""
    count, size_bytes = sum(each.has_ring for each in left), sum(each.size_bytes for each in left)
    most_bytes = _most_bytes(directory)
    if count <= MAX_ENDED and size_bytes <= most_bytes:
        return []
    going = []
    for each in sorted(left, key=lambda each: each.last_sign_s)[:-1]:
        if count <= MAX_ENDED - MAX_ENDED // SPARE and size_bytes <= most_bytes - most_bytes // SPARE:
            break
        going.append(each)
        count, size_bytes = count - each.has_ring, size_bytes - each.size_bytes
    return going


def sweep(directory: Path) -> int:
    """Remove the files of ended processes that exceed the limits. Returns the number of processes with removed files.

    A host calls this function at its start. With few files the call is fast, because it only lists names and reads
    sizes. Raises OSError.
    """
    with os.scandir(directory) as entries:
        rings = [directory / name for name in rings_of(entry.name for entry in islice(entries, SWEPT_NAMES))]
    if len(rings) <= MAX_ENDED and sum(_size_bytes(ring) for ring in rings) <= _most_bytes(directory):
        return 0
    ended = [each for ring in rings if not runs(ring) and (each := left_by(ring))]
    going = [each for each in ended if not each.has_ring]
    going += beyond_bounds([each for each in ended if each.has_ring], directory)
    going = going[:SWEPT_AT_ONCE]
    for each in going:
        each.remove()
    return len(going)


def _most_bytes(directory: Path) -> int:
    disk = os.statvfs(directory)
    return min(MAX_ENDED_BYTES, disk.f_blocks * disk.f_frsize // LARGEST_SHARE)


def _size_bytes(ring_path: Path) -> int:
    try:
        return 512 * os.lstat(ring_path).st_blocks
    except FileNotFoundError:
        return 0


def _is_young(ring_path: Path) -> bool:
    """Whether the process of this ring has just created its first file, so that its ring may not be finished yet."""
    before = (path for path in (ring_path.with_suffix(".catalog"), ring_path.with_suffix(".new")) if path.exists())
    return any(abs(clock.time() - os.lstat(path).st_mtime) < BEGINS_WITHIN_S for path in before)


def _is_closed(ring_path: Path) -> bool:
    try:
        reader = RingReader(ring_path)
    except RingError as error:
        reraise_host_error(error)
        return False  # unknown, because the file is not a ring of this version
    try:
        return reader.is_closed
    finally:
        reader.close()


def _newest_record_s(ring_path: Path, now_s: float) -> float:
    """Return the Unix time when the ring's newest record ended, or 0 if the ring has no records.

    Raises RingError if the file is not a ring.
    """
    reader = RingReader(ring_path)
    try:
        end_ns = reader.newest_end_ns()
        if end_ns is None:
            return 0.0
        # The ring was written after this machine booted. So use the monotonic clock, because this clock cannot be
        # set.
        if reader.boot_id == boot_id():
            return now_s - (clock.perf_counter_ns() - end_ns) / 1e9
        return (reader.realtime_ns + end_ns - reader.monotonic_ns) / 1e9
    finally:
        reader.close()
