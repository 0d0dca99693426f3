"""Measure memory bandwidth and matrix products of float32 and float64 within two seconds, with NumPy alone.

`main` runs in a separate process, and prints one JSON object.

Rules
- It runs only while processors are idle (SCHED_IDLE), and ends within a round if another process begins to work.
- A disturbed measurement is reported as disturbed, without figures.
- NumPy is limited to the calling thread before it is loaded, because this module starts its own threads.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from cbtop.commands.shared.machine_load import MachineLoad
from cbtop.protocol.process import busiest_wait_ns, processor_times

MIB = 1 << 20
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "BLIS_NUM_THREADS"), "1")
LESS_URGENT = 19  # value for nice(2)
# The buffer is this many times as large as the last-level caches. So most of the buffer is read from memory.
CACHES_PER_BUFFER = 4
SMALLEST_BUFFER_BYTES, LARGEST_BUFFER_BYTES = 64 * MIB, 512 * MIB
SHARE_OF_FREE_MEMORY = 8
UNKNOWN_CACHE_BYTES = 32 * MIB
# Number of rows of the square matrices that are multiplied. Three such matrices fit into a cache of level 2 or 3.
PRODUCT_SIZE = 512
ROUND_S = 0.03  # Seconds per round of a measurement. This is long compared with the time to start the threads.
RECENT_S = 0.1  # Length in seconds of the period over which the work of other processes is judged.
KIND_S = 0.4  # All rounds of one roof together take at most this many seconds.
MIN_ROUNDS, MAX_ROUNDS = 5, 12
MAX_FILL_S = 0.5
# Maximum distance in percent between the median and the best round. If the distance is larger, the measurement is not
# trusted.
MAX_SPREAD_PERCENT = 10
# Maximum percentage of the time that the busiest thread may wait for a processor during a measurement.
MAX_WAIT_PERCENT = 5
SYSFS_CPU = Path("/sys/devices/system/cpu")


class DisturbedError(Exception):
    """A measurement of roofs was disturbed or took too long. The message contains the reason."""


class _Threads:
    """A group of threads that run one function at the same time. The threads live until the process ends."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._task: Callable[[int], object] = lambda _: None
        self._errors: list[BaseException] = []
        self._begun_s, self._ended_s = [0.0] * number, [0.0] * number
        self._gate = threading.Barrier(number + 1)
        for index in range(number):
            threading.Thread(target=self._work, args=(index,), daemon=True).start()

    def run(self, task: Callable[[int], object]) -> float:
        """Call `task` in each thread, with the thread's number.

        Returns the seconds from the first thread's start to the last one's end. The threads read the clock, because
        the caller may get a processor only later.
        """
        self._task = task
        self._gate.wait()
        self._gate.wait()
        if self._errors:
            raise self._errors[0]
        return max(self._ended_s) - min(self._begun_s)

    def _work(self, index: int) -> None:
        while True:
            self._gate.wait()
            self._begun_s[index] = time.perf_counter()
            try:
                self._task(index)
            except MemoryError as error:
                self._errors.append(error)
            self._ended_s[index] = time.perf_counter()
            self._gate.wait()


