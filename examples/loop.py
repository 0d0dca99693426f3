"""A decode loop with layers and bricks, instrumented by hand: python examples/loop.py"""

import sys

import numpy as np

from cbtop import BrickId, BrickProfiler

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
profiler = BrickProfiler()
weights = np.random.default_rng(0).standard_normal((4, 256, 256), np.float32)
x = np.ones(256, np.float32)

for _ in range(steps):
    with profiler.step("decode", tokens=1):
        for number, weight in enumerate(weights):
            with profiler.layer(number):
                with profiler.brick(BrickId.RMS_NORM, elements=x.size):
                    x = x / np.sqrt(np.mean(x * x) + 1e-6)
                with profiler.brick(BrickId.DOWN_PROJECTION, elements=x.size):
                    x = weight @ x
print(profiler.report())
