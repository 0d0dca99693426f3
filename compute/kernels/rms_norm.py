"""RMSNorm: x / sqrt(mean(x²) + epsilon) * weight.

reference    float64 in NumPy, five temporaries
numba        two vectorised passes over a row in L1 (9-14x the speed of NumPy)
cuda         one block per row; the row stays in the registers of the threads
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.cuda.launches import (
    IN_REGISTERS,
    CudaKernel,
    CudaLaunch,
    CudaModule,
    of_rows,
    stays_in_registers,
)
from cbtop.compute.jit.compile import jit_as_written, jit_inlined, jit_inlined_as_written
from cbtop.compute.jit.halves import NOT_A_NUMBER
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats
from cbtop.compute.kernels.quantize_rows import BLOCK, SCALES
from cbtop.compute.kernels.quantize_rows import launches as quantize_launches

# The largest allowed sum of the squares of a row, a third of float32's range. Rows with larger sums become NaN. With
# an infinite sum, the norm would be zeros, which look valid. Because of fastmath, compiled code cannot test for
# infinity.
LARGEST_SUM = np.float32(1e38)


def reference(x: Any, weight: Any, epsilon: float, out: Any) -> None:
    """Set out to the RMSNorm of x, both float32 (tokens, hidden).

    weight: float32 (hidden,). (Zhang & Sennrich 2019)
    """
    wide = x.astype(np.float64)
    out[:] = wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + epsilon) * weight


@jit_inlined
def scale_of(squares: Any, count: Any, epsilon: Any) -> Any:
    """Return the factor that RMSNorm applies to a row of `count` numbers.

    `squares` is the sum of the row's squares. If `squares` is above LARGEST_SUM, the factor is NaN.
    """
    if squares > LARGEST_SUM:
        return np.int32(NOT_A_NUMBER).view(np.float32)
    return np.float32(1.0 / np.sqrt(squares / count + epsilon))


@jit_inlined
def scale_of_row(x: Any, t: Any, epsilon: Any) -> Any:
    """Return the factor that RMSNorm applies to the row x[t], see `scale_of`."""
    hidden = np.uint64(x.shape[1])
    squares = np.float32(0)
    for i in range(hidden):
        squares += x[t, i] * x[t, i]
    return scale_of(squares, hidden, epsilon)


@jit_inlined_as_written
def multiply_row(x: Any, t: Any, scale: Any, weight: Any, out: Any) -> None:
    """Set out[t] = x[t] * scale * weight.

    The function is compiled without fastmath, so that the result is NaN if the scale is NaN.
    """
    for i in range(np.uint64(x.shape[1])):
        out[t, i] = x[t, i] * scale * weight[i]


@jit_as_written
def rms_norm(x: Any, weight: Any, epsilon: float, out: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles.

    A row with a sum of squares above LARGEST_SUM becomes NaN.
    """
    for t in range(np.uint64(x.shape[0])):
        multiply_row(x, t, scale_of_row(x, t, epsilon), weight, out)


