"""Measure the machine's current pace: the time that a fixed amount of work takes while cbtop does nothing else.

The pace of a virtual machine changes, because other machines use the same caches, clock and memory.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from cbtop.comparison.runs import Pace

# Each of the two tasks is measured this many times, in turns. All measurements together take about 0.1 s.
ROUNDS = 15
CACHE_BYTES, CACHE_TIMES = 64 << 10, 400
MEMORY_BYTES = 64 << 20


def machine_pace() -> Pace:
    """Return the processor time of two tasks: arithmetic on arrays in a cache, and reading arrays larger than the
    caches.
    """
    small = np.ones(CACHE_BYTES // 4, np.float32)
    out, large = np.empty_like(small), np.ones(MEMORY_BYTES // 4, np.float32)
    cache_us, memory_us = [], []
    for _ in range(ROUNDS):
        begun_ns = time.thread_time_ns()
        for _ in range(CACHE_TIMES):
            np.multiply(small, small, out=out)
        between_ns = time.thread_time_ns()
        np.add.reduce(large)
        cache_us.append((between_ns - begun_ns) / 1e3)
        memory_us.append((time.thread_time_ns() - between_ns) / 1e3)
    return Pace(median(cache_us), median(memory_us))
