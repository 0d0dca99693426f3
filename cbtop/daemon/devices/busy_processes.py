"""Finds the processes that take the host's processors, whether they are profiled or not."""

# Rules
# - Reading one process takes about 15 µs of processor time, so a scan of 500 takes 7 ms (2 cores, Zen 5). The next
#   scan comes no sooner than SCAN_PAUSES times this time later. So scanning takes at most half a percent of one
#   processor, however many processes there are. Until then, the last result is repeated.
# - Only /proc/PID/stat is read, and the command line of processes that are shown.

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from cbtop.daemon.devices.base import MAX_APART_NS
from cbtop.protocol.device_messages import DeviceProcess

SCAN_PAUSES = 200
MAX_BUSY = 10
LEAST_PERCENT = 1.0  # of one processor
# Places in /proc/PID/stat after the name in parentheses, see proc(5)
STATE, USER_TICKS, SYSTEM_TICKS, START, RESIDENT_PAGES = 0, 11, 12, 19, 21
STAT_BYTES = 1024
PYTHONS = ("python", "pypy")
VALUED = ("--check-hash-based-pycs",)  # long options with a value in the next word


class BusyProcesses:
    """The processes with the most processor time since the previous scan of `directory` (/proc)."""

    def __init__(
        self,
        directory: Path = Path("/proc"),
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        cost_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._directory = str(directory)
        self._clock_ns = clock_ns
        self._cost_ns = cost_ns
        self._tick_ns = 10**9 // os.sysconf("SC_CLK_TCK")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._read_ns = 0  # time of the previous scan
        self._next_ns = 1
        self._ticks: dict[tuple[int, int], int] = {}  # (pid, start time) -> processor time at the previous scan
        self._busiest: tuple[DeviceProcess, ...] = ()

    def busiest(self) -> tuple[DeviceProcess, ...]:
        """Return at most MAX_BUSY processes, the busiest first. Scans again if enough time has passed."""
        now_ns = self._clock_ns()
        if now_ns >= self._next_ns:
            begun_ns = self._cost_ns()
            self._busiest = tuple(self._scanned(now_ns))
            self._next_ns = now_ns + 1 + SCAN_PAUSES * (self._cost_ns() - begun_ns)
        return self._busiest

    def _scanned(self, now_ns: int) -> Iterator[DeviceProcess]:
        before, passed_ns = self._ticks, now_ns - self._read_ns
        self._ticks, self._read_ns = {}, now_ns
        grown: list[tuple[int, int, int, bytes]] = []
        for pid, stat in self._stats():
            fields = stat[stat.rindex(b")") + 2 :].split(None, RESIDENT_PAGES + 1)
            ticks = int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])
            key = pid, int(fields[START])
            self._ticks[key] = ticks
            if ticks > before.get(key, ticks):
                grown.append((ticks - before[key], pid, int(fields[RESIDENT_PAGES]), stat))
        if not 0 < passed_ns <= MAX_APART_NS + SCAN_PAUSES * 10**7:
            return
        for ticks, pid, pages, stat in sorted(grown, reverse=True)[:MAX_BUSY]:
            percent = 100 * ticks * self._tick_ns / passed_ns
            if percent >= LEAST_PERCENT:
                start = int(stat[stat.rindex(b")") + 2 :].split(None, START + 1)[START])
                yield DeviceProcess(pid, start, self._name(pid, stat), float(pages * self._page_bytes), percent)

    def _stats(self) -> Iterator[tuple[int, bytes]]:
        """Yield the pid and the content of the file `stat` of each running process."""
        try:
            names = os.listdir(self._directory)
        except OSError:
            return  # this system has no /proc
        for name in names:
            if not name.isdecimal():
                continue
            # The process may have ended, or belong to another user and be hidden.
            with suppress(OSError):
                file = os.open(f"{self._directory}/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    yield int(name), os.read(file, STAT_BYTES)
                finally:
                    os.close(file)

    def _name(self, pid: int, stat: bytes) -> str:
        """Return the name of a process. For Python, it is followed by the name of the script or module."""
        name = stat[stat.index(b"(") + 1 : stat.rindex(b")")].decode("utf-8", "replace")
        words: list[str] = []
        if name.startswith(PYTHONS):
            with suppress(OSError):
                given = Path(f"{self._directory}/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
                words = given.split("\0")[1:]
        return with_script(name, words)


def with_script(name: str, arguments: Sequence[str]) -> str:
    """Return the name of a process. For Python, it is followed by the name of the script or module."""
    script = _script(arguments) if name.startswith(PYTHONS) else ""
    return f"{name} {script}" if script else name


def _script(words: Sequence[str]) -> str:
    """Return the script or `-m module` in the arguments of Python. "" if its program is a text, or typed in."""
    rest = iter(words)
    for word in rest:
        if word in VALUED:
            next(rest, "")
        elif not word.startswith("-"):
            return os.path.basename(word)
        elif word == "-":
            return ""
        elif not word.startswith("--"):
            # Letters in one word are options, of which the first of these four ends the word: `-um module`.
            at, letter = next(((at, letter) for at, letter in enumerate(word) if letter in "cmWX"), (0, ""))
            value = word[at + 1 :]
            if letter == "c":
                return ""
            if letter == "m":
                module = value or next(rest, "")
                return f"-m {module}" if module else ""
            if letter and not value:
                next(rest, "")
    return ""
