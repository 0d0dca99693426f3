"""CUDA C++ of products. A block computes some rows of a matrix. Each thread of the block multiplies some units of
these rows.

Activations are int8 from quantize_rows, or unrounded float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from cbtop.compute.cuda.launches import WARP, Dimensions, whole_warps
from cbtop.compute.cuda.units import UNITS
from cbtop.compute.quantization.base import BlockFormat
from cbtop.compute.quantization.planes import UNIT

# A thread reads a unit (32 weights) of each of ROWS rows, so that ROWS loads are in flight, and uses each loaded
# activation ROWS times. dp4a computes four products of int8 and their sum (CUDA math API, "SIMD intrinsics"). A byte
# is converted to float32 by putting it into the low byte of a float32 with a last bit that is worth 1. This is faster
# than a conversion instruction, because an SM executes few of these at a time.
PRODUCTS = r"""
struct Int8 {  // of quantize_rows
    const uint8_t* codes;    // int8 (tokens, columns)
    const float* factors;    // (tokens, columns / 8): of each unit its scale, and this times minus sums of codes
};
struct Floats {
    const float* values;     // (tokens, columns)
};
struct Matrix {
    const uint8_t* planes;
    const float* bias;       // or null
    float* out;              // (tokens, rows)
    int rows;
};

// What a block's threads share, in float4: sums of its warps; for weights in units and float32 activations a unit of
// these for each thread along x, 4 floats apart, so that eight threads read 16 bytes each from all banks.
const int SPACE_OF_SUMS = 64, SPACE_OF_UNITS = 128 * 9;

__device__ __forceinline__ float4 as_floats(uint32_t word)
{
    word ^= 0x80808080u;
    const float zero = 8388736.0f;  // 2^23 + 128
    return make_float4(
        __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440)) - zero,
        __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7441)) - zero,
        __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7442)) - zero,
        __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7443)) - zero);
}
__device__ __forceinline__ float dot(float4 a, float4 b, float sum)
{
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

// sums[r][t] += what this thread has of row first + r . token first_token + t. AT_ONCE: units whose loads are under
// way together.
template <class Format, int ROWS, int TOKENS, int AT_ONCE>
__device__ __forceinline__ void accumulate(
    const Format& weights, Int8 x, int rows, int columns, int tokens, int first, int first_token, float4*,
    float (*sums)[TOKENS])
{
    const int units = columns / 32;
    for (int begin = threadIdx.x; begin < units; begin += AT_ONCE * blockDim.x) {
        uint32_t q[AT_ONCE][ROWS][8];
        float4 s[AT_ONCE][ROWS];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                int64_t row = min(first + r, rows - 1);
                int64_t at = row * units + min(begin + u * (int)blockDim.x, units - 1);
                weights.codes(at, q[u][r]);
                s[u][r] = weights.scales(at);
            }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int unit = begin + u * blockDim.x;
            if (unit >= units) break;
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                int64_t token = min(first_token + t, tokens - 1);
                const uint4* codes = (const uint4*)(x.codes + token * columns + unit * 32);
                uint4 a = __ldg(codes), b = __ldg(codes + 1);
                float4 f = __ldg((const float4*)(x.factors + token * (columns / 8) + unit * 4));
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const uint32_t* w = q[u][r];
                    int low = __dp4a((int)w[0], (int)a.x, 0), high = __dp4a((int)w[4], (int)b.x, 0);
                    low = __dp4a((int)w[1], (int)a.y, low);
                    low = __dp4a((int)w[2], (int)a.z, low);
                    low = __dp4a((int)w[3], (int)a.w, low);
                    high = __dp4a((int)w[5], (int)b.y, high);
                    high = __dp4a((int)w[6], (int)b.z, high);
                    high = __dp4a((int)w[7], (int)b.w, high);
                    float4 line = s[u][r];
                    sums[r][t] += f.x * (line.x * (float)low + line.z * (float)high) - (f.z * line.y + f.w * line.w);
                }
            }
        }
    }
}

