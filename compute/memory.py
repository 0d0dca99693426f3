"""Memory: how much of it this process may still take, and a piece of it on huge pages."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


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
