"""Quantise rows: round activations to int8, for products in int8. 32 activations share a scale.

reference    NumPy
numba        a block is two vectors, because it needs two sums; first the largest magnitude, then the codes
cuda         one warp per block, one thread per number
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.cuda.launches import WARP, CudaKernel, CudaLaunch, CudaModule, line
from cbtop.compute.jit.compile import jit_as_written, jit_inlined_as_written
from cbtop.compute.jit.halves import INFINITE, NOT_A_NUMBER
from cbtop.compute.jit.vectors import largest_magnitude, load_floats, store_rounded
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats

BLOCK = 32
# Number of factors of a block of 32 activations. They are its scale, and -scale times three sums of codes: of all
# codes, of the first 16, and of the last 16.
FACTORS = 4
LARGEST = np.float32(127)
SMALLEST = np.float32(2.0**-126)  # the smallest scale that is not 0; the inverse of a smaller scale would be infinite


def reference(x: Any, codes: Any, factors: Any) -> None:
    """Write codes and factors so that x is about codes * scale. The error is at most half the scale.

    - x: float32 (tokens, columns), whole blocks of 32.
    - codes: the bytes of int8 (tokens, columns).
    - factors: float32 (tokens, columns / 8).

    A block of zeros has the scale 0. Other scales are at least 2^-126. A block with NaN or infinity has the scale
    NaN.
    """
    tokens, columns = x.shape
    is_finite = np.isfinite(x.reshape(tokens, -1, BLOCK)).all(axis=2)
    blocks = np.where(is_finite[..., None], x.reshape(tokens, -1, BLOCK), np.float32(0))
    largest = np.abs(blocks).max(axis=2)
    scales = np.where(largest > 0, np.maximum(largest / LARGEST, SMALLEST), np.float32(0)).astype(np.float32)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    rounded = np.rint(blocks * inverse[..., None])
    codes[:tokens, :columns] = rounded.reshape(tokens, -1).astype(np.int8).view(np.uint8)
    halves = -scales[..., None] * rounded.reshape(*scales.shape, 2, BLOCK // 2).sum(axis=3)
    whole = -scales * rounded.sum(axis=2)
    scales[~is_finite] = np.nan
    made = np.concatenate([scales[..., None], whole[..., None], halves], axis=2)
    factors[:tokens, : columns // 8] = made.reshape(tokens, -1)


@jit_inlined_as_written
def quantize_block(x: Any, t: Any, block: Any, codes: Any, factors: Any) -> None:
    """Compute `reference` for one block of a row. Every bit of the result is the same.

    This matters because a product with a code that differs by one would be wrong.
    """
    half = np.uint64(BLOCK // 2)
    first, place = block * np.uint64(BLOCK), block * np.uint64(FACTORS)
    begin, end = load_floats(x, t, first), load_floats(x, t, first + half)
    largest = largest_magnitude(begin, end)
    is_finite = largest < INFINITE
    largest = np.int32(largest if is_finite else 0)
    scale, inverse = np.float32(0), np.float32(0)
    if largest > np.int32(0):
        scale = max(np.float32(np.int32(largest).view(np.float32) / LARGEST), SMALLEST)
        inverse = np.float32(1) / scale
    low = store_rounded(codes, t, first, begin, inverse)
    high = store_rounded(codes, t, first + half, end, inverse)
    factors[t, place] = scale if is_finite else np.int32(NOT_A_NUMBER).view(np.float32)
    factors[t, place + np.uint64(1)] = -scale * np.float32(low + high)
    factors[t, place + np.uint64(2)] = -scale * np.float32(low)
    factors[t, place + np.uint64(3)] = -scale * np.float32(high)


@jit_as_written
def quantize_rows(x: Any, codes: Any, factors: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles."""
    for t in range(np.uint64(x.shape[0])):
        for block in range(np.uint64(x.shape[1] // BLOCK)):
            quantize_block(x, t, block, codes, factors)


# CUDA C++ code for quantising rows, which other sources include. `scale_of` computes a block's scale from the bits of
# its largest magnitude. `write_coded` writes codes and `factors` (as in `reference`). All threads of a warp must call
# it. Each thread has four numbers of a row, so eight threads share a block.
SCALES = r"""
struct Scale {
    bool is_finite;
    float scale, inverse;

    __device__ __forceinline__ float4 factors(int low, int high) const
    {
        return make_float4(is_finite ? scale : __int_as_float(0x7fc00000), -scale * (float)(low + high),
                           -scale * (float)low, -scale * (float)high);
    }
};
__device__ __forceinline__ Scale scale_of(int largest)
{
    Scale found = {largest < 0x7f800000, 0, 0};
    if (found.is_finite && largest) {
        found.scale = fmaxf(__fdiv_rn(__int_as_float(largest), 127.0f), 1.17549435e-38f);
        found.inverse = __fdiv_rn(1.0f, found.scale);
    }
    return found;
}
__device__ __forceinline__ void write_coded(
    const float (&v)[4], int at, int fours, float* out, uint32_t* codes, float4* factors)
{
    int largest = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) largest = max(largest, __float_as_int(v[i]) & 0x7fffffff);
    for (int apart = 4; apart; apart /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, apart));
    const Scale scale = scale_of(largest);
    uint32_t packed = 0;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int code = scale.is_finite ? __float2int_rn(v[i] * scale.inverse) : 0;
        packed |= (uint32_t)(code & 255) << 8 * i;
        sum += code;
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int other = __shfl_xor_sync(~0u, sum, 4);
    if (at < fours) {
        ((float4*)out)[at] = make_float4(v[0], v[1], v[2], v[3]);
        codes[at] = packed;
        if (at % 8 == 0) factors[at / 8] = scale.factors(sum, other);
    }
}
"""

CUDA = CudaModule(
    "quantize_rows",
    SCALES
    + r"""
KERNEL quantize_rows(const float* x, int8_t* codes, float* factors, int64_t blocks STAMP)
{
    ENTER
    const int64_t block = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (block < blocks) {
        float value = x[block * 32 + lane];
        int magnitude = __float_as_int(value) & 0x7fffffff;  // as bits, whose order is that of magnitudes
        const Scale scale = scale_of(__reduce_max_sync(~0u, magnitude));
        int code = scale.is_finite ? __float2int_rn(value * scale.inverse) : 0;
        codes[block * 32 + lane] = (int8_t)code;
        int low = __reduce_add_sync(~0u, lane < 16 ? code : 0), high = __reduce_add_sync(~0u, lane < 16 ? 0 : code);
        if (lane == 0) *(float4*)(factors + block * 4) = scale.factors(low, high);
    }
    LEAVE
}
""",
)
WARPS = 8


def launches(x: Any, codes: Any, factors: Any) -> tuple[CudaLaunch, ...]:
    """Return one launch with a warp for every 32 numbers.

    The results are written without gaps. So the rows of `codes` and `factors` must have exactly the length that x
    needs, unless there is only one row.
    """
    blocks = x.size // BLOCK
    arguments = x, codes, factors, np.int64(blocks)
    return (CudaLaunch(CUDA, "quantize_rows", *line(-(-blocks // WARPS), WARPS * WARP), arguments),)


def work() -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are activations.

    An activation is read, compared to find the largest, scaled, rounded and summed.
    """
    return KernelWork(flops_per_element=4.0, bytes_per_element=FLOAT_BYTES + 1.0 + FACTORS * FLOAT_BYTES / BLOCK)


def empty_codes(tokens: int, columns: int) -> tuple[Any, Any]:
    """Return codes and factors for `tokens` tokens and `columns` columns, filled with zeros."""
    return np.zeros((tokens, columns), np.uint8), np.zeros((tokens, columns // 8), np.float32)


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    x = floats(rng, 3, BLOCK * size)
    return x, *empty_codes(3, BLOCK * size)


QUANTIZE_ROWS = Kernel(
    "quantize_rows",
    reference,
    quantize_rows,
    work,
    (1, 2),
    contract("quantize_rows"),
    _examples,
    by_token=(0, 1, 2),
    cuda=CudaKernel((CUDA,), launches),
)
