"""LayerNorm: (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias.

reference    float64 in NumPy, seven temporaries
numba        three vectorised passes over a row in L1 (5-30x the speed of NumPy, 1.8-7.9x of torch)
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
from cbtop.compute.jit.compile import jit
from cbtop.compute.jit.halves import NOT_A_NUMBER
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats
from cbtop.compute.kernels.quantize_rows import BLOCK, SCALES
from cbtop.compute.kernels.quantize_rows import launches as quantize_launches
from cbtop.compute.kernels.rms_norm import CUDA_SCALE, LARGEST_SUM


def reference(x: Any, weight: Any, bias: Any, epsilon: float, out: Any) -> None:
    """Set out to the LayerNorm of x, both float32 (tokens, hidden). weight, bias: float32 (hidden,).

    `bias` may be empty. (Ba, Kiros & Hinton 2016, "Layer Normalization", equations 3 and 4; epsilon is added as in
    all implementations)
    """
    wide = x.astype(np.float64)
    apart = wide - wide.mean(axis=1, keepdims=True)
    variance = (apart * apart).mean(axis=1, keepdims=True)
    out[:] = apart / np.sqrt(variance + epsilon) * weight + (bias if bias.size else 0.0)


@jit
def layer_norm(x: Any, weight: Any, bias: Any, epsilon: float, out: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles.

    A row with a sum of squares above LARGEST_SUM becomes NaN.
    """
    hidden = np.uint64(x.shape[1])
    for t in range(np.uint64(x.shape[0])):
        total = np.float32(0)
        for i in range(hidden):
            total += x[t, i]
        mean = np.float32(total / hidden)
        squares = np.float32(0)
        for i in range(hidden):
            apart = x[t, i] - mean
            squares += apart * apart
        scale = np.float32(1.0 / np.sqrt(squares / hidden + epsilon))
        if bias.shape[0]:
            for i in range(hidden):
                out[t, i] = (x[t, i] - mean) * scale * weight[i] + bias[i]
        else:
            for i in range(hidden):
                out[t, i] = (x[t, i] - mean) * scale * weight[i]
        if squares > LARGEST_SUM:
            out[t] = np.int32(NOT_A_NUMBER).view(np.float32)


CUDA = CudaModule(
    "layer_norm",
    SCALES
    + CUDA_SCALE
    + f"const int IN_REGISTERS = {IN_REGISTERS};"
    + r"""

// The fours of a row, in the registers of its threads: number `n` of a thread is `threadIdx.x + n * blockDim.x`.
struct Row {
    float4 own[IN_REGISTERS], by[IN_REGISTERS], more[IN_REGISTERS];
    float scale;

    // `bias`: or null. `own` less the mean; what lies behind the row is 0.
    __device__ __forceinline__ void read(
        const float* x, const float* weight, const float* bias, float epsilon, int fours, float* space)
    {
        const float4 nothing = make_float4(0, 0, 0, 0);
        float sum = 0, squares = 0;
#pragma unroll
        for (int n = 0; n < IN_REGISTERS; n++) {
            const int at = threadIdx.x + n * blockDim.x;
            own[n] = at < fours ? ((const float4*)x)[at] : nothing;
            by[n] = at < fours ? ((const float4*)weight)[at] : nothing;
            more[n] = bias && at < fours ? ((const float4*)bias)[at] : nothing;
            sum += own[n].x + own[n].y + own[n].z + own[n].w;
        }
        const float mean = block_sum(sum, space) / (4 * fours);
#pragma unroll
        for (int n = 0; n < IN_REGISTERS; n++) {
            if (threadIdx.x + n * blockDim.x < fours)
                own[n] = make_float4(own[n].x - mean, own[n].y - mean, own[n].z - mean, own[n].w - mean);
            squares += own[n].x * own[n].x + own[n].y * own[n].y + own[n].z * own[n].z + own[n].w * own[n].w;
        }
        scale = scale_of(block_sum(squares, space), 4 * fours, epsilon);
    }
    __device__ __forceinline__ void normed(int n, float (&v)[4]) const
    {
        v[0] = own[n].x * scale * by[n].x + more[n].x;
        v[1] = own[n].y * scale * by[n].y + more[n].y;
        v[2] = own[n].z * scale * by[n].z + more[n].z;
        v[3] = own[n].w * scale * by[n].w + more[n].w;
    }
};

// With ROUNDS the output also in bfloat16.
template <bool ROUNDS>
__device__ __forceinline__ void norm_row(const float* x, const float* weight, const float* bias, float epsilon,
    float* out, int hidden, uint16_t* rounded)
{
    __shared__ float space[32];
    x += (int64_t)blockIdx.x * hidden;
    out += (int64_t)blockIdx.x * hidden;
    if (ROUNDS) rounded += (int64_t)blockIdx.x * hidden;
    const int fours = hidden / 4;
    if (hidden % 4 == 0 && fours <= IN_REGISTERS * blockDim.x) {
        Row row;
        row.read(x, weight, bias, epsilon, fours, space);
#pragma unroll
        for (int n = 0; n < IN_REGISTERS; n++) {
            const int at = threadIdx.x + n * blockDim.x;
            float v[4];
            row.normed(n, v);
            if (at < fours) {
                ((float4*)out)[at] = make_float4(v[0], v[1], v[2], v[3]);
                if (ROUNDS) ((uint2*)rounded)[at] = make_uint2(two_bf16(v[0], v[1]), two_bf16(v[2], v[3]));
            }
        }
    } else {
        float sum = 0, squares = 0;
        for (int i = threadIdx.x; i < hidden; i += blockDim.x) sum += x[i];
        const float mean = block_sum(sum, space) / hidden;
        for (int i = threadIdx.x; i < hidden; i += blockDim.x) squares += (x[i] - mean) * (x[i] - mean);
        const float scale = scale_of(block_sum(squares, space), hidden, epsilon);
        for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
            const float v = (x[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0.0f);
            out[i] = v;
            if (ROUNDS) rounded[i] = to_bf16(v);
        }
    }
}

KERNEL layer_norm(const float* x, const float* weight, const float* bias, int biased, float epsilon, float* out,
    int hidden STAMP)
{
    ENTER
    norm_row<false>(x, weight, biased ? bias : nullptr, epsilon, out, hidden, nullptr);
    LEAVE
}

KERNEL layer_norm_bf16(const float* x, const float* weight, const float* bias, int biased, float epsilon, float* out,
    int hidden, uint16_t* rounded STAMP)
{
    ENTER
    norm_row<true>(x, weight, biased ? bias : nullptr, epsilon, out, hidden, rounded);
    LEAVE
}

// The same, and its output as quantize_rows leaves it.
KERNEL layer_norm_int8(const float* x, const float* weight, const float* bias, int biased, float epsilon, float* out,
    int hidden, uint32_t* codes, float4* factors STAMP)
{
    ENTER
    __shared__ float space[32];
    x += (int64_t)blockIdx.x * hidden;
    out += (int64_t)blockIdx.x * hidden;
    codes += (int64_t)blockIdx.x * (hidden / 4);
    factors += (int64_t)blockIdx.x * (hidden / 32);
    const int fours = hidden / 4;
    Row row;
    row.read(x, weight, biased ? bias : nullptr, epsilon, fours, space);
#pragma unroll
    for (int n = 0; n < IN_REGISTERS; n++) {
        float v[4];
        row.normed(n, v);
        write_coded(v, threadIdx.x + n * blockDim.x, fours, out, codes, factors);
    }
    LEAVE
}
""",
)


