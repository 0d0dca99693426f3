"""A brick with a contract: python examples/own_contract.py. There, `cbtop verify own_contract:rms_norm` tries it."""

import sys
from pathlib import Path

import numpy as np

from cbtop import BrickDefinition, BrickId, BrickProfiler

profiler = BrickProfiler()
NORM = BrickDefinition.of(BrickId.RMS_NORM, contract=Path(__file__).with_name("rms_norm.yaml"))


def plain_rms_norm(x, weight, epsilon=1e-6):
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon) * weight


@profiler.timed(NORM, elements=lambda x, weight, epsilon: x.size)
def rms_norm(x, weight, epsilon):
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(epsilon)) * weight


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    x, weight = np.random.default_rng(0).standard_normal((4, 1024), np.float32), np.ones(1024, np.float32)
    for _ in range(steps):
        with profiler.step("decode", tokens=4):
            rms_norm(x, weight, 1e-6)
    print(profiler.report())
