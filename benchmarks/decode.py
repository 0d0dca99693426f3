"""What profiling costs a decode: the demo model's tokens per second with the profiler on and off, taking turns."""

from __future__ import annotations

import statistics
import time

from benchmarks.base import Figure

STEPS_A_TURN = 10
TURNS = 30


def run() -> list[Figure]:
    from cbtop.compute.backends import cpu_backend
    from cbtop.compute.decoder import FAMILIES
    from cbtop.compute.decoder.base import read_model
    from cbtop.compute.decoder.decoder import Decoder
    from cbtop.compute.demo_model import demo_model
    from cbtop.profiler.profiler import BrickProfiler

    profiler = BrickProfiler()
    model = read_model(demo_model(lambda *_: None), FAMILIES)
    backend = cpu_backend(1)  # one thread: the second core is not always ours
    decoder = Decoder(model, backend.label, backend.threads, profiler, context=512)
    token = decoder.prefill(list(range(32)))
    times: dict[bool, list[float]] = {True: [], False: []}
    ratios = []
    for turn in range(TURNS):
        pair = {}
        for on in (True, False) if turn % 2 else (False, True):
            (profiler.enable if on else profiler.disable)()
            decoder.position = 32  # the same context each turn: attention grows with it
            begun = time.perf_counter()
            for _ in range(STEPS_A_TURN):
                token = decoder.decode(token)
            pair[on] = (time.perf_counter() - begun) / STEPS_A_TURN
            times[on].append(pair[on])
        ratios.append(pair[False] / pair[True])
    on, off = (1 / statistics.median(times[state]) for state in (True, False))
    return [
        Figure("decode, profiler off, 1 thread", off, "tokens/s"),
        Figure("decode, profiler on, 1 thread", on, "tokens/s", "profiler off", statistics.median(ratios)),
    ]
