"""Memory: how much of it this process may still take, a piece of it on huge pages, and pages of code given back."""

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
    """Where a version of control groups is mounted, and what it calls the files and the counters that are asked."""

    mounted: str
    limit: str
    used: str
    files: tuple[str, str]  # in memory.stat: pages of files, which count as used and are given back where it is tight


_ONE = _Version(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_TWO = _Version("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes(root: Path = Path("/")) -> int | None:
    """What the system (MemAvailable) and every control group around this process leave it; None where none says so.

    Linux, control groups of both versions, of those that can be seen from here. `root` is where their files lie.
    """
    left = [*_of_the_system(root), *_of_groups(root)]
    return max(min(left), 0) if left else None


def on_huge_pages(size_bytes: int) -> mmap.mmap:
    """Memory of this process alone, zeros, on huge pages where the system has some. OSError where it gives none."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that was built without
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def zeros_on_huge_pages(shapes: Sequence[tuple[int, ...]], dtype: Any) -> list[NDArray[Any]]:
    """Arrays of zeros side by side on huge pages, each from where a line of the cache begins. They take memory where
    they are written to. MemoryError where the system does not give it.
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
    """As `np.zeros`, from where a line of the cache begins, or so many bytes behind it.

    NumPy's large arrays begin 16 bytes behind one: of vectors of 64 bytes each is in two lines then. Its small ones
    begin anywhere.
    """
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size_bytes + 2 * LINE_BYTES, np.uint8)
    begin = -memory.ctypes.data % LINE_BYTES + behind_bytes
    zeros: NDArray[Any] = memory[begin : begin + size_bytes].view(dtype).reshape(shape)
    return zeros


def give_back_code(library: str) -> None:
    """Map no more what this process has run of the shared library with this file name; Linux, elsewhere nothing.

    The pages are those of the file and stay in the system's cache: what is run again is mapped again, 64 KiB in a
    microsecond.
    """
    for begin, size_bytes in _code_of(library):
        _madvise()(ctypes.c_void_p(begin), ctypes.c_size_t(size_bytes), mmap.MADV_DONTNEED)


@cache
def _code_of(library: str) -> tuple[tuple[int, int], ...]:
    """Where its code lies, (address, bytes): what may be run and not written, which so is as it is in the file."""
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
        for one in (group, *group.parents):  # a container sees its own as the root, whatever is said
            yield from _of_group(root / version.mounted / one.relative_to("/"), version)


def _of_group(group: Path, version: _Version) -> Iterator[int]:
    limit, used = _lines(group / version.limit), _lines(group / version.used)
    if limit and used and limit[0] != "max":
        counted = dict(line.split() for line in _lines(group / "memory.stat"))
        yield int(limit[0]) - int(used[0]) + sum(int(counted.get(name, 0)) for name in version.files)


def _lines(path: Path) -> list[str]:
    """None where it is not there, or not to be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
