"""Experts that run in a thread pool belong to the step that started them: python examples/threads.py"""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from cbtop import BrickProfiler

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500
profiler = BrickProfiler()
weights = np.random.default_rng(0).standard_normal((4, 256, 256), np.float32)
x = np.ones(256, np.float32)


def expert(weight, place):
    with profiler.adopt(place), profiler.brick("Expert", elements=x.size):
        return weight @ x


with ThreadPoolExecutor(4) as pool:
    for _ in range(steps):
        with profiler.step("decode", tokens=1), profiler.layer(0):
            place = profiler.place()
            futures = [pool.submit(expert, weight, place) for weight in weights]
            with profiler.brick("Combine", elements=x.size):
                sum(future.result() for future in futures)
print(profiler.report())
