"""What profiling costs a decode: one step with every brick on against one with the profiler off, taking turns.

On one thread that never waits, so its processor time is its wall time, less what other processes took in between.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.base import Figure, Ratio

STEPS = 600  # with the profiler on, and as many with it off
CONTEXT = 32  # tokens in the KV cache at each step: attention grows with it


def half_a_billion() -> Path:
    """The path of a model about the size of Qwen2.5-0.5B, whose step takes over 10 ms; written where it is not."""
    from cbtop.compute.demo_model import DEMO, FORMAT_VERSION, write_model
    from cbtop.protocol.cache import cache_dir

    shape = replace(DEMO, hidden=1024, heads=16, feed_forward=4864, layers=24)
    path = cache_dir() / f"benchmark-{shape.architecture}-v{FORMAT_VERSION}.gguf"
    if not path.exists():
        write_model(path, shape, lambda *_: None)
    return path


def run() -> list[Figure]:
    from cbtop.compute.backends import cpu_backend
    from cbtop.compute.decoder.decoder import Decoder
    from cbtop.compute.decoder.int8 import model_to_run
    from cbtop.profiler.profiler import BrickProfiler

    profiler = BrickProfiler()
    backend = cpu_backend(1)  # one thread: the second core is not always ours
    decoder = Decoder(model_to_run(half_a_billion()), backend.label, backend.threads, profiler, context=512)
    token = decoder.prefill(list(range(CONTEXT)))
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(STEPS):
        for on in (True, False) if turn % 2 else (False, True):
            (profiler.enable if on else profiler.disable)()
            decoder.position = CONTEXT
            begun_ns = time.thread_time_ns()
            token = decoder.decode(token)
            times[on].append((time.thread_time_ns() - begun_ns) / 1e6)
    form = profiler.implementation
    on_ms, off_ms = (statistics.median(times[state]) for state in (True, False))
    return [
        Figure("decode step, profiler off, 1 thread", off_ms, "ms"),
        Figure(
            f"decode step, every brick on, 1 thread, {form}",
            on_ms,
            "ms",
            "profiler off",
            Ratio.of(times[True], times[False]),
        ),
    ]
