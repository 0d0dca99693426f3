"""Residual add, then RMSNorm of the sum: x += delta; out = x / sqrt(mean(x²) + epsilon) * weight.

reference    the two operations one after the other, float64
numba        two passes over a row in L1; the separate kernels write the sum and read it again
cuda         one launch with a block per row; the row stays in the registers of its threads
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.cuda.launches import CudaKernel, CudaLaunch, stays_in_registers
from cbtop.compute.jit.compile import jit_as_written, jit_inlined
from cbtop.compute.kernels import rms_norm
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, Part, floats
from cbtop.compute.kernels.quantize_rows import BLOCK
from cbtop.compute.kernels.quantize_rows import launches as quantize_launches
from cbtop.compute.kernels.residual_add import RESIDUAL_ADD
from cbtop.compute.kernels.residual_add import reference as add_reference
from cbtop.compute.kernels.rms_norm import RMS_NORM, multiply_row, scale_of


def reference(x: Any, delta: Any, weight: Any, epsilon: float, out: Any) -> None:
    """Add `delta` to `x`, and set `out` to the RMSNorm of the sum.

    x, delta, out: float32 (tokens, hidden); weight: float32 (hidden,).
    """
    add_reference(x, delta)
    rms_norm.reference(x, weight, epsilon, out)


@jit_inlined
def sum_and_scale_of_row(x: Any, delta: Any, t: Any, epsilon: Any) -> Any:
    """Set x[t] += delta[t]. Returns the scale of the sum's norm, see `scale_of`."""
    hidden = np.uint64(x.shape[1])
    squares = np.float32(0)
    for i in range(hidden):
        both = x[t, i] + delta[t, i]
        x[t, i] = both
        squares += both * both
    return scale_of(squares, hidden, epsilon)


@jit_as_written
def add_rms_norm(x: Any, delta: Any, weight: Any, epsilon: float, out: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles.

    A row with a sum of squares above LARGEST_SUM becomes NaN.
    """
    for t in range(np.uint64(x.shape[0])):
        multiply_row(x, t, sum_and_scale_of_row(x, delta, t, epsilon), weight, out)


def parts(arguments: Arguments) -> tuple[Part, ...]:
    """Return two kernels with their arguments: one computes the sum, the other computes the norm of the sum."""
    x, delta, weight, epsilon, out = arguments
    return (RESIDUAL_ADD, (x, delta)), (RMS_NORM, (x, weight, epsilon, out))


def launches(x: Any, delta: Any, weight: Any, epsilon: float, out: Any) -> tuple[CudaLaunch, ...]:
    """Return one launch with a block for each row."""
    return (rms_norm.by_row("add_rms_norm", x, weight, epsilon, out, delta),)


def with_bf16(x: Any, delta: Any, weight: Any, epsilon: float, out: Any, rounded: Any) -> tuple[CudaLaunch, ...]:
    """Return the launch that also writes `out` as bfloat16, see `rms_norm.with_bf16`."""
    return (rms_norm.by_row("add_rms_norm_bf16", x, weight, epsilon, out, delta, rounded),)


def with_codes(
    x: Any, delta: Any, weight: Any, epsilon: float, out: Any, codes: Any, factors: Any
) -> tuple[CudaLaunch, ...]:
    """Return the launches that also quantise `out`, see `rms_norm.with_codes`."""
    hidden = x.shape[1]
    if hidden % BLOCK or not stays_in_registers(hidden):
        return *launches(x, delta, weight, epsilon, out), *quantize_launches(out, codes, factors)
    return (rms_norm.by_row("add_rms_norm_int8", x, weight, epsilon, out, delta, codes, factors),)


def work(hidden: int, *, is_on_gpu: bool = False) -> KernelWork:
    """Return the work of a call: the work of RMSNorm, plus an addition, a read of `delta` and a write of `x` for each
    output.
    """
    alone = rms_norm.work(hidden, is_on_gpu=is_on_gpu)
    return replace(
        alone,
        flops_per_element=alone.flops_per_element + 1.0,
        bytes_per_element=alone.bytes_per_element + 2.0 * FLOAT_BYTES,
    )


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    x, weight, epsilon, out = RMS_NORM.examples(rng, size)
    return x, floats(rng, *x.shape) * np.float32(0.1), weight, epsilon, out


ADD_RMS_NORM = Kernel(
    "add_rms_norm",
    reference,
    add_rms_norm,
    work,
    (0, 4),
    contract("add_rms_norm"),
    _examples,
    parts=parts,
    by_token=(0, 1, 4),
    cuda=CudaKernel((rms_norm.CUDA,), launches, with_codes=with_codes, with_bf16=with_bf16),
)