CUDA_SCALE = (
    f"const float LARGEST_SUM = {LARGEST_SUM:.0e}f;"
    + r"""

// What a row of so many numbers is multiplied by; NaN where their squares are more than LARGEST_SUM.
__device__ __forceinline__ float scale_of(float squares, int count, float epsilon)
{
    return squares > LARGEST_SUM ? __uint_as_float(0x7fffffff) : 1 / sqrtf(squares / count + epsilon);
}
"""
)
CUDA = CudaModule(
    "rms_norm",
    SCALES
    + CUDA_SCALE
    + f"const int IN_REGISTERS = {IN_REGISTERS};"
    + r"""

__device__ __forceinline__ float4 sum_of(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// With ADDS delta is added to x before; with ROUNDS the output also in bfloat16.
template <bool ADDS, bool ROUNDS>
__device__ __forceinline__ void norm_row(
    float* x, const float* delta, const float* weight, float epsilon, float* out, int hidden, uint16_t* rounded)
{
    __shared__ float space[32];
    x += (int64_t)blockIdx.x * hidden;
    out += (int64_t)blockIdx.x * hidden;
    if (ADDS) delta += (int64_t)blockIdx.x * hidden;
    if (ROUNDS) rounded += (int64_t)blockIdx.x * hidden;
    const int fours = hidden / 4;
    float squares = 0;
    if (hidden % 4 == 0 && fours <= IN_REGISTERS * blockDim.x) {
        float4 own[IN_REGISTERS], by[IN_REGISTERS];
#pragma unroll
        for (int n = 0; n < IN_REGISTERS; n++) {
            const int at = threadIdx.x + n * blockDim.x;
            if (at < fours) {
                own[n] = ((const float4*)x)[at];
                if (ADDS) ((float4*)x)[at] = own[n] = sum_of(own[n], ((const float4*)delta)[at]);
                by[n] = ((const float4*)weight)[at];
                squares += own[n].x * own[n].x + own[n].y * own[n].y + own[n].z * own[n].z + own[n].w * own[n].w;
            }
        }
        const float scale = scale_of(block_sum(squares, space), hidden, epsilon);
#pragma unroll
        for (int n = 0; n < IN_REGISTERS; n++) {
            const int at = threadIdx.x + n * blockDim.x;
            if (at < fours) {
                const float4 v = make_float4(
                    own[n].x * scale * by[n].x, own[n].y * scale * by[n].y, own[n].z * scale * by[n].z,
                    own[n].w * scale * by[n].w);
                ((float4*)out)[at] = v;
                if (ROUNDS) ((uint2*)rounded)[at] = make_uint2(two_bf16(v.x, v.y), two_bf16(v.z, v.w));
            }
        }
    } else {
        for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
            if (ADDS) x[i] += delta[i];
            squares += x[i] * x[i];
        }
        const float scale = scale_of(block_sum(squares, space), hidden, epsilon);
        for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
            const float v = x[i] * scale * weight[i];
            out[i] = v;
            if (ROUNDS) rounded[i] = to_bf16(v);
        }
    }
}

// The output also as quantize_rows leaves it: eight threads have a block of 32 numbers.
template <bool ADDS>
__device__ __forceinline__ void norm_coded(
    float* x, const float* delta, const float* weight, float epsilon, float* out, int hidden, uint32_t* codes,
    float4* factors)
{
    __shared__ float space[32];
    x += (int64_t)blockIdx.x * hidden;
    out += (int64_t)blockIdx.x * hidden;
    if (ADDS) delta += (int64_t)blockIdx.x * hidden;
    codes += (int64_t)blockIdx.x * (hidden / 4);
    factors += (int64_t)blockIdx.x * (hidden / 32);
    const int fours = hidden / 4;
    const float4 nothing = make_float4(0, 0, 0, 0);
    float4 own[IN_REGISTERS], by[IN_REGISTERS];
    float squares = 0;
#pragma unroll
    for (int n = 0; n < IN_REGISTERS; n++) {
        const int at = threadIdx.x + n * blockDim.x;
        own[n] = at < fours ? ((const float4*)x)[at] : nothing;
        if (ADDS && at < fours) ((float4*)x)[at] = own[n] = sum_of(own[n], ((const float4*)delta)[at]);
        by[n] = at < fours ? ((const float4*)weight)[at] : nothing;
        squares += own[n].x * own[n].x + own[n].y * own[n].y + own[n].z * own[n].z + own[n].w * own[n].w;
    }
    const float norm = scale_of(block_sum(squares, space), hidden, epsilon);
#pragma unroll
    for (int n = 0; n < IN_REGISTERS; n++) {
        const int at = threadIdx.x + n * blockDim.x;
        const float v[4] = {own[n].x * norm * by[n].x, own[n].y * norm * by[n].y, own[n].z * norm * by[n].z,
                            own[n].w * norm * by[n].w};
        write_coded(v, at, fours, out, codes, factors);
    }
}

KERNEL rms_norm(float* x, const float* weight, float epsilon, float* out, int hidden STAMP)
{
    ENTER
    norm_row<false, false>(x, nullptr, weight, epsilon, out, hidden, nullptr);
    LEAVE
}

KERNEL rms_norm_bf16(float* x, const float* weight, float epsilon, float* out, int hidden, uint16_t* rounded STAMP)
{
    ENTER
    norm_row<false, true>(x, nullptr, weight, epsilon, out, hidden, rounded);
    LEAVE
}

KERNEL rms_norm_int8(float* x, const float* weight, float epsilon, float* out, int hidden, uint32_t* codes,
    float4* factors STAMP)
{
    ENTER
    norm_coded<false>(x, nullptr, weight, epsilon, out, hidden, codes, factors);
    LEAVE
}

KERNEL add_rms_norm(float* x, const float* weight, float epsilon, float* out, int hidden, const float* delta STAMP)
{
    ENTER
    norm_row<true, false>(x, delta, weight, epsilon, out, hidden, nullptr);
    LEAVE
}

KERNEL add_rms_norm_bf16(float* x, const float* weight, float epsilon, float* out, int hidden, const float* delta,
    uint16_t* rounded STAMP)
{
    ENTER
    norm_row<true, true>(x, delta, weight, epsilon, out, hidden, rounded);
    LEAVE
}

KERNEL add_rms_norm_int8(float* x, const float* weight, float epsilon, float* out, int hidden, const float* delta,
    uint32_t* codes, float4* factors STAMP)
{
    ENTER
    norm_coded<true>(x, delta, weight, epsilon, out, hidden, codes, factors);
    LEAVE
}
""",
)


