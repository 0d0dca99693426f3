"""RMSNorm. The output is also quantised to int8 for the products that follow.

reference    the two operations one after the other
numba        each row is quantised right after it is written, while it is in L1. 0.77x the time of two calls for a row
             of 768, 0.96x for 128 rows (AVX2)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.jit.compile import jit_as_written
from cbtop.compute.kernels import quantize_rows, rms_norm
from cbtop.compute.kernels.base import Arguments, Kernel, KernelWork, Part
from cbtop.compute.kernels.quantize_rows import BLOCK, QUANTIZE_ROWS, empty_codes, quantize_block
from cbtop.compute.kernels.rms_norm import RMS_NORM, multiply_row, scale_of_row


def reference(x: Any, weight: Any, epsilon: float, out: Any, normed: Any, codes: Any, factors: Any) -> None:
    """Set `out` to the result of `rms_norm`. Set codes and factors to `quantize_rows` of `normed`.

    Rows consist of whole blocks. If a row of `normed` is not finite, `out` is quantised instead.

    The implementation receives the same array as `out` and as `normed`. The reference receives the implementation's
    output as `normed`, because its own output could be rounded to a neighbouring code.
    """
    rms_norm.reference(x, weight, epsilon, out)
    quantize_finite(normed, out, codes, factors)


def quantize_finite(normed: Any, out: Any, codes: Any, factors: Any) -> None:
    """Write the codes and factors of `normed`.

    A row that is not finite was computed wrongly. For such a row, `out` is quantised instead.
    """
    is_finite = np.isfinite(normed).all(axis=1, keepdims=True)
    quantize_rows.reference(np.where(is_finite, normed, out), codes, factors)


@jit_as_written
def rms_norm_int8(x: Any, weight: Any, epsilon: float, out: Any, normed: Any, codes: Any, factors: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles."""
    for t in range(np.uint64(x.shape[0])):
        multiply_row(x, t, scale_of_row(x, t, epsilon), weight, out)
        for block in range(np.uint64(x.shape[1] // BLOCK)):
            quantize_block(out, t, block, codes, factors)


def parts(arguments: Arguments) -> tuple[Part, ...]:
    """Return two kernels with their arguments: one computes the norm, the other quantises the norm."""
    *norm, normed, codes, factors = arguments
    return (RMS_NORM, tuple(norm)), (QUANTIZE_ROWS, (normed, codes, factors))


def with_quantizing(norm: KernelWork) -> KernelWork:
    """Return the work of a norm, plus the work of quantising its output."""
    alone = quantize_rows.work()
    return replace(
        norm,
        flops_per_element=norm.flops_per_element + alone.flops_per_element,
        bytes_per_element=norm.bytes_per_element + alone.bytes_per_element,
    )


def work(hidden: int) -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are outputs of the norm."""
    return with_quantizing(rms_norm.work(hidden))


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    x, weight, epsilon, out = RMS_NORM.examples(rng, BLOCK * size)
    return x, weight, epsilon, out, out, *empty_codes(*x.shape)


RMS_NORM_INT8 = Kernel(
    "rms_norm_int8",
    reference,
    rms_norm_int8,
    work,
    (3, 5, 6),
    contract("rms_norm_int8"),
    _examples,
    parts=parts,
    by_token=(0, 3, 4, 5, 6),
)
