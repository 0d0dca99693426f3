"""Combine: of each token the outputs of its experts, weighted and added.

reference    NumPy, float64
numba        an expert after the other in the order of their weights, largest first
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.jit.compile import jit
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats


def reference(outputs: Any, places: Any, weights: Any, out: Any) -> None:
    """out[t] = sum over j of weights[t, j] * outputs[places[t, j]]; outputs float32 (tokens * used, hidden), places
    int64 and weights float32 (tokens, used), out float32 (tokens, hidden)."""
    out[:] = (outputs[places].astype(np.float64) * weights[..., None]).sum(axis=1)


@jit
def combine(outputs: Any, places: Any, weights: Any, out: Any) -> None:
    """As `reference`."""
    columns = np.uint64(out.shape[1])
    for t in range(np.uint64(out.shape[0])):
        for j in range(np.uint64(places.shape[1])):
            place, weight = np.uint64(places[t, j]), weights[t, j]
            if j == np.uint64(0):
                for i in range(columns):
                    out[t, i] = weight * outputs[place, i]
            else:
                for i in range(columns):
                    out[t, i] += weight * outputs[place, i]


def work(used: int) -> KernelWork:
    """Elements are outputs: of each of its experts a value is read, multiplied and added."""
    return KernelWork(flops_per_element=2.0 * used - 1.0, bytes_per_element=FLOAT_BYTES * (used + 1.0))


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    tokens, used = 3, 2
    places = rng.permutation(tokens * used).reshape(tokens, used)
    weights = 0.1 + rng.random((tokens, used), dtype=np.float32)
    return floats(rng, tokens * used, size), places, weights, np.zeros((tokens, size), np.float32)


COMBINE = Kernel("combine", reference, combine, work, (3,), contract("combine"), _examples, by_token=(1, 2, 3))