def measured(threads: int) -> list[dict[str, Any]]:
    """Measure each roof with `threads` threads, and return the rates of all rounds.

    Raises DisturbedError if other work disturbs the measurement.
    """
    import numpy as np

    load = MachineLoad(time.process_time)
    if load.others_s() is None:
        raise DisturbedError("this system does not report how busy its processors are")
    on = _Threads(threads)
    before = processor_times(os.getpid())
    parts: list[Any] = [None] * threads
    size_bytes = buffer_bytes(threads) // threads // 64 * 64

    # Each thread fills the part of the buffer that it will read. So Linux places this memory near its processor.
    def fill(index: int) -> None:
        parts[index] = np.ones(size_bytes // 4, np.float32)

    if on.run(fill) > MAX_FILL_S:
        raise DisturbedError("it took too long to get memory: others use it")
    rounds = {"dram_read": _rounds(on, load, size_bytes * threads, lambda index: np.dot(parts[index], parts[index]))}
    parts.clear()
    for name, kind in (("matmul_float32", np.float32), ("matmul_float64", np.float64)):
        rounds[name] = _products(on, load, kind)
    waited_ns = busiest_wait_ns(before, processor_times(os.getpid()))
    if waited_ns is not None and waited_ns > load.elapsed_s * 1e7 * MAX_WAIT_PERCENT:
        raise DisturbedError(f"its threads waited {waited_ns / 1e6:.0f} ms for a processor")
    return [{"name": name, "rates": rates, "load_percent": load.percent()} for name, rates in rounds.items()]


def _products(on: _Threads, load: MachineLoad, kind: type) -> list[float]:
    """Multiply matrices of this type in several rounds. Return the rate of each round in GFLOP/s."""
    import numpy as np

    left: Any = np.ones((PRODUCT_SIZE, PRODUCT_SIZE), kind)
    outs = [np.empty_like(left) for _ in range(on.number)]
    operations = 2.0 * PRODUCT_SIZE**3 * on.number
    return _rounds(on, load, operations, lambda index: np.matmul(left, left, out=outs[index]))


def _rounds(on: _Threads, load: MachineLoad, amount: float, task: Callable[[int], object]) -> list[float]:
    """Run `task` in several rounds, each of `amount` units. Return the rate of each round in 1e9 units per second.

    Raises DisturbedError if other work disturbs the rounds.
    """
    on.run(task)  # Run a warm-up. The first call loads code and fills caches.
    repeats = max(1, math.ceil(ROUND_S / on.run(task)))

    def again(index: int) -> None:
        for _ in range(repeats):
            task(index)

    rates: list[float] = []
    recent = MachineLoad(time.process_time)
    begun_s = time.perf_counter()
    while len(rates) < MAX_ROUNDS and time.perf_counter() - begun_s < KIND_S:
        rates.append(amount * repeats / on.run(again) / 1e9)
        if not (load.is_quiet() and recent.is_quiet()):
            raise DisturbedError("other processes began to use the processors")
        if recent.elapsed_s > RECENT_S:
            recent = MachineLoad(time.process_time)
    if len(rates) < MIN_ROUNDS:
        raise DisturbedError(f"only {len(rates)} rounds fitted into {KIND_S:g} s")
    spread_percent = 100 * (1 - statistics.median(rates) / max(rates))
    if spread_percent > MAX_SPREAD_PERCENT:
        raise DisturbedError(f"its rounds differ by {spread_percent:.0f} %")
    return rates


def buffer_bytes(threads: int) -> int:
    """Return the size in bytes of a buffer that is larger than the caches. Raises DisturbedError if there is too
    little memory.
    """
    from cbtop.compute.memory import available_bytes

    wanted = max(CACHES_PER_BUFFER * cache_bytes(threads), SMALLEST_BUFFER_BYTES)
    available = available_bytes()
    most = LARGEST_BUFFER_BYTES if available is None else min(LARGEST_BUFFER_BYTES, available // SHARE_OF_FREE_MEMORY)
    if most < wanted:
        raise DisturbedError(f"a buffer of {wanted // MIB} MiB is needed, and {most // MIB} MiB may be taken")
    return wanted


def cache_bytes(threads: int, folder: Path = SYSFS_CPU) -> int:
    """Return the bytes of last-level cache that `threads` threads may use together (Linux sysfs)."""
    caches: dict[str, int] = {}
    for number in os.sched_getaffinity(0):
        indices = sorted((folder / f"cpu{number}/cache").glob("index*"))
        sizes = [((index / "size").read_text().strip(), (index / "shared_cpu_list").read_text()) for index in indices]
        for text, sharing in sizes[-1:]:
            if text.endswith("K") and text[:-1].isdigit():
                caches[sharing] = int(text[:-1]) << 10
    largest = sorted(caches.values(), reverse=True)[:threads]
    return sum(largest) or UNKNOWN_CACHE_BYTES


def main() -> NoReturn:
    """Measure the roofs with the number of threads in the first argument. Print `{"roofs": …}` or `{"disturbed": …}`,
    and exit.
    """
    os.nice(LESS_URGENT)
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.environ.update(ONE_THREAD)
    try:
        found: dict[str, object] = {"roofs": measured(int(sys.argv[1]))}
    except DisturbedError as error:
        found = {"disturbed": str(error)}
    except MemoryError:
        found = {"disturbed": "there was no memory for it"}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    # End the process at once. A normal exit would wait for the threads of the measurement, which still wait at a
    # barrier.
    os._exit(0)
