"""Run several processes (ranks) that decode one model.

All ranks start together, compute the same steps, and end together.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import IO

from cbtop.compute.errors import ComputeError
from cbtop.errors import CbtopError
from cbtop.protocol.ranks import JOB_VARIABLE, ranks_of

PIPES_VARIABLE = "CBTOP_RANK_PIPES"
POLL_S = 0.02
# Seconds to wait for the end of the running step, and then for the end of each process. `cbtop demo` waits five
# seconds for both waits together.
STOP_S = 2.0
# Seconds to wait for the other ranks after the first one has ended. A driver needs time to free GPU memory.
ENDING_S = 15.0
SIZE_BYTES = 4


def job_of(pid: int) -> str:
    """Return the job name that all ranks of the parent process `pid` share."""
    return f"cbtop-{pid}"


class FirstRank:
    """Sends data from the first rank to all other ranks. The pipes between them were made by the parent process of
    all ranks.
    """

    def __init__(self, number: int, count: int, pipes: Sequence[int]) -> None:
        """Store this rank's descriptors of the pipes. The first rank has a pipe to each other rank, and these only
        have the pipe from the first.
        """
        self.number, self.count = number, count
        self._pipes = pipes

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> FirstRank | None:
        """Return the pipes that `run_ranks` has made for this process. Return None if this process is not one of its
        ranks.
        """
        pipes, ranks = environment.get(PIPES_VARIABLE), ranks_of(environment)
        if pipes is None or ranks.rank is None or ranks.world_size is None:
            return None
        return cls(ranks.rank, ranks.world_size, [int(pipe) for pipe in pipes.split(",")])

    def said(self, make: Callable[[], bytes]) -> bytes:
        """Call `make` in the first rank only, and return its value in every rank.

        Raises ComputeError if another rank has ended.
        """
        try:
            if self.number:
                size = int.from_bytes(self._read(SIZE_BYTES), "big")
                return self._read(size)
            made = make()
            for pipe in self._pipes:
                # The data is shorter than PIPE_BUF, so the kernel writes all of it in one piece.
                os.write(pipe, len(made).to_bytes(SIZE_BYTES, "big") + made)
        except (BrokenPipeError, EOFError):
            # Another rank has ended. The parent process ends this one during the sleep, because only the parent can
            # report the reason.
            time.sleep(2 * STOP_S)
            raise ComputeError("another rank has ended") from None
        return made

    def _read(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            more = os.read(self._pipes[0], size - len(found))
            if not more:
                raise EOFError
            found += more
        return found


def run_ranks(count: int, command: Sequence[str], is_stopped: Callable[[], bool]) -> None:
    """Run `command` as `count` ranks until they end. The output of the first rank is printed.

    When `is_stopped` returns true, the first rank gets SIGTERM and stops the others. If a rank fails or is killed,
    all others are ended. CbtopError then has the failed rank's exit code and last message.
    """
    with ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(count)]
        processes = _started(count, command, said)
        stack.callback(_end, processes)
        until_s = math.inf
        codes = [process.poll() for process in processes]
        while None in codes and not any(codes) and time.monotonic() < until_s:
            if until_s == math.inf and is_stopped():
                processes[0].terminate()
                until_s = time.monotonic() + STOP_S
            elif until_s == math.inf and 0 in codes:  # One rank has ended normally, so all other ranks must end soon.
                until_s = time.monotonic() + ENDING_S
            time.sleep(POLL_S)
            codes = [process.poll() for process in processes]
        if not is_stopped() and (number := _failed(codes)) is not None:
            raise _error(number, codes[number], said[number])


def _started(count: int, command: Sequence[str], said: Sequence[IO[str]]) -> list[subprocess.Popen[bytes]]:
    pipes = [os.pipe() for _ in range(count - 1)]
    ends = [[to for _, to in pipes], *([source] for source, _ in pipes)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, own in enumerate(ends):
            ranks = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count)}
            ours = {JOB_VARIABLE: job_of(os.getpid()), PIPES_VARIABLE: ",".join(map(str, own))}
            processes.append(
                subprocess.Popen(
                    command, env=os.environ | ranks | ours, pass_fds=own, stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL if number else None, stderr=said[number],
                )
            )  # fmt: skip
    except BaseException:
        _end(processes)
        raise
    finally:
        for pipe in pipes:
            for end in pipe:
                os.close(end)
    return processes


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End all ranks that still run. A rank that waits on a device for another ignores SIGTERM, so it is killed."""
    for process in processes:
        process.terminate()
    until_s = time.monotonic() + STOP_S
    for process in processes:
        try:
            process.wait(max(until_s - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failed(codes: Sequence[int | None]) -> int | None:
    """Return the number of the rank that made the others end: preferably a killed one, then one with an error, then
    one that still runs.
    """
    for is_it in (lambda code: code is not None and code < 0, bool, lambda code: code is None):
        for number, code in enumerate(codes):
            if is_it(code):
                return number
    return None


def _error(number: int, code: int | None, said: IO[str]) -> CbtopError:
    if code is None:
        return CbtopError(f"rank {number} had not ended {ENDING_S:g} s after another one; it was killed")
    if code < 0:
        return CbtopError(
            f"rank {number} was killed by signal {-code} ({signal.strsignal(-code)}); the others are ended"
        )
    said.seek(0)
    words = said.read().strip().splitlines()
    error = CbtopError(f"rank {number}: {words[-1].removeprefix('cbtop: ') if words else f'exit code {code}'}")
    error.exit_code = code
    return error
