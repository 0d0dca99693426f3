"""Measure the cost of profiling a decode: a step with every brick profiled, compared with a step with the profiler
off.

The steps take turns. One thread runs them and never waits, so its processor time is its wall time, without other
processes.

The last figure is the share of attention in a step at position 2,000, with the demo's model and enough context. It is
taken from ten recorded bricks, in rounds of some steps, by the wall clock.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.base import Figure, Ratio

STEPS = 600  # This many steps run with the profiler on, and as many with it off.
CONTEXT = 32  # Number of tokens in the KV cache before each step. Attention takes longer with more.
# for the share of attention: position of the step, number of rounds, and number of steps per round
FAR, FAR_ROUNDS, FAR_STEPS = 2000, 21, 20


def half_a_billion() -> Path:
    """Return the path of a model of about the size of Qwen2.5-0.5B, with steps of over 10 ms.

    The model is written if it is missing.
    """
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
    backend = cpu_backend(1)  # Use one thread, because other programs may be using a second core.
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
        _attention(),
    ]


def _attention() -> Figure:
    from cbtop.compute.backends import cpu_backend
    from cbtop.compute.brick_specs import ATTENTION
    from cbtop.compute.decoder.decoder import Decoder
    from cbtop.compute.decoder.int8 import model_to_run
    from cbtop.compute.demo_model import DEMO, write_model
    from cbtop.profiler.profiler import BrickProfiler

    profiler, backend, context = BrickProfiler(), cpu_backend(1), FAR + 1
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        write_model(path, replace(DEMO, context_length=context), lambda *_: None)
        decoder = Decoder(model_to_run(path), backend.label, backend.threads, profiler, context)
    token = decoder.prefill(list(range(FAR)))
    steps_ms, attention_ms = [], []
    for _ in range(FAR_ROUNDS):
        profiler.reset()
        begun_ns = time.perf_counter_ns()
        for _ in range(FAR_STEPS):
            decoder.position = FAR
            token = decoder.decode(token)
        steps_ms.append((time.perf_counter_ns() - begun_ns) / FAR_STEPS / 1e6)
        attention = profiler.stats_for(ATTENTION)
        assert attention is not None
        attention_ms.append(attention.calls.total_ns / FAR_STEPS / 1e6)
    what = f"attention of a decode step at position {FAR:,}, 1 thread"
    return Figure(what, statistics.median(attention_ms), "ms", "the step", Ratio.of(attention_ms, steps_ms))
