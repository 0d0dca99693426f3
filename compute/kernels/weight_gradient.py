"""The gradient of a matrix of floats: d_weights += d_out.T @ x.

reference    NumPy, float64
numba        a row of the gradient stays in L1 while all tokens are added to it
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.jit.compile import jit
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats


def reference(d_out: Any, x: Any, d_weights: Any) -> None:
    """Add the gradient of the weights of out = x @ weights.T to d_weights.

    d_out: float32 (tokens, rows); x: float32 (tokens, columns); d_weights: float32 (rows, columns).
    """
    d_weights += d_out.astype(np.float64).T @ x


@jit
def weight_gradient(d_out: Any, x: Any, d_weights: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles."""
    columns = np.uint64(x.shape[1])
    for row in range(np.uint64(d_out.shape[1])):
        for t in range(np.uint64(x.shape[0])):
            times = d_out[t, row]
            for i in range(columns):
                d_weights[row, i] += times * x[t, i]


def work(rows: int, columns: int) -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are the numbers of x, tokens x columns.

    x and d_out are read once. d_weights is read and written once.
    """
    return KernelWork(
        flops_per_element=2.0 * rows,
        bytes_per_call=2.0 * rows * columns * FLOAT_BYTES,
        bytes_per_element=FLOAT_BYTES + FLOAT_BYTES * rows / columns,
    )


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    rows = 1 + size // 2
    return floats(rng, 5, rows), floats(rng, 5, size), floats(rng, rows, size)


WEIGHT_GRADIENT = Kernel(
    "weight_gradient",
    reference,
    weight_gradient,
    work,
    (2,),
    contract("weight_gradient"),
    _examples,
)
