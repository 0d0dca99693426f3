"""The cost of timing one brick, against two looks at the clock. CBTOP_PURE_PYTHON says of which hot path."""

from __future__ import annotations

import time

from benchmarks.base import Figure, interleaved_ns
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.vocabulary import BrickId


def run() -> list[Figure]:
    profiler, disabled = BrickProfiler(), BrickProfiler(enabled=False)
    sampled_out = BrickProfiler(sample_every=1 << 40)
    for _ in range(2):  # the first step is recorded, the second is not
        sampled_out.step("decode", tokens=1)
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

    def span_off() -> None:
        with disabled.brick(brick, 1):
            pass

    def pair_sampled_out() -> None:
        sampled_out.stop_brick(sampled_out.start_brick(brick), 1)

    def nothing() -> None:
        pass

    form = profiler.implementation
    calls = {
        "two clock reads": floor,
        f"start_brick/stop_brick, ring write included, {form}": pair,
        f"with brick(), ring write included, {form}": span,
        f"start_brick/stop_brick, disabled, {form}": pair_off,
        f"with brick(), disabled, {form}": span_off,
        f"start_brick/stop_brick, sampled out, {form}": pair_sampled_out,
    }
    times = interleaved_ns({"a call of nothing": nothing} | calls, repeats=20_000)
    # What calling the measured function costs is part of neither.
    call_ns = times.pop("a call of nothing")
    lowest = times["two clock reads"] - call_ns
    return [
        Figure(name, ns - call_ns, "ns", "two clock reads", (ns - call_ns) / lowest) for name, ns in times.items()
    ]
