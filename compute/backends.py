"""Choose the processors and libraries that run kernels.

This is the only file of compute that asks the system about the machine.
"""

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
from cbtop.compute.jit.compile import NUMBA_CACHE, is_kept, jit, settings
from cbtop.compute.jit.compile import untyped as numba
from cbtop.compute.jit.cpu import TIER_LABEL
from cbtop.compute.jit.kernel_cache import CODE

# Number of times that an idle OpenMP thread of libgomp checks for work before it sleeps. A checking thread occupies a
# core that a working thread may need. On 2 cores with another busy process, a decoder makes 7 tokens/s with libgomp's
# default of 300,000 checks, and 33 tokens/s with 4,000. Without the other process, it makes 103 and 89 tokens/s.
GOMP_SPIN_COUNT = 4_000
SYSFS_CPU = Path("/sys/devices/system/cpu")
PROC_STAT = Path("/proc/stat")
# the threading layer of Numba itself; Numba uses it if neither TBB nor OpenMP is installed, or if the variable
# NUMBA_THREADING_LAYER selects it
WORKQUEUE = "workqueue"


# Ids of the processes that have started Numba's threads. A forked process inherits this set but not the threads. GNU
# OpenMP ends a forked process (SIGTERM) that uses threads.
_launched: set[int] = set()


_TURNS = threading.RLock()


@contextmanager
def turn() -> Iterator[None]:
    """Enter this context to use Numba's threads.

    Numba's workqueue layer ends the process if two Python threads use it at the same time. So with this layer, or
    with a layer that is not chosen yet, only one thread enters at a time.
    """
    if (_threading_layer() or WORKQUEUE) == WORKQUEUE:
        with _TURNS:
            yield
    else:
        yield


def _threading_layer() -> str:
    """Return the name of Numba's threading layer, or "" before Numba has run in parallel."""
    try:
        return str(numba.threading_layer())
    except ValueError:
        return ""


@dataclass(frozen=True, slots=True)
class Backend:
    """Compiled kernels on `threads` CPU threads.

    `label` is their name on screens, such as `numba-avx2-omp×2`. `threading_layer` is "" before Numba has run in
    parallel.
    """

    threads: int
    threading_layer: str

    @property
    def label(self) -> str:
        return "-".join(filter(None, ("numba", TIER_LABEL, self.threading_layer))) + f"×{self.threads}"


@jit
def _nothing(weights: Any, bias: Any, x: Any, beside: Any, out: Any, chunk: Any, chunks: Any) -> None:
    """Do nothing. Calling this function starts Numba's threads.

    It has the parameters that `on_threads` passes to every function.
    """


def _start(threads: int) -> None:
    codes, numbers = np.zeros((1, 1), np.uint8), np.zeros((1, 1), np.float32)
    arguments = codes, numbers[0], codes, numbers, numbers
    on_threads(address_of(_nothing, *arguments, 0, 1), *arguments, threads)


def is_first_run() -> bool:
    """Return whether this machine has not compiled any kernel yet.

    The test is whether `on_threads` is in the cache, because every run compiles it first.
    """
    return not is_kept(on_threads)


def compiling() -> str:
    """Return a line about a process that compiles kernels: how many kernels are in the cache already."""
    done = "" if NUMBA_CACHE is None else f": {len(list(NUMBA_CACHE.glob(f'*{CODE}')))} done"
    return f"compiling kernels{done}"


def available_threads() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_cores() -> int:
    """Return the number of cores that this process may run on, from Linux sysfs.

    Returns the number of processors if the cores are unknown.
    """
    if not hasattr(os, "sched_getaffinity"):
        return available_threads()
    siblings = [SYSFS_CPU / f"cpu{number}/topology/thread_siblings_list" for number in os.sched_getaffinity(0)]
    return len({file.read_text() for file in siblings if file.exists()}) or available_threads()


class OtherProcesses:
    """Measures how much other processes use this machine's processors from its creation on (Linux /proc/stat)."""

    def __init__(self) -> None:
        self._begun_s, self._others_s = time.monotonic(), _others_s()

    def percent(self) -> float:
        """Return the share of all processors that other processes used, in percent, or 0 if unknown."""
        available_s = (time.monotonic() - self._begun_s) * (os.cpu_count() or 1)
        return min(max(100 * (_others_s() - self._others_s) / available_s, 0.0), 100.0)


def _others_s() -> float:
    """Return the processor seconds that other processes have used since the machine started.

    The result includes the time that a hypervisor took from this machine (steal).
    """
    if not os.access(PROC_STAT, os.R_OK):
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, PROC_STAT.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - time.process_time()


def torch_on(threads: int) -> Any:
    """Return the module torch, set to compute on `threads` threads. Raises ComputeError if torch cannot be loaded."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise ComputeError("torch is not installed") from error
    torch.set_num_threads(threads)
    return torch


def is_fork_of_launched() -> bool:
    """Return whether this process was forked after kernels had run on threads. Such a process has no threads of
    Numba, because a fork does not inherit threads.
    """
    return bool(_launched) and os.getpid() not in _launched


def refuse_threads_of_fork(threads: int) -> None:
    """Raise ComputeError if a fork would use more than one thread, because GNU OpenMP would end the fork."""
    if threads > 1 and is_fork_of_launched():
        raise ComputeError(
            f"{threads} threads in a fork of a process whose kernels have run on threads: GNU OpenMP would end it; "
            'decode with one thread, or start it by "spawn" or "forkserver"'
        )


def cpu_backend(threads: int | None = None) -> Backend:
    """Set Numba to use `threads` threads. None means all processors of this process except one.

    The remaining processor is left to the screen. A parallel product waits for its slowest thread, and a screen on
    the same core would slow that thread down.

    Raises ComputeError if
    - `threads` is 0,
    - `threads` exceeds the number that Numba was started with (NUMBA_NUM_THREADS),
    - several threads are wanted in a fork of a process that has run kernels,
    - Numba cannot start the threads.
    """
    limit = int(settings.NUMBA_NUM_THREADS)
    is_whole = isinstance(threads, int | np.integer) and threads is not True
    if threads is not None and not (is_whole and 1 <= threads <= limit):
        raise ComputeError(f"{threads} threads: this process may use 1 to {limit}")
    wanted = int(threads or 0) or max(1, min(available_threads() - 1, limit))
    if is_fork_of_launched():
        refuse_threads_of_fork(wanted)
        return Backend(wanted, _threading_layer())  # one thread runs in the caller itself, so Numba starts no threads
    if "OMP_WAIT_POLICY" not in os.environ:
        # Numba loads libgomp at the first parallel run, and libgomp reads GOMP_SPINCOUNT then.
        os.environ.setdefault("GOMP_SPINCOUNT", str(GOMP_SPIN_COUNT))
    try:
        numba.set_num_threads(wanted)
        with turn():  # run something in parallel, because only then does Numba choose its threading layer
            _start(wanted)
    except ValueError as error:  # Numba raises this if the layer in NUMBA_THREADING_LAYER is not installed
        raise ComputeError(f"Numba starts no threads ({str(error).splitlines()[0]})") from error
    _launched.add(os.getpid())
    return Backend(wanted, _threading_layer())
