"""A brick that checks its own output against a slower reference: python examples/self_verifying.py"""

import sys

import numpy as np

from cbtop import Bounded, BrickDefinition, BrickId, BrickProfiler, Equivalent, Finite

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
profiler = BrickProfiler()


def exact_softmax(x):
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


SOFTMAX = BrickDefinition.of(
    BrickId.ATTENTION_SOFTMAX, checks=(Finite(), Bounded(0, 1), Equivalent(exact_softmax, tolerance=1e-5))
)


@profiler.timed(SOFTMAX, elements=lambda x: x.size)
def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


scores = np.random.default_rng(0).standard_normal(4096, np.float32)
for _ in range(steps):
    with profiler.step("decode", tokens=1):
        softmax(scores)
print(profiler.report())
