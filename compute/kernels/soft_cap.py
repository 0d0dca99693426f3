"""Soft cap: limit logits to the range from -cap to cap, and leave small logits nearly unchanged.

reference    NumPy, float64
numba        one vectorised pass with its own hyperbolic tangent
cuda         one thread per number
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.activations import each_tanh
from cbtop.compute.contracts import contract
from cbtop.compute.cuda.launches import CudaKernel, CudaLaunch, CudaModule, of_each
from cbtop.compute.jit.compile import jit
from cbtop.compute.jit.exponential import TANGENT_FLOPS
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats


def reference(x: Any, cap: float, out: Any) -> None:
    """Set out = cap * tanh(x / cap). x, out: float32 (tokens, vocabulary)."""
    out[:] = cap * np.tanh(x.astype(np.float64) / cap)


@jit
def soft_cap(x: Any, cap: float, out: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles."""
    columns, largest, inverse = np.uint64(x.shape[1]), np.float32(cap), np.float32(1 / cap)
    for t in range(np.uint64(x.shape[0])):
        for i in range(columns):
            out[t, i] = largest * each_tanh(np.float32(x[t, i] * inverse))


CUDA = CudaModule(
    "soft_cap",
    r"""
KERNEL soft_cap(const float* x, float cap, float* out, int64_t size STAMP)
{
    ENTER
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size) out[i] = cap * tanhf(x[i] / cap);
    LEAVE
}
""",
)


def launches(x: Any, cap: float, out: Any) -> tuple[CudaLaunch, ...]:
    """Return one launch with a thread for each output."""
    return (CudaLaunch(CUDA, "soft_cap", *of_each(x.size), (x, np.float32(cap), out, np.int64(x.size))),)


def work() -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are outputs. An output takes one read and
    one write.
    """
    return KernelWork(flops_per_element=TANGENT_FLOPS + 2.0, bytes_per_element=2.0 * FLOAT_BYTES)


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    return 20 * floats(rng, 3, size), 15.0, np.zeros((3, size), np.float32)


SOFT_CAP = Kernel(
    "soft_cap",
    reference,
    soft_cap,
    work,
    (2,),
    contract("soft_cap"),
    _examples,
    by_token=(0, 2),
    cuda=CudaKernel((CUDA,), launches),
)
