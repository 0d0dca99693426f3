"""The backward of LayerNorm: the gradient of its input. Its weight and bias are frozen.

reference    NumPy, float64
numba        four vectorised passes over a row in L1
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.jit.compile import jit
from cbtop.compute.jit.halves import NOT_A_NUMBER
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats
from cbtop.compute.kernels.rms_norm import LARGEST_SUM


def reference(x: Any, weight: Any, epsilon: float, d_out: Any, adds: bool, d_x: Any) -> None:
    """Set d_x to the gradient of x, or add the gradient to d_x if `adds`. d_out is the gradient of the LayerNorm of
    x.

    x, d_out, d_x: float32 (tokens, hidden). weight: float32 (hidden,). The bias does not matter for the gradient of
    x.
    """
    wide, weighted = x.astype(np.float64), d_out.astype(np.float64) * weight
    apart = wide - wide.mean(axis=1, keepdims=True)
    scale = 1 / np.sqrt((apart * apart).mean(axis=1, keepdims=True) + epsilon)
    along = (weighted * apart).mean(axis=1, keepdims=True) * scale**2
    d_x[:] = (d_x if adds else 0.0) + scale * (weighted - weighted.mean(axis=1, keepdims=True) - apart * along)


@jit
def layer_norm_backward(x: Any, weight: Any, epsilon: float, d_out: Any, adds: bool, d_x: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles.

    A row with a sum of squares above LARGEST_SUM becomes NaN.
    """
    hidden, old = np.uint64(x.shape[1]), np.float32(0)
    for t in range(np.uint64(x.shape[0])):
        total, d_total = np.float32(0), np.float32(0)
        for i in range(hidden):
            total += x[t, i]
            d_total += weight[i] * d_out[t, i]
        mean, d_mean = np.float32(total / hidden), np.float32(d_total / hidden)
        squares, product = np.float32(0), np.float32(0)
        for i in range(hidden):
            apart = x[t, i] - mean
            squares += apart * apart
            product += apart * weight[i] * d_out[t, i]
        scale = np.float32(1.0 / np.sqrt(squares / hidden + epsilon))
        along = np.float32(product / hidden) * scale * scale
        for i in range(hidden):
            if adds:
                old = d_x[t, i]
            d_x[t, i] = old + scale * (weight[i] * d_out[t, i] - d_mean - (x[t, i] - mean) * along)
        if squares > LARGEST_SUM:
            d_x[t] = np.int32(NOT_A_NUMBER).view(np.float32)


def work(hidden: int) -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are the numbers of x.

    A number takes seventeen operations. x and d_out are read three times, and d_x is read and written.
    """
    return KernelWork(
        flops_per_element=17.0, bytes_per_call=hidden * FLOAT_BYTES, bytes_per_element=8.0 * FLOAT_BYTES
    )


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    x = floats(rng, 3, size)
    x[0] *= np.float32(1e-3)  # the values in the examples are small, so that epsilon matters
    return x, floats(rng, size), 1e-5, floats(rng, 3, size), size % 2 == 1, 100 * floats(rng, 3, size)


LAYER_NORM_BACKWARD = Kernel(
    "layer_norm_backward",
    reference,
    layer_norm_backward,
    work,
    (5,),
    contract("layer_norm_backward"),
    _examples,
    by_token=(0, 3, 5),
)
