"""Residual add: x += delta.

reference    NumPy
numba        the same speed as NumPy, but without its call overhead for one token
cuda         one thread per four numbers
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.cuda.launches import CudaKernel, CudaLaunch, CudaModule, of_fours
from cbtop.compute.jit.compile import jit
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats


def reference(x: Any, delta: Any) -> None:
    """Set x += delta. Both are float32 (tokens, hidden)."""
    x += delta


@jit
def residual_add(x: Any, delta: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles."""
    columns = np.uint64(x.shape[1])
    for t in range(np.uint64(x.shape[0])):
        for i in range(columns):
            x[t, i] += delta[t, i]


CUDA = CudaModule(
    "residual_add",
    r"""
KERNEL residual_add(float* x, const float* delta, int64_t size STAMP)
{
    ENTER
    const int64_t i = 4 * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 4 <= size) {
        const float4 a = *(const float4*)(x + i), b = *(const float4*)(delta + i);
        *(float4*)(x + i) = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    } else
        for (int64_t j = i; j < size; j++) x[j] += delta[j];
    LEAVE
}
""",
)


def launches(x: Any, delta: Any) -> tuple[CudaLaunch, ...]:
    """Return one launch with a thread for every four numbers."""
    return (CudaLaunch(CUDA, "residual_add", *of_fours(x.size), (x, delta, np.int64(x.size))),)


def work() -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are outputs. An output takes two reads
    and one write.
    """
    return KernelWork(flops_per_element=1.0, bytes_per_element=3.0 * FLOAT_BYTES)


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    return floats(rng, 3, size), floats(rng, 3, size)


RESIDUAL_ADD = Kernel(
    "residual_add",
    reference,
    residual_add,
    work,
    (0,),
    contract("residual_add"),
    _examples,
    by_token=(0, 1),
    cuda=CudaKernel((CUDA,), launches),
)