// A unit of float32 is too far from the next for threads to read one each: they go through `space`, SPACE_OF_UNITS.
template <class Format, int ROWS, int TOKENS>
__device__ __forceinline__ void accumulate_units(
    const Format& weights, Floats x, int rows, int columns, int tokens, int first, int first_token, float4* space,
    float (*sums)[TOKENS])
{
    const int units = columns / 32;
    for (int begin = 0; begin < units; begin += blockDim.x) {
        const int count = min((int)blockDim.x, units - begin), unit = begin + min((int)threadIdx.x, count - 1);
        const bool is_mine = threadIdx.x < count;
        uint32_t q[ROWS][8];
        float4 s[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            int64_t at = (int64_t)min(first + r, rows - 1) * units + unit;
            weights.codes(at, q[r]);
            s[r] = weights.scales(at);
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            int64_t token = min(first_token + t, tokens - 1);
            const float4* from = (const float4*)(x.values + token * columns + begin * 32);
            __syncthreads();
            for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < count * 8; i += blockDim.x * blockDim.y)
                space[i + i / 8] = __ldg(from + i);
            __syncthreads();
            if (is_mine) {
                float part[2][ROWS] = {}, total[2] = {};
                const float4 one = make_float4(1, 1, 1, 1);
#pragma unroll
                for (int g = 0; g < 8; g++) {
                    float4 v = space[threadIdx.x * 9 + g];
                    total[g / 4] = dot(one, v, total[g / 4]);
#pragma unroll
                    for (int r = 0; r < ROWS; r++) part[g / 4][r] = dot(as_floats(q[r][g]), v, part[g / 4][r]);
                }
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    sums[r][t] += s[r].x * part[0][r] + s[r].y * total[0] + (s[r].z * part[1][r] + s[r].w * total[1]);
            }
        }
    }
}

// Of weights that are floats themselves: 16 bytes at a time, where rows are of as many.
template <class Format, int ROWS, int TOKENS>
__device__ __forceinline__ void accumulate_floats(
    const Format& weights, Floats x, int rows, int columns, int tokens, int first, int first_token,
    float (*sums)[TOKENS])
{
    const int N = Format::IN_16_BYTES;
    if (columns % N == 0) {
        for (int i = threadIdx.x * N; i < columns; i += blockDim.x * N) {
            float w[ROWS][N];
#pragma unroll
            for (int r = 0; r < ROWS; r++) weights.load((int64_t)min(first + r, rows - 1) * columns + i, w[r]);
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                int64_t token = min(first_token + t, tokens - 1);
                const float4* at = (const float4*)(x.values + token * columns + i);
#pragma unroll
                for (int n = 0; n < N; n += 4) {
                    float4 v = __ldg(at + n / 4);
#pragma unroll
                    for (int r = 0; r < ROWS; r++)
                        sums[r][t] = dot(make_float4(w[r][n], w[r][n + 1], w[r][n + 2], w[r][n + 3]), v, sums[r][t]);
                }
            }
        }
    } else {
        for (int i = threadIdx.x; i < columns; i += blockDim.x) {
            float w[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) w[r] = weights.one((int64_t)min(first + r, rows - 1) * columns + i);
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                float v = __ldg(x.values + (int64_t)min(first_token + t, tokens - 1) * columns + i);
#pragma unroll
                for (int r = 0; r < ROWS; r++) sums[r][t] = fmaf(w[r], v, sums[r][t]);
            }
        }
    }
}

template <class Format, int ROWS, int TOKENS, int>
__device__ __forceinline__ void accumulate(
    const Format& weights, Floats x, int rows, int columns, int tokens, int first, int first_token, float4* space,
    float (*sums)[TOKENS])
{
    if constexpr (__is_base_of(OfFloats, Format))
        accumulate_floats<Format, ROWS, TOKENS>(weights, x, rows, columns, tokens, first, first_token, sums);
    else
        accumulate_units<Format, ROWS, TOKENS>(weights, x, rows, columns, tokens, first, first_token, space, sums);
}

// The sums of all threads along x: the first warp of these has them then.
template <int ROWS, int TOKENS>
__device__ __forceinline__ void add_up(float (&sums)[ROWS][TOKENS], float* space)
{
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int t = 0; t < TOKENS; t++) sums[r][t] = warp_sum(sums[r][t]);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (warps > 1) {
        float* own = space + threadIdx.y * warps * ROWS * TOKENS;
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
                if (lane == 0) own[warp * ROWS * TOKENS + r * TOKENS + t] = sums[r][t];
        __syncthreads();
        if (warp == 0) {
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int t = 0; t < TOKENS; t++) {
                    sums[r][t] = 0;
                    for (int w = 0; w < warps; w++) sums[r][t] += own[w * ROWS * TOKENS + r * TOKENS + t];
                }
        }
    }
}

