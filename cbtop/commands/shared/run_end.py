"""A process that waits for the end of a run. It prints a summary, and measures the roofs (speed limits of the
hardware) that the run does not know.

It is a fork of `cbtop run`. The program may run for days, so it loads no module until a step is recorded.
"""

from __future__ import annotations

import os
import select
import time

from cbtop.protocol.process import busiest_wait_ns, is_running, process_start, processor_times
from cbtop.protocol.signals import suppressed

# Only type checkers treat `TYPE_CHECKING` as true. Importing the real constant from `typing` takes longer than
# starting Python.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cbtop.commands.shared.missing_roofs import MissingRoofs

STDERR = 2
# Interval in ms between two checks whether the command still runs. It is used only if the kernel has no pidfd_open.
POLL_MS = 250
LOOK_MS = 1000  # interval in ms at which the processes' waiting time for a processor is read
LATEST = 10  # At most this many readings of the waiting time are stored for each process.
MAX_LOOKED_AT = 8  # Read the waiting times of at most this many processes.
# Niceness of the process that prints the summary. The user's program has a more urgent need for the processors.
LESS_URGENT = 19
MAX_PROCESSES = 4096
END = b"end"


def summarize_at_end(
    fifo: int, pidfd: int | None, path: str, pid: int, next_command: str, held: int | None = None
) -> None:
    """Print a summary when process `pid` ends, or when it announces its end through `fifo`.

    `pidfd` becomes readable when the process ends. `pidfd` is None if the kernel has no such descriptors. `path` is
    the path of the FIFO. `next_command` is printed as the last line of the summary. The descriptor `held` is closed
    when the summary is printed.
    """
    _close_all_but({fifo, pidfd, held})
    try:
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # Without this limit, numpy starts one thread per processor.
        os.nice(LESS_URGENT)
        watched = _Watched(os.path.dirname(path))
        pids = list(_recording_pids(fifo, pidfd, pid, watched))
        if pids:
            from cbtop.commands.shared.run_summary import run_summary

            watched.begin()
            watched.look(pids)
            line = watched.roofs.line() if watched.roofs is not None else ""
            lines = run_summary(os.path.dirname(path), pid, pids, next_command, watched.waits.percents(), line)
            _write("".join(f"cbtop: {line}\n" for line in lines))
    finally:
        with suppressed(OSError):  # If this run was killed, a later run may have removed the FIFO.
            os.unlink(path)
        if held is not None:
            os.close(held)
    if watched.roofs is not None:
        os.close(fifo)  # `cbtop run` waits until this FIFO is closed. Close it now, because the summary is printed.
        with open(os.devnull, "r+b", buffering=0) as nothing:
            # Readers of the command's stderr would wait until this process ends, so close our copy.
            os.dup2(nothing.fileno(), STDERR)
        watched.roofs.measure_after()


class _Watched:
    """What is known of a run's processes that record steps, updated once a second."""

    def __init__(self, directory: str) -> None:
        self.waits = _Waits()
        # The roofs (speed limits of the hardware) that the run does not know. None until the first step is recorded,
        # because the module for roofs loads slowly.
        self.roofs: MissingRoofs | None = None
        self._directory = directory

    def begin(self) -> None:
        """Load the modules for the summary in advance. This takes half a second, too long for the end of the run."""
        if self.roofs is None:
            import cbtop.commands.shared.run_summary  # noqa: F401
            from cbtop.commands.shared.missing_roofs import MissingRoofs

            self.roofs = MissingRoofs(self._directory)

    def look(self, pids: Iterable[int]) -> None:
        """Store the time that each of the processes `pids` has waited for a processor since the last call.

        If the machine is quiet, start measuring the roofs that the run does not know.
        """
        self.waits.look(pids)
        if self.roofs is not None:
            self.roofs.look(pids)


class _Waits:
    """for each recording process: the waiting time of its busiest thread in each of the last seconds, in percent"""

    def __init__(self) -> None:
        # process -> time of its last reading, and its threads' processor times at that time
        self._times: dict[int, tuple[float, dict[str, tuple[int, int]]]] = {}
        self._percents: dict[int, list[float]] = {}

    def look(self, pids: Iterable[int]) -> None:
        """Read the waiting times of the first MAX_LOOKED_AT processes. Store how long each process has waited for a
        processor since the last call.
        """
        for pid in list(pids)[:MAX_LOOKED_AT]:
            now_s, times = time.monotonic(), processor_times(pid)
            before_s, before = self._times.get(pid, (now_s, {}))
            if now_s - before_s < LOOK_MS / 2000 and before:
                continue
            self._times[pid] = now_s, times
            waited_ns = busiest_wait_ns(before, times)
            if waited_ns is not None and now_s > before_s:
                percents = self._percents.setdefault(pid, [])
                percents.append(max(0.0, min(100.0, waited_ns / 1e7 / (now_s - before_s))))
                del percents[:-LATEST]

    def percents(self) -> dict[int, float]:
        """Return the mean waiting time of each process over its last seconds, in percent of those seconds."""
        return {pid: sum(of) / len(of) for pid, of in self._percents.items()}


def _recording_pids(fifo: int, pidfd: int | None, command_pid: int, watched: _Watched) -> Iterator[int]:
    """Yield the ids of the processes that record steps, in the order of their first steps, until the command ends."""
    start, timeout = process_start(command_pid) or 0, POLL_MS if pidfd is None else None
    poll = select.poll()
    poll.register(fifo, select.POLLIN)
    if pidfd is not None:
        poll.register(pidfd, select.POLLIN)
    seen: set[int] = set()
    while True:
        events = poll.poll(LOOK_MS if seen and timeout is None else timeout)
        watched.look(seen)
        # Check whether the process has ended before reading the FIFO. So the FIFO has everything that it wrote.
        is_over = any(descriptor != fifo for descriptor, _ in events)
        is_over = is_over or (timeout is not None and not is_running(command_pid, start))
        for line in _lines(fifo):
            if line == END:
                is_over = True
            elif line.isdigit() and int(line) not in seen and len(seen) < MAX_PROCESSES:
                seen.add(int(line))
                yield int(line)
        if is_over:
            return
        if seen:
            watched.begin()


def _lines(fifo: int) -> list[bytes]:
    """Return all lines that are in the FIFO. Each line was written in one piece."""
    data = b""
    with suppressed(BlockingIOError):
        while piece := os.read(fifo, 1 << 16):
            data += piece
    return data.split()


def _close_all_but(kept: set[int | None]) -> None:
    """Close all descriptors above stderr except `kept`. Otherwise, readers of a pipe would wait for this process."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > STDERR and int(name) not in kept:
            # One descriptor in the list was used to read the list, and it is already closed.
            with suppressed(OSError):
                os.close(int(name))


def _write(text: str) -> None:
    """Write all of `text` to stderr, unless stderr is closed. Also works if stderr is full or non-blocking."""
    data = text.encode(errors="replace")
    with suppressed(OSError):
        while data:
            try:
                data = data[os.write(STDERR, data) :]
            except BlockingIOError:
                select.select([], [STDERR], [])
