"""Take rows: copy the rows of an expert's tokens, one after another.

reference    NumPy
numba        copies a row at a time
cuda         one thread per number
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.cuda.launches import CudaKernel, CudaLaunch, CudaModule, of_each
from cbtop.compute.jit.compile import jit
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats


def reference(x: Any, tokens: Any, out: Any) -> None:
    """Set out[i] = x[tokens[i]].

    x: float32 (all tokens, hidden); tokens: int64; out: float32 (tokens, hidden).
    """
    out[:] = x[tokens]


@jit
def take_rows(x: Any, tokens: Any, out: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles."""
    columns = np.uint64(x.shape[1])
    for place in range(np.uint64(tokens.shape[0])):
        token = np.uint64(tokens[place])
        for i in range(columns):
            out[place, i] = x[token, i]


CUDA = CudaModule(
    "take_rows",
    r"""
KERNEL take_rows(const float* x, const int64_t* tokens, float* out, int columns, int64_t size STAMP)
{
    ENTER
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size) out[i] = x[tokens[i / columns] * columns + i % columns];
    LEAVE
}
""",
)


def launches(x: Any, tokens: Any, out: Any) -> tuple[CudaLaunch, ...]:
    """Return one launch with a thread for each output."""
    arguments = x, tokens, out, np.int32(out.shape[1]), np.int64(out.size)
    return (CudaLaunch(CUDA, "take_rows", *of_each(out.size), arguments),)


def work() -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are outputs. Each is read once and
    written once.
    """
    return KernelWork(bytes_per_element=2.0 * FLOAT_BYTES)


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    return floats(rng, 6, size), np.array([1, 2, 5]), np.zeros((3, size), np.float32)


TAKE_ROWS = Kernel(
    "take_rows",
    reference,
    take_rows,
    work,
    (2,),
    contract("take_rows"),
    _examples,
    by_token=(1, 2),
    cuda=CudaKernel((CUDA,), launches),
)
