"""Choose the processors and libraries that kernels run on. No other file of compute asks the machine for them."""

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

# Number of spins of an idle OpenMP thread of libgomp before it sleeps. A decoder launches some 50 times a token, and
# its screen runs on the same cores. With libgomp's own 300,000 spins, another busy process costs 15x (2 cores: 103 to
# 7 tokens/s), because a waiting thread keeps the core that the awaited thread needs. With 4,000: 89 and 33 tokens/s.
GOMP_SPIN_COUNT = 4_000
SYSFS_CPU = Path("/sys/devices/system/cpu")
PROC_STAT = Path("/proc/stat")
WORKQUEUE = "workqueue"  # Numba's own threads, used without TBB and OpenMP, or if NUMBA_THREADING_LAYER names them


# Ids of the processes that started Numba's threads: this process, or one it was forked from. GNU OpenMP ends a fork
# (SIGTERM) that uses threads after its parent has started threads.
_launched: set[int] = set()


_TURNS = threading.RLock()


@contextmanager
def turn() -> Iterator[None]:
    """Enter this context to use Numba's threads.

    With the workqueue layer, or before Numba has chosen a layer, only one Python thread enters at a time, because the
    workqueue ends a process if two threads use it together.
    """
    if (_threading_layer() or WORKQUEUE) == WORKQUEUE:
        with _TURNS:
            yield
    else:
        yield


def _threading_layer() -> str:
    """Return Numba's name of its threading layer, or "" before Numba has run in parallel."""
    try:
        return str(numba.threading_layer())
    except ValueError:
        return ""


@dataclass(frozen=True, slots=True)
class Backend:
    """Compiled kernels on `threads` CPU threads. `label` is their name on screens, such as `numba-omp×2`."""

    threads: int
    threading_layer: str

    @property
    def label(self) -> str:
        return f"numba-{self.threading_layer}×{self.threads}"


@jit
def _nothing(weights: Any, bias: Any, x: Any, beside: Any, out: Any, chunk: Any, chunks: Any) -> None:
    """Do nothing. Running this function starts the threads; it has the argument types of int8 products."""


def _start(threads: int) -> None:
    codes, numbers = np.zeros((1, 1), np.uint8), np.zeros((1, 1), np.float32)
    arguments = codes, numbers[0], codes, numbers, numbers
    on_threads(address_of(_nothing, *arguments, 0, 1), *arguments, threads)


def is_first_run() -> bool:
    """Return whether the kernel cache is missing `on_threads`. Every run calls that function first, so that a missing
    one means a first run."""
    return not is_kept(on_threads)


def available_threads() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_cores() -> int:
    """Return the number of cores that this process may run on (Linux sysfs), or the number of processors if the cores
    are unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return available_threads()
    siblings = [SYSFS_CPU / f"cpu{number}/topology/thread_siblings_list" for number in os.sched_getaffinity(0)]
    return len({file.read_text() for file in siblings if file.exists()}) or available_threads()


class OtherProcesses:
    """The use of this machine's processors by other processes since this object was made (Linux /proc/stat)."""

    def __init__(self) -> None:
        self._begun_s, self._others_s = time.monotonic(), _others_s()

    def percent(self) -> float:
        """Return the share of all processors that other processes used, in percent, or 0 if it is not known."""
        available_s = (time.monotonic() - self._begun_s) * (os.cpu_count() or 1)
        return min(max(100 * (_others_s() - self._others_s) / available_s, 0.0), 100.0)


def _others_s() -> float:
    """Return the processor seconds that other processes have used since the machine started, with stolen time."""
    if not os.access(PROC_STAT, os.R_OK):
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, PROC_STAT.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - time.process_time()


def torch_on(threads: int) -> Any:
    """Return torch, set to compute on `threads` threads. Raises ComputeError if it cannot be loaded."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise ComputeError("torch is not installed") from error
    torch.set_num_threads(threads)
    return torch


def is_fork_of_launched() -> bool:
    """Return whether this process is a fork of one whose kernels ran on threads. A fork does not inherit threads."""
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

    One processor is left to the screen: a parallel product waits for its slowest thread, and a screen on the same
    core slows that thread down. Raises ComputeError for 0 threads, for more threads than Numba was started with
    (NUMBA_NUM_THREADS), for more than one thread in a fork of a process that has run kernels, and if Numba cannot
    start the threads.
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
        # libgomp reads GOMP_SPINCOUNT when it is loaded, which is at Numba's first launch.
        os.environ.setdefault("GOMP_SPINCOUNT", str(GOMP_SPIN_COUNT))
    try:
        numba.set_num_threads(wanted)
        with turn():  # Numba knows its threading layer only after something has run in parallel
            _start(wanted)
    except ValueError as error:  # raised if the layer in NUMBA_THREADING_LAYER is not installed
        raise ComputeError(f"Numba starts no threads ({str(error).splitlines()[0]})") from error
    _launched.add(os.getpid())
    return Backend(wanted, _threading_layer())
