"""Residual add, then RMSNorm of the sum. The output is also quantised to int8, for the products that follow.

reference    the three operations one after the other
numba        the sum, then the loops of rms_norm_int8
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.jit.compile import jit_as_written
from cbtop.compute.kernels import add_rms_norm
from cbtop.compute.kernels.add_rms_norm import ADD_RMS_NORM, sum_and_scale_of_row
from cbtop.compute.kernels.base import Arguments, Kernel, KernelWork, Part
from cbtop.compute.kernels.quantize_rows import BLOCK, QUANTIZE_ROWS, empty_codes, quantize_block
from cbtop.compute.kernels.rms_norm import multiply_row
from cbtop.compute.kernels.rms_norm_int8 import quantize_finite, with_quantizing


def reference(
    x: Any, delta: Any, weight: Any, epsilon: float, out: Any, normed: Any, codes: Any, factors: Any
) -> None:
    """Add `delta` to `x`, compute the norm of the sum, and quantise the result.

    x and out are as in `add_rms_norm`. The other arguments are as in `rms_norm_int8`.
    """
    add_rms_norm.reference(x, delta, weight, epsilon, out)
    quantize_finite(normed, out, codes, factors)


@jit_as_written
def add_rms_norm_int8(
    x: Any, delta: Any, weight: Any, epsilon: float, out: Any, normed: Any, codes: Any, factors: Any
) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles."""
    for t in range(np.uint64(x.shape[0])):
        multiply_row(x, t, sum_and_scale_of_row(x, delta, t, epsilon), weight, out)
        for block in range(np.uint64(x.shape[1] // BLOCK)):
            quantize_block(out, t, block, codes, factors)


def parts(arguments: Arguments) -> tuple[Part, ...]:
    """Return two kernels with their arguments: one computes the sum and its norm, the other quantises the norm."""
    *norm, normed, codes, factors = arguments
    return (ADD_RMS_NORM, tuple(norm)), (QUANTIZE_ROWS, (normed, codes, factors))


def work(hidden: int) -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are outputs of the norm."""
    return with_quantizing(add_rms_norm.work(hidden))


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    x, delta, weight, epsilon, out = ADD_RMS_NORM.examples(rng, BLOCK * size)
    return x, delta, weight, epsilon, out, out, *empty_codes(*x.shape)


ADD_RMS_NORM_INT8 = Kernel(
    "add_rms_norm_int8",
    reference,
    add_rms_norm_int8,
    work,
    (0, 4, 6, 7),
    contract("add_rms_norm_int8"),
    _examples,
    parts=parts,
    by_token=(0, 1, 4, 5, 6, 7),
)
