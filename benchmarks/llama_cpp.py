"""Measure what the callback of cbtop costs in a decode step of llama.cpp.

The model has the demo's shape and one thread. llama.cpp is the real one from `xllamacpp`. Results are ratios of the
process's CPU time, round by round, to the same model without a callback. A second run without a callback is the
control. The CPU time includes the thread that passes the records on.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.base import Figure, Ratio
from benchmarks.llama_peer import Llama, library, write_model
from cbtop.compute.demo_model import DEMO
from cbtop.profiler.instrument.llama_cpp import callback
from cbtop.profiler.profiler import BrickProfiler

ROUNDS, STEPS = 21, 64
BARE = "llama.cpp, no callback"
WAYS = {
    BARE: 0,
    "no callback again": 0,
    "all steps declined": 1_000_000,
    "one step in 64": 64,
    "one step in 32": 32,
    "every step": 1,
}


def run() -> list[Figure]:
    try:
        library()
    except ImportError:
        print("  xllamacpp is not installed: pip install xllamacpp", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "demo.gguf"
        write_model(path, DEMO)
        llamas = {}
        for name, sample_every in WAYS.items():
            addresses = callback(BrickProfiler(sample_every=sample_every)) if sample_every else (0, 0)
            llamas[name] = Llama(path, *addresses)
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        for turn in range(ROUNDS + 1):
            for name, llama in llamas.items():
                llama.forget()
                begun_ns = time.process_time_ns()
                for token in range(STEPS):
                    llama.decode([token])
                if turn:
                    times[name].append((time.process_time_ns() - begun_ns) / STEPS / 1000)
        for llama in llamas.values():
            llama.close()
    return [Figure(BARE, statistics.median(times[BARE]), "µs/step")] + [
        Figure(f"llama.cpp, {name}", statistics.median(found), "µs/step", BARE, Ratio.of(found, times[BARE]))
        for name, found in times.items()
        if name != BARE
    ]
