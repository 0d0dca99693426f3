"""The kernel Combine: the weighted sum of the outputs of each token's experts.

reference    NumPy, float64
numba        adds one expert after another, the largest weight first
cuda         a thread per number
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.cuda.launches import CudaKernel, CudaLaunch, CudaModule, of_each
from cbtop.compute.jit.compile import jit
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats


def reference(outputs: Any, places: Any, weights: Any, out: Any) -> None:
    """Set out[t] = sum over j of weights[t, j] * outputs[places[t, j]].

    outputs: float32 (tokens * used, hidden); places: int64 and weights: float32 (tokens, used); out: float32 (tokens,
    hidden).
    """
    out[:] = (outputs[places].astype(np.float64) * weights[..., None]).sum(axis=1)


@jit
def combine(outputs: Any, places: Any, weights: Any, out: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles."""
    columns = np.uint64(out.shape[1])
    for t in range(np.uint64(out.shape[0])):
        for j in range(np.uint64(places.shape[1])):
            place, weight = np.uint64(places[t, j]), weights[t, j]
            if j == np.uint64(0):
                for i in range(columns):
                    out[t, i] = weight * outputs[place, i]
            else:
                for i in range(columns):
                    out[t, i] += weight * outputs[place, i]


CUDA = CudaModule(
    "combine",
    r"""
KERNEL combine(const float* outputs, const int64_t* places, const float* weights, float* out, int columns, int used,
    int64_t size STAMP)
{
    ENTER
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size) {
        const int64_t pair = i / columns * used, column = i % columns;
        float sum = 0;
        for (int j = 0; j < used; j++) sum += weights[pair + j] * outputs[places[pair + j] * columns + column];
        out[i] = sum;
    }
    LEAVE
}
""",
)


def launches(outputs: Any, places: Any, weights: Any, out: Any) -> tuple[CudaLaunch, ...]:
    """Return one launch with a thread for each output."""
    sizes = np.int32(out.shape[1]), np.int32(places.shape[1]), np.int64(out.size)
    return (CudaLaunch(CUDA, "combine", *of_each(out.size), (outputs, places, weights, out, *sizes)),)


def work(used: int) -> KernelWork:
    """Return the work of a call.

    Its elements are outputs. For each expert, one value is read, multiplied and added.
    """
    return KernelWork(flops_per_element=2.0 * used - 1.0, bytes_per_element=FLOAT_BYTES * (used + 1.0))


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    tokens, used = 3, 2
    places = rng.permutation(tokens * used).reshape(tokens, used)
    weights = 0.1 + rng.random((tokens, used), dtype=np.float32)
    return floats(rng, tokens * used, size), places, weights, np.zeros((tokens, size), np.float32)


COMBINE = Kernel(
    "combine",
    reference,
    combine,
    work,
    (3,),
    contract("combine"),
    _examples,
    by_token=(1, 2, 3),
    cuda=CudaKernel((CUDA,), launches),
)