def _by_row(entry: str, x: Any, weight: Any, bias: Any, epsilon: float, out: Any, *more: Any) -> CudaLaunch:
    """Return a launch of `entry` with a block for each row. `more` contains additional arguments."""
    rows, hidden = x.shape
    arguments = x, weight, bias, np.int32(bias.size > 0), np.float32(epsilon), out, np.int32(hidden), *more
    return CudaLaunch(CUDA, entry, *of_rows(rows, hidden), arguments)


def launches(x: Any, weight: Any, bias: Any, epsilon: float, out: Any) -> tuple[CudaLaunch, ...]:
    """Return one launch with a block for each row."""
    return (_by_row("layer_norm", x, weight, bias, epsilon, out),)


def with_bf16(x: Any, weight: Any, bias: Any, epsilon: float, out: Any, rounded: Any) -> tuple[CudaLaunch, ...]:
    """Return the launch that also writes `out` as bfloat16, to the beginning of `rounded` (uint16)."""
    return (_by_row("layer_norm_bf16", x, weight, bias, epsilon, out, rounded),)


def with_codes(
    x: Any, weight: Any, bias: Any, epsilon: float, out: Any, codes: Any, factors: Any
) -> tuple[CudaLaunch, ...]:
    """Return the launches that also quantise `out`.

    The results are written to the beginning of `codes` and `factors`.

    This is a single launch if rows consist of whole blocks of 32 and fit into registers.
    """
    hidden = x.shape[1]
    if hidden % BLOCK or not stays_in_registers(hidden):
        return *launches(x, weight, bias, epsilon, out), *quantize_launches(out, codes, factors)
    return (_by_row("layer_norm_int8", x, weight, bias, epsilon, out, codes, factors),)


def work(hidden: int, *, has_bias: bool, is_on_gpu: bool = False) -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are outputs.

    An output takes
    - an addition for the mean,
    - a subtraction, a square and an addition for the variance,
    - a subtraction, two multiplications and the addition of the bias.

    x is read three times, or once on a GPU if its registers can hold the row.
    """
    readings = 1.0 if is_on_gpu and stays_in_registers(hidden) else 3.0
    return KernelWork(
        flops_per_element=7.0 + has_bias,
        bytes_per_call=hidden * FLOAT_BYTES * (1 + has_bias),
        bytes_per_element=(readings + 1.0) * FLOAT_BYTES,
    )


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    x = floats(rng, 3, size)
    x[0] *= np.float32(1e-3)  # the values in the examples are small, so that epsilon matters
    x[1] += np.float32(10)  # the values in the examples have an offset, so that the mean matters
    return x, floats(rng, size), floats(rng, size), 1e-5, np.zeros((3, size), np.float32)


LAYER_NORM = Kernel(
    "layer_norm",
    reference,
    layer_norm,
    work,
    (4,),
    contract("layer_norm"),
    _examples,
    by_token=(0, 4),
    cuda=CudaKernel((CUDA,), launches, with_codes=with_codes, with_bf16=with_bf16),
)
