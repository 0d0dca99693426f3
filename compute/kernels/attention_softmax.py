"""Attention softmax: scores to weights that sum to one, over the positions a token may see.

reference    NumPy, float64, shifted by the maximum
numba        three vectorised passes over a row with its own exponential (2.3-7x of NumPy)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit
from cbtop.compute.jit.exponential import exponential
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats


def reference(scores: Any, start: int) -> None:
    """In place over scores[t, h, : start + t + 1]; scores: float32 (tokens, heads, context)."""
    for t in range(scores.shape[0]):
        row = scores[t, :, : start + t + 1].astype(np.float64)  # (heads, positions)
        powers = np.exp(row - row.max(axis=1, keepdims=True))
        scores[t, :, : start + t + 1] = powers / powers.sum(axis=1, keepdims=True)


@jit
def attention_softmax(scores: Any, start: int) -> None:
    """As `reference`."""
    for t in range(np.uint64(scores.shape[0])):
        positions = np.uint64(start) + t + np.uint64(1)
        for head in range(np.uint64(scores.shape[1])):
            largest = scores[t, head, np.uint64(0)]
            for p in range(positions):
                largest = max(largest, scores[t, head, p])
            total = np.float32(0)
            for p in range(positions):
                power = exponential(np.float32(scores[t, head, p] - largest))
                scores[t, head, p] = power
                total += power
            inverse = np.float32(np.float32(1) / total)
            for p in range(positions):
                scores[t, head, p] *= inverse


EXPONENTIAL_FLOPS = 19  # as written in exponential.py, the clamping not counted


def work() -> KernelWork:
    """Elements are heads x positions. Subtract, exponential, add, multiply; three readings, two writings."""
    return KernelWork(flops_per_element=EXPONENTIAL_FLOPS + 3.0, bytes_per_element=5.0 * FLOAT_BYTES)


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    return 20 * floats(rng, 3, 4, size + 5), size


ATTENTION_SOFTMAX = Kernel("attention_softmax", reference, attention_softmax, work, (0,), 1e-5, _examples)
