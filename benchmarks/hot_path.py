"""The cost of timing one brick, against two looks at the clock."""

from __future__ import annotations

import time

from benchmarks.base import Figure, interleaved_ns
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.vocabulary import BrickId


def run() -> list[Figure]:
    profiler, disabled = BrickProfiler(), BrickProfiler(enabled=False)
    clock, brick = time.perf_counter_ns, BrickId.RMS_NORM

    def floor() -> None:
        clock()
        clock()

    def pair() -> None:
        profiler.stop_brick(profiler.start_brick(brick), 1)

    def span() -> None:
        with profiler.brick(brick, 1):
            pass

    def pair_off() -> None:
        disabled.stop_brick(disabled.start_brick(brick), 1)

    calls = {
        "two clock reads": floor,
        "start_brick/stop_brick, ring write included": pair,
        "with brick(), ring write included": span,
        "start_brick/stop_brick, disabled": pair_off,
    }
    times = interleaved_ns(calls, repeats=20_000)
    lowest = times["two clock reads"]
    return [Figure(name, ns, "ns", "two clock reads", ns / lowest) for name, ns in times.items()]
