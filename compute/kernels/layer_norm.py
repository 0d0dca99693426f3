"""LayerNorm: (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias.

reference    float64 in NumPy, seven temporaries
numba        three passes over a row that is in L1, all vectorised (10-30x of NumPy, 2.8-7.9x of torch)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.jit.compile import jit
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats


def reference(x: Any, weight: Any, bias: Any, epsilon: float, out: Any) -> None:
    """x, out: float32 (tokens, hidden); weight, bias: float32 (hidden,); `bias` has no elements where there is none.
    (Ba, Kiros & Hinton 2016, "Layer Normalization", equations 3 and 4; epsilon as all that implement it have it)"""
    wide = x.astype(np.float64)
    apart = wide - wide.mean(axis=1, keepdims=True)
    variance = (apart * apart).mean(axis=1, keepdims=True)
    out[:] = apart / np.sqrt(variance + epsilon) * weight + (bias if bias.size else 0.0)


@jit
def layer_norm(x: Any, weight: Any, bias: Any, epsilon: float, out: Any) -> None:
    """As `reference`."""
    hidden = np.uint64(x.shape[1])
    for t in range(np.uint64(x.shape[0])):
        total = np.float32(0)
        for i in range(hidden):
            total += x[t, i]
        mean = np.float32(total / hidden)
        squares = np.float32(0)
        for i in range(hidden):
            apart = x[t, i] - mean
            squares += apart * apart
        scale = np.float32(1.0 / np.sqrt(squares / hidden + epsilon))
        if bias.shape[0]:
            for i in range(hidden):
                out[t, i] = (x[t, i] - mean) * scale * weight[i] + bias[i]
        else:
            for i in range(hidden):
                out[t, i] = (x[t, i] - mean) * scale * weight[i]


def work(hidden: int, *, has_bias: bool) -> KernelWork:
    """Elements are outputs. Of the mean an addition; of the variance a subtraction, a square and an addition; a
    subtraction, two multiplications, the bias. x is read three times, as written."""
    weights = hidden * FLOAT_BYTES
    return KernelWork(
        flops_per_element=7.0 + has_bias,
        bytes_per_call=weights * (1 + has_bias),
        bytes_per_element=(3.0 + 1.0) * FLOAT_BYTES,
    )


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    x = floats(rng, 3, size)
    x[0] *= np.float32(1e-3)  # where epsilon counts
    x[1] += np.float32(10)  # where the mean does
    return x, floats(rng, size), floats(rng, size), 1e-5, np.zeros((3, size), np.float32)


LAYER_NORM = Kernel(
    "layer_norm",
    reference,
    layer_norm,
    work,
    (4,),
    contract("layer_norm"),
    _examples,
    by_token=(0, 4),
)