def by_row(entry: str, x: Any, weight: Any, epsilon: float, out: Any, *more: Any) -> CudaLaunch:
    """Return a launch of `entry` with a block for each row. `more` contains the arguments after the sizes."""
    rows, hidden = x.shape
    arguments = x, weight, np.float32(epsilon), out, np.int32(hidden), *more
    return CudaLaunch(CUDA, entry, *of_rows(rows, hidden), arguments)


def launches(x: Any, weight: Any, epsilon: float, out: Any) -> tuple[CudaLaunch, ...]:
    """Return one launch with a block for each row."""
    return (by_row("rms_norm", x, weight, epsilon, out),)


def with_bf16(x: Any, weight: Any, epsilon: float, out: Any, rounded: Any) -> tuple[CudaLaunch, ...]:
    """Return the launch that also writes `out` as bfloat16, to the beginning of `rounded` (uint16)."""
    return (by_row("rms_norm_bf16", x, weight, epsilon, out, rounded),)


def with_codes(x: Any, weight: Any, epsilon: float, out: Any, codes: Any, factors: Any) -> tuple[CudaLaunch, ...]:
    """Return the launches that also quantise `out`.

    The results are written to the beginning of `codes` and `factors`.

    This is a single launch if rows consist of whole blocks of 32 and fit into registers.
    """
    hidden = x.shape[1]
    if hidden % BLOCK or not stays_in_registers(hidden):
        return *launches(x, weight, epsilon, out), *quantize_launches(out, codes, factors)
    return (by_row("rms_norm_int8", x, weight, epsilon, out, codes, factors),)


def work(hidden: int, *, is_on_gpu: bool = False) -> KernelWork:
    """Return the work of a call.

    Its elements are outputs. An output takes a square, an addition and two multiplications.

    x is read twice, or once on a GPU if its registers can hold the row.
    """
    readings = 1.0 if is_on_gpu and stays_in_registers(hidden) else 2.0
    moved = (readings + 1.0) * FLOAT_BYTES
    return KernelWork(flops_per_element=4.0, bytes_per_call=hidden * FLOAT_BYTES, bytes_per_element=moved)


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    x = floats(rng, 3, size)
    x[0] *= np.float32(1e-3)  # the values in the examples are small, so that epsilon matters
    return x, floats(rng, size), 1e-6, np.zeros((3, size), np.float32)


RMS_NORM = Kernel(
    "rms_norm",
    reference,
    rms_norm,
    work,
    (3,),
    contract("rms_norm"),
    _examples,
    by_token=(0, 3),
    cuda=CudaKernel((CUDA,), launches, with_codes=with_codes, with_bf16=with_bf16),
)
