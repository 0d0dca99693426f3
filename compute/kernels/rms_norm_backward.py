"""The backward of RMSNorm: the gradient of its input. Its weight is frozen.

reference    NumPy, float64
numba        two vectorised passes over a row in L1
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.jit.compile import jit_as_written, jit_inlined
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats
from cbtop.compute.kernels.rms_norm import scale_of_row


def reference(x: Any, weight: Any, epsilon: float, d_out: Any, adds: bool, d_x: Any) -> None:
    """Set d_x to the gradient of x, or add the gradient to d_x if `adds`. d_out is the gradient of the RMSNorm of x.

    x, d_out, d_x: float32 (tokens, hidden). weight: float32 (hidden,).
    """
    wide, weighted = x.astype(np.float64), d_out.astype(np.float64) * weight
    scale = 1 / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + epsilon)
    along = (weighted * wide).mean(axis=1, keepdims=True) * scale**2
    d_x[:] = (d_x if adds else 0.0) + scale * (weighted - wide * along)


@jit_inlined
def _product_of_row(x: Any, weight: Any, d_out: Any, t: Any) -> Any:
    """Return the sum of x * weight * d_out in row t."""
    total = np.float32(0)
    for i in range(np.uint64(x.shape[1])):
        total += x[t, i] * weight[i] * d_out[t, i]
    return total


@jit_as_written
def rms_norm_backward(x: Any, weight: Any, epsilon: float, d_out: Any, adds: bool, d_x: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles.

    A row with a sum of squares above LARGEST_SUM becomes NaN.
    """
    hidden, old = np.uint64(x.shape[1]), np.float32(0)
    for t in range(np.uint64(x.shape[0])):
        scale = scale_of_row(x, t, epsilon)
        along = np.float32(_product_of_row(x, weight, d_out, t) / hidden) * scale * scale
        for i in range(hidden):
            if adds:
                old = d_x[t, i]
            d_x[t, i] = old + scale * (weight[i] * d_out[t, i] - x[t, i] * along)


def work(hidden: int) -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are the numbers of x.

    A number takes ten operations. x and d_out are read twice, and d_x is read and written.
    """
    return KernelWork(
        flops_per_element=10.0, bytes_per_call=hidden * FLOAT_BYTES, bytes_per_element=6.0 * FLOAT_BYTES
    )


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    x = floats(rng, 3, size)
    x[0] *= np.float32(1e-3)  # the values in the examples are small, so that epsilon matters
    return x, floats(rng, size), 1e-6, floats(rng, 3, size), size % 2 == 1, 100 * floats(rng, 3, size)


RMS_NORM_BACKWARD = Kernel(
    "rms_norm_backward",
    reference,
    rms_norm_backward,
    work,
    (5,),
    contract("rms_norm_backward"),
    _examples,
    by_token=(0, 3, 5),
)
