"""The roofs of this machine, measured: how fast memory is read, and how fast floats are multiplied."""

# Both run on the threads that the decoder uses, in code from the same compiler: a ceiling is what a kernel of
# ours could reach, not what a data sheet says.

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit_parallel, prange

MIB = 1 << 20
LARGEST_BUFFER_BYTES = 1024 * MIB
SMALLEST_BUFFER_BYTES = 64 * MIB
UNKNOWN_CACHE_BYTES = 32 * MIB
CACHES_PER_BUFFER = 4  # a buffer that is four caches long finds little of itself there on the next round
SHARE_OF_FREE_MEMORY = 4
ROUNDS = 5
COMPUTE_LANES = 2048  # float32: 8 KiB, stays in L1
COMPUTE_REPEATS = 4_000
FMAS_PER_VISIT = 16  # written out in _multiply_add: enough that loading and storing do not count


@dataclass(frozen=True, slots=True)
class MeasuredCeiling:
    """One roof. `kind` is `bandwidth` (unit GB/s) or `compute` (unit GFLOP/s)."""

    name: str
    kind: str
    value: float
    unit: str


@jit_parallel
def _fill(buffer: Any, threads: int) -> None:
    """Touch every page, from the thread that will read it."""
    size = buffer.shape[0]
    for thread in prange(threads):
        for i in range(np.uint64(thread * size // threads), np.uint64((thread + 1) * size // threads)):
            buffer[i] = np.int64(1)


@jit_parallel
def _read(buffer: Any, sums: Any) -> None:
    """Read every byte once: one sequential stream a thread."""
    size, threads = buffer.shape[0], sums.shape[0]
    for thread in prange(threads):
        total = np.int64(0)
        for i in range(np.uint64(thread * size // threads), np.uint64((thread + 1) * size // threads)):
            total += buffer[i]
        sums[thread] = total


@jit_parallel
def _multiply_add(values: Any, factor: Any, term: Any, repeats: int) -> None:
    """values[thread] go through FMAS_PER_VISIT dependent multiply-adds, `repeats` times over."""
    for thread in prange(values.shape[0]):
        for _ in range(repeats):
            for i in range(np.uint64(COMPUTE_LANES)):
                value = values[thread, i]
                for _ in range(FMAS_PER_VISIT):
                    value = value * factor + term
                values[thread, i] = value


def measure_ceilings(threads: int, weights_bytes: int) -> list[MeasuredCeiling]:
    """DRAM bandwidth, bandwidth over a working set as large as the weights, and the float32 FMA rate.

    The weights of a small model may stay in the last-level cache; their own ceiling shows it.
    """
    buffer = np.empty(dram_buffer_bytes() // 8, np.int64)
    _fill(buffer, threads)
    sums = np.zeros(threads, np.int64)
    weights = buffer[: max(min(weights_bytes, buffer.nbytes) // 8, threads)]
    values = np.ones((threads, COMPUTE_LANES), np.float32)
    # A contraction towards 1: nothing overflows and nothing becomes denormal.
    factor, term = np.float32(0.5), np.float32(0.5)
    _multiply_add(values, factor, term, 1)  # the first call compiles, or loads what was compiled

    dram = _best_seconds(lambda: _read(buffer, sums))
    cached = _best_seconds(lambda: _read(weights, sums))
    compute = _best_seconds(lambda: _multiply_add(values, factor, term, COMPUTE_REPEATS))
    flops = 2.0 * threads * COMPUTE_LANES * COMPUTE_REPEATS * FMAS_PER_VISIT
    return [
        MeasuredCeiling("dram_read", "bandwidth", buffer.nbytes / dram / 1e9, "GB/s"),
        MeasuredCeiling("weights_read", "bandwidth", weights.nbytes / cached / 1e9, "GB/s"),
        MeasuredCeiling("fma_float32", "compute", flops / compute / 1e9, "GFLOP/s"),
    ]


def dram_buffer_bytes() -> int:
    """A buffer that does not fit the last-level cache, as far as free memory allows."""
    wanted = max(CACHES_PER_BUFFER * _last_level_cache_bytes(), SMALLEST_BUFFER_BYTES)
    return max(min(wanted, LARGEST_BUFFER_BYTES, _free_memory_bytes() // SHARE_OF_FREE_MEMORY), MIB)


def _best_seconds(run: Callable[[], object]) -> float:
    """The shortest of ROUNDS: a ceiling is what is possible, and other processes only take away."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def _last_level_cache_bytes() -> int:
    """The largest cache of the first processor (Linux sysfs: `size` reads like 32768K)."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes, default=UNKNOWN_CACHE_BYTES)


def _free_memory_bytes() -> int:
    """MemAvailable of /proc/meminfo; where there is none, enough for the smallest buffer."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return SMALLEST_BUFFER_BYTES * SHARE_OF_FREE_MEMORY
