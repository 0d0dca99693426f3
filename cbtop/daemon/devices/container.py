"""Reads the limits of the container (control group) around a process, and how often it is throttled.

Both versions of control groups are read: cgroups(7), and the kernel's pages on cgroup-v1 and cgroup-v2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

NO_LIMIT_BYTES = 1 << 60  # without a limit, version 1 gives the largest number of pages
MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """The tightest limits around a process. None: it is not limited.

    `throttling` has, for each control group with a limit of processor time, its path, the number of the scheduler's
    periods, and the number of periods without processor time left.
    """

    cpu_percent: float | None = None  # 100 is one whole processor
    memory_bytes: float | None = None
    throttling: tuple[tuple[str, int, int], ...] = ()


class Containers:
    """Finds the limits of processes. Each control group is read once between two calls of `begin`."""

    def __init__(self, processes: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> None:
        self._processes = processes
        self._groups = groups
        self._known: dict[bytes, ContainerLimits] = {}

    def begin(self) -> None:
        """Begin a new sample: read each control group again."""
        self._known.clear()

    def limits(self, pid: int) -> ContainerLimits:
        """Return the limits of the control groups around a process."""
        said = self._said(str(pid))
        if said not in self._known:
            self._known[said] = self._read(_paths(said))
        return self._known[said]

    def _said(self, pid: str) -> bytes:
        try:
            return (self._processes / pid / "cgroup").read_bytes()
        except OSError:
            return b""  # the process has ended, or this system has no control groups

    def _read(self, paths: dict[str, str]) -> ContainerLimits:
        own = _paths(self._said("self"))
        cpu = {
            group: percent
            for group in self._around(paths, own, "cpu")
            if (percent := _percent(group)) is not None
        }  # fmt: skip
        memory = [size for group in self._around(paths, own, "memory") if (size := _memory_bytes(group)) is not None]
        throttling = tuple((str(group), *_throttling(group)) for group in cpu)
        return ContainerLimits(min(cpu.values(), default=None), min(memory, default=None), throttling)

    def _around(self, paths: dict[str, str], own: dict[str, str], controller: str) -> Iterator[Path]:
        """Yield the directories of the control groups around a process, from the inside out.

        In a container, the path may begin outside of what is mounted there. The root of the mount is then the group
        of that container. It is around the processes in the `own` group of this process, and around no others.
        """
        if not paths:
            return
        has_version_1 = controller in paths and (self._groups / controller).is_dir()
        root = self._groups / controller if has_version_1 else self._groups
        key = controller if has_version_1 else ""
        path, here = PurePosixPath(paths.get(key, "/")), PurePosixPath(own.get(key, "/"))
        if ".." in path.parts:
            return  # a different container
        is_inside = (root / path.relative_to("/")).is_dir() or here in (path, *path.parents)
        for inner in (path, *path.parents)[:MAX_DEPTH]:
            if is_inside or inner.name:
                yield root / inner.relative_to("/")


def _paths(said: bytes) -> dict[str, str]:
    """Return the path of the control group of each controller, from the content of /proc/PID/cgroup."""
    paths: dict[str, str] = {}
    for line in said.decode("utf-8", "replace").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def _percent(group: Path) -> float | None:
    """Return the limit of processor time, in percent of one processor."""
    limit = _words(group / "cpu.max")  # version 2: quota and period, or `max` and period
    if not limit:
        limit = [*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us")]
    if len(limit) != 2 or not all(word.isdecimal() for word in limit) or int(limit[1]) == 0:
        return None  # `max` or -1: no limit
    return 100 * int(limit[0]) / int(limit[1])


def _throttling(group: Path) -> tuple[int, int]:
    words = _words(group / "cpu.stat")
    counts = dict(zip(words[::2], words[1::2], strict=False))
    return int(counts.get("nr_periods", 0)), int(counts.get("nr_throttled", 0))


def _memory_bytes(group: Path) -> float | None:
    limit = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
    if len(limit) != 1 or not limit[0].isdecimal():
        return None
    return float(limit[0]) if int(limit[0]) < NO_LIMIT_BYTES else None


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").split()
    except OSError:
        return []  # the control group does not have this file, or is outside of what is mounted here