// The rows of a block, of tokens blockIdx.y * TOKENS to as many more: ROWS for each thread along y.
template <class Format, int ROWS, int TOKENS, int AT_ONCE, class X>
__device__ __forceinline__ void write_product(Matrix matrix, X x, int columns, int tokens, int block, float4* space)
{
    const int first = (block * blockDim.y + threadIdx.y) * ROWS, first_token = blockIdx.y * TOKENS;
    const Format weights(matrix.planes, (int64_t)matrix.rows * columns);
    float sums[ROWS][TOKENS] = {};
    accumulate<Format, ROWS, TOKENS, AT_ONCE>(
        weights, x, matrix.rows, columns, tokens, first, first_token, space, sums);
    add_up(sums, (float*)space);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
                if (first + r < matrix.rows && first_token + t < tokens) {
                    int64_t at = (int64_t)(first_token + t) * matrix.rows + first + r;
                    matrix.out[at] = sums[r][t] + (matrix.bias ? matrix.bias[first + r] : 0.0f);
                }
    }
}

// Of two matrices of as many rows, and `out` = SwiGLU of both products. Along y threads have rows of the gate and of
// up in turn.
template <class Format, int ROWS, int TOKENS, int AT_ONCE, class X>
__device__ __forceinline__ void write_gated(
    Matrix gate, Matrix up, float* out, X x, int columns, int tokens, float4* space)
{
    const Matrix matrix = threadIdx.y % 2 ? up : gate;
    const int first = (blockIdx.x * (blockDim.y / 2) + threadIdx.y / 2) * ROWS, first_token = blockIdx.y * TOKENS;
    const Format weights(matrix.planes, (int64_t)matrix.rows * columns);
    float sums[ROWS][TOKENS] = {};
    accumulate<Format, ROWS, TOKENS, AT_ONCE>(
        weights, x, matrix.rows, columns, tokens, first, first_token, space, sums);
    add_up(sums, (float*)space);
    __syncthreads();
    float* shown = (float*)space + threadIdx.y * ROWS * TOKENS;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
                if (first + r < matrix.rows && first_token + t < tokens) {
                    float sum = sums[r][t] + (matrix.bias ? matrix.bias[first + r] : 0.0f);
                    matrix.out[(int64_t)(first_token + t) * matrix.rows + first + r] = sum;
                    shown[r * TOKENS + t] = sum;
                }
    }
    __syncthreads();
    if (threadIdx.x < ROWS * TOKENS && threadIdx.y % 2 == 0) {
        const int row = first + threadIdx.x / TOKENS, token = first_token + threadIdx.x % TOKENS;
        if (row < matrix.rows && token < tokens) {
            float g = shown[threadIdx.x], u = shown[ROWS * TOKENS + threadIdx.x];
            out[(int64_t)token * matrix.rows + row] = g / (1 + expf(-g)) * u;
        }
    }
}
"""

# Numbers of tokens that can share one read of the weights; the module has an entry for each number.
TOKENS = (1, 2, 4, 8)
MOST_THREADS = 128
FEW_UNITS = 256  # a row of at most this many units (of 32 weights) is shared by one warp


def ways_of(block_format: BlockFormat, tokens: int, is_int8: bool, is_beside_others: bool = False) -> tuple[int, int]:
    """Return the number of rows that a thread computes, and the number of units that it reads together.

    Only int8 products read several units together. The returned numbers are the fastest on an H100, for one token in
    all projections of a 7B (`python -m benchmarks.gpu.gemv`).

    `is_beside_others` means that several matrices share a launch. Some of them are small, so a thread then gets fewer
    rows, and more threads run.
    """
    if not is_int8:
        return 4 if tokens == 1 and block_format.block_elements > 1 else 2, 1
    if tokens > 1:
        return 2, 1
    at_once = _at_once(block_format)
    return 1 if is_beside_others else at_once, at_once


def _at_once(block_format: BlockFormat) -> int:
    assert block_format.planes is not None
    return block_format.planes.at_once


def block_of(block_format: BlockFormat, columns: int, is_int8: bool, is_beside_others: bool = False) -> Dimensions:
    """Return the size of a block.

    The threads along x work on the same rows. Threads with a different y work on different rows.
    """
    if is_int8 and (is_beside_others or _at_once(block_format) == 1):
        return (MOST_THREADS, 1, 1) if columns // UNIT > FEW_UNITS else (WARP, MOST_THREADS // WARP, 1)
    return whole_warps(-(-columns // UNIT), MOST_THREADS // 2 if is_int8 else MOST_THREADS), 1, 1


# The parameters of an entry for int8 activations, and the C++ expression that makes the struct Int8 from these
# parameters.
INT8_PARAMETERS, INT8 = "const uint8_t* codes, const float* factors", "Int8{codes, factors}"
FLOATS_PARAMETERS, FLOATS = "const float* x", "Floats{x}"


def source_of(formats: Iterable[BlockFormat], entries: Iterable[str]) -> str:
    """Return the whole source of a module with `entries`, which multiply matrices of `formats`."""
    structs = {one.name: one.planes.source for one in formats if one.planes is not None}
    return UNITS + "".join(structs.values()) + PRODUCTS + "".join(entries)


def blocks_of(rows: int, block: Dimensions, in_thread: int) -> int:
    """Return the number of blocks for `rows` rows of a matrix, with `in_thread` rows per thread."""
    return -(-rows // (in_thread * block[1]))


def space_of(formats: Iterable[BlockFormat], is_int8: bool) -> str:
    """Return the declaration of the memory that the threads of a block share."""
    in_units = not is_int8 and any(one.block_elements > 1 for one in formats)
    return f"__shared__ float4 space[{'SPACE_OF_UNITS' if in_units else 'SPACE_OF_SUMS'}];"


def together(tokens: int) -> int:
    """Return how many tokens a launch for `tokens` tokens processes at a time. The result is one of TOKENS."""
    return next((some for some in TOKENS if some >= tokens), max(TOKENS))


def matrix_arguments(weights: Any, bias: Any, out: Any) -> tuple[Any, ...]:
    """Return the arguments that an entry takes for a matrix and for the output of its product.

    `matrix_parameters` declares these arguments.
    """
    return weights, bias, np.int32(bias.size > 0), out, np.int32(out.shape[1])


def matrix_parameters(name: str) -> str:
    """Return the parameters that an entry declares for a matrix and for the output of its product.

    The output is called `name` and has shape (tokens, rows).
    """
    return (
        f"const uint8_t* {name}_weights, const float* {name}_bias, int {name}_biased, float* {name}, int {name}_rows"
    )


def matrix(name: str) -> str:
    """Return the C++ expression that makes a Matrix from the parameters of `matrix_parameters`."""
    return f"Matrix{{{name}_weights, {name}_biased ? {name}_bias : nullptr, {name}, {name}_rows}}"


# In a mixture of experts, `blockIdx.z` selects the expert of a block. `x_step` is the distance between the
# activations of two experts. It is 0 if all experts read the same row.
EXPERTS = "const int64_t* experts, int x_step"
INT8_OF_EXPERT = "Int8{codes + blockIdx.z * x_step, factors + blockIdx.z * (x_step / 8)}"
FLOATS_OF_EXPERT = "Floats{x + blockIdx.z * x_step}"


def expert_arguments(weights: Any, out: Any) -> tuple[Any, ...]:
    """Return the arguments that an entry takes for the experts' weights and for their output.

    `weights` holds the planes of all experts, (experts, bytes).
    """
    return weights, np.int64(weights.shape[1]), out, np.int32(out.shape[1])


def expert_parameters(name: str) -> str:
    """Return the parameters of an entry that takes `expert_arguments`."""
    return f"const uint8_t* {name}_weights, int64_t {name}_bytes, float* {name}, int {name}_rows"


def expert_matrix(name: str) -> str:
    """Return the C++ expression that makes a Matrix of the block's expert from the parameters of
    `expert_parameters`.
    """
    planes = f"{name}_weights + experts[blockIdx.z] * {name}_bytes"
    return f"Matrix{{{planes}, nullptr, {expert_out(name, name)}, {name}_rows}}"


def expert_out(name: str, matrix: str) -> str:
    """Return the C++ expression for the address of the expert's part of an output. The output has as many rows as
    `matrix`.
    """
    return f"{name} + (int64_t)blockIdx.z * {matrix}_rows"
