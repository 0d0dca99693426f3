"""Measure how much memory this process may still use, allocate memory on huge pages, and unmap code that is not
needed.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Version:
    """A version of Linux's control groups: its mount point, and its names of files and counters."""

    mounted: str
    limit: str
    used: str
    # Names of counters in memory.stat for pages of files. A control group counts these pages as used. The system
    # nevertheless frees them when memory is short.
    files: tuple[str, str]


_ONE = _Version(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_TWO = _Version("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that this process may still use, or None if unknown.

    The result is the smallest of several amounts: the system's available memory (MemAvailable), and what each control
    group of this process leaves. Works on Linux, with both versions of control groups, if they are visible. `root` is
    the root of the file system.
    """
    left = [*_of_the_system(root), *_of_groups(root)]
    return max(min(left), 0) if left else None


def on_huge_pages(size_bytes: int) -> mmap.mmap:
    """Return private memory filled with zeros, on huge pages if the system has them.

    Raises OSError if there is not enough memory.
    """
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # this system has no huge pages, so use small ones
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def zeros_on_huge_pages(shapes: Sequence[tuple[int, ...]], dtype: Any) -> list[NDArray[Any]]:
    """Return adjacent arrays of zeros on huge pages. Each array begins at a cache line.

    Memory is used only when it is first written to. Raises MemoryError if the system refuses the memory.
    """
    sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape in shapes]
    begins = list(accumulate((-(-size // LINE_BYTES) * LINE_BYTES for size in sizes), initial=0))
    try:
        memory = np.frombuffer(on_huge_pages(max(begins[-1], 1)), np.uint8)
    except OSError as error:
        raise MemoryError(f"{begins[-1]:,} bytes") from error
    return [
        memory[begin : begin + size].view(dtype).reshape(shape)
        for shape, begin, size in zip(shapes, begins, sizes, strict=False)
    ]


def line_aligned_zeros(shape: tuple[int, ...], dtype: Any, behind_bytes: int = 0) -> NDArray[Any]:
    """Return an array of zeros that begins `behind_bytes` after the start of a cache line.

    NumPy's large arrays begin 16 bytes after the start of a line, so each vector of 64 bytes is in two lines. NumPy's
    small arrays begin anywhere.
    """
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size_bytes + 2 * LINE_BYTES, np.uint8)
    begin = -memory.ctypes.data % LINE_BYTES + behind_bytes
    zeros: NDArray[Any] = memory[begin : begin + size_bytes].view(dtype).reshape(shape)
    return zeros


def give_back_code(library: str) -> None:
    """Unmap the code of the shared library with this file name. Linux only.

    The code stays in the system's file cache. If the code runs again, the system maps it again, at 64 KiB per
    microsecond.
    """
    for begin, size_bytes in _code_of(library):
        _madvise()(ctypes.c_void_p(begin), ctypes.c_size_t(size_bytes), mmap.MADV_DONTNEED)


@cache
def _code_of(library: str) -> tuple[tuple[int, int], ...]:
    """Return the (address, bytes) of each mapping of the library's code.

    Writable mappings are left out, because their content may differ from the file.
    """
    found = []
    for line in _lines(Path("/proc/self/maps")):
        place, permissions, _, _, _, *path = line.split(maxsplit=5)
        if permissions == "r-xp" and path and PurePosixPath(path[0]).name == library:
            begin, end = (int(address, 16) for address in place.split("-"))
            found.append((begin, end - begin))
    return tuple(found)


@cache
def _madvise() -> Any:
    return ctypes.CDLL(None).madvise


def _of_the_system(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) << 10


def _of_groups(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _ONE if controllers else _TWO
        group = PurePosixPath(path)
        for one in (group, *group.parents):
            # In a container, the group of this process may be mounted as the root, so try all parents of `path`.
            yield from _of_group(root / version.mounted / one.relative_to("/"), version)


def _of_group(group: Path, version: _Version) -> Iterator[int]:
    limit, used = _lines(group / version.limit), _lines(group / version.used)
    if limit and used and limit[0] != "max":
        counted = dict(line.split() for line in _lines(group / "memory.stat"))
        yield int(limit[0]) - int(used[0]) + sum(int(counted.get(name, 0)) for name in version.files)


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; [] if it is missing or cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
