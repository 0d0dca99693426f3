"""Sampling: the greedy choice, the first token with the largest logit.

reference    NumPy's argmax
numba        the same scan without leaving compiled code's buffers
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats


def reference(logits: Any, out: Any) -> None:
    """out[t] = argmax of logits[t]; logits: float32 (tokens, vocabulary), out: int64 (tokens,)."""
    out[:] = logits.argmax(axis=1)


@jit
def greedy(logits: Any, out: Any) -> None:
    """As `reference`, in two passes: the largest value (vectorised), then the first place it stands at."""
    vocabulary = np.uint64(logits.shape[1])
    for t in range(np.uint64(logits.shape[0])):
        largest = logits[t, np.uint64(0)]
        for i in range(vocabulary):
            largest = max(largest, logits[t, i])
        place = np.uint64(0)
        while place + np.uint64(1) < vocabulary and logits[t, place] != largest:
            place += np.uint64(1)
        out[t] = place


def work() -> KernelWork:
    """Elements are logits; a comparison each, not counted as an operation on floats, and one reading."""
    return KernelWork(bytes_per_element=float(FLOAT_BYTES))


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    return floats(rng, 3, size), np.zeros(3, np.int64)


GREEDY = Kernel("greedy", reference, greedy, work, (1,), 0.0, _examples)
