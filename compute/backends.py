"""What the machine has to compute with. The only file that asks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cbtop.compute.errors import ComputeError
from cbtop.compute.jit.addresses import address_of, on_threads
from cbtop.compute.jit.compile import is_kept, jit, settings
from cbtop.compute.jit.compile import untyped as numba

# How long an idle OpenMP thread of libgomp spins before it sleeps. A decoder launches some 50 times a token, and
# its screen runs on the same cores: with libgomp's own 300,000 one other busy process costs 15x (2 cores: 103 to
# 7 tokens/s), because the thread that waits keeps the core that the thread it waits for needs. With this, 89 and
# 33 tokens/s.
GOMP_SPIN_COUNT = 4_000
SYSFS_CPU = Path("/sys/devices/system/cpu")
PROC_STAT = Path("/proc/stat")
WORKQUEUE = (
    "workqueue"  # Numba's own threads, where there is neither TBB nor OpenMP, or NUMBA_THREADING_LAYER names it
)


# GNU OpenMP ends a fork (SIGTERM) in which something spreads over threads that its parent has started.
_launched: set[int] = set()  # the processes, of this one and those it is a fork of, in which Numba has launched


_TURNS = threading.RLock()


@contextmanager
def turn() -> Iterator[None]:
    """Within it something may spread over Numba's threads. Where these are its workqueue, which ends the process once
    two threads of Python use it together, or are not started yet, one thread waits for the other."""
    if (_threading_layer() or WORKQUEUE) == WORKQUEUE:
        with _TURNS:
            yield
    else:
        yield


def _threading_layer() -> str:
    """Numba's name for how it runs threads; empty before it has."""
    try:
        return str(numba.threading_layer())
    except ValueError:
        return ""


@dataclass(frozen=True, slots=True)
class Backend:
    """Compiled kernels on `threads` CPU threads. `label` is what screens show: `numba-omp×2`."""

    threads: int
    threading_layer: str

    @property
    def label(self) -> str:
        return f"numba-{self.threading_layer}×{self.threads}"


@jit
def _nothing(weights: Any, bias: Any, x: Any, beside: Any, out: Any, chunk: Any, chunks: Any) -> None:
    """What threads are started with, of the types that products of int8 have."""


def _start(threads: int) -> None:
    codes, numbers = np.zeros((1, 1), np.uint8), np.zeros((1, 1), np.float32)
    arguments = codes, numbers[0], codes, numbers, numbers
    on_threads(address_of(_nothing, *arguments, 0, 1), *arguments, threads)


def is_first_run() -> bool:
    """Whether not even what starts threads, which every run begins with, is in the cache of compiled kernels."""
    return not is_kept(on_threads)


def available_threads() -> int:
    """The processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_cores() -> int:
    """The cores that this process may run on (Linux sysfs); where that is not said, its processors."""
    if not hasattr(os, "sched_getaffinity"):
        return available_threads()
    siblings = [SYSFS_CPU / f"cpu{number}/topology/thread_siblings_list" for number in os.sched_getaffinity(0)]
    return len({file.read_text() for file in siblings if file.exists()}) or available_threads()


class OtherProcesses:
    """How much of this machine's processors others than this process use, from now on (Linux /proc/stat)."""

    def __init__(self) -> None:
        self._begun_s, self._others_s = time.monotonic(), _others_s()

    def percent(self) -> float:
        """Their share of all processors so far; 0 where that is not said."""
        available_s = (time.monotonic() - self._begun_s) * (os.cpu_count() or 1)
        return min(max(100 * (_others_s() - self._others_s) / available_s, 0.0), 100.0)


def _others_s() -> float:
    """How long others have kept processors busy since the machine started, all together; what was stolen counts."""
    if not os.access(PROC_STAT, os.R_OK):
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, PROC_STAT.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - time.process_time()


def torch_on(threads: int) -> Any:
    """torch, set to compute on `threads` threads. ComputeError where it cannot be loaded."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise ComputeError("torch is not installed") from error
    torch.set_num_threads(threads)
    return torch


def is_fork_of_launched() -> bool:
    """Whether this process is a fork of one in which kernels have run on threads, which are not here."""
    return bool(_launched) and os.getpid() not in _launched


def refuse_threads_of_fork(threads: int) -> None:
    """ComputeError for more than one thread in a fork, which would be ended by it."""
    if threads > 1 and is_fork_of_launched():
        raise ComputeError(
            f"{threads} threads in a fork of a process whose kernels have run on threads: GNU OpenMP would end it; "
            'decode with one thread, or start it by "spawn" or "forkserver"'
        )


def cpu_backend(threads: int | None = None) -> Backend:
    """Numba set to use `threads` threads; when None, all that this process may run on but one.

    The last is left to whoever watches: a parallel product waits for its slowest thread, and the screen on the same
    core makes one slow. ComputeError for none, more than Numba was started with (NUMBA_NUM_THREADS), more than one in
    a fork of a process that has run kernels, and where Numba cannot start them.
    """
    limit = int(settings.NUMBA_NUM_THREADS)
    is_whole = isinstance(threads, int | np.integer) and threads is not True
    if threads is not None and not (is_whole and 1 <= threads <= limit):
        raise ComputeError(f"{threads} threads: this process may use 1 to {limit}")
    wanted = int(threads or 0) or max(1, min(available_threads() - 1, limit))
    if is_fork_of_launched():
        refuse_threads_of_fork(wanted)
        return Backend(wanted, _threading_layer())  # one thread needs no launch
    if "OMP_WAIT_POLICY" not in os.environ:
        # Read when libgomp is loaded, which is when Numba launches for the first time.
        os.environ.setdefault("GOMP_SPINCOUNT", str(GOMP_SPIN_COUNT))
    try:
        numba.set_num_threads(wanted)
        with turn():  # Numba knows its threading layer only once something has run in parallel
            _start(wanted)
    except ValueError as error:  # of a layer that NUMBA_THREADING_LAYER names and that is not there
        raise ComputeError(f"Numba starts no threads ({str(error).splitlines()[0]})") from error
    _launched.add(os.getpid())
    return Backend(wanted, _threading_layer())
