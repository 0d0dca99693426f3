"""CUDA C++ of products of one token with int8 activations: few blocks, whose warps take rows in turn.

Each thread keeps its units of the activations in registers: they are the same of all rows. Of two rows at a time all
its loads are under way together. On an H100, of Q4_K, a block for each row reads 18,944 x 3,584 at 1.86 TB/s, this at
2.34.
"""

from __future__ import annotations

from collections.abc import Iterable

from cbtop.compute.cuda import products
from cbtop.compute.cuda.launches import WARP, Dimensions
from cbtop.compute.quantization.base import BlockFormat
from cbtop.compute.quantization.planes import UNIT

UNITS_OF_THREAD = (1, 2, 4, 5)  # an entry each: more do not stay in registers
MOST_WARPS = 16  # that share a row
WARPS_OF_BLOCK = 4  # where each has rows of its own
BLOCKS_OF_MULTIPROCESSOR = 8

TURNS = r"""
// The units of a thread: `unit` and every `stride`-th after it, as far as there are.
template <int UNITS>
struct Own {
    uint32_t codes[UNITS][8];
    float4 factors[UNITS];
    int unit, stride, units;
};

// Along x the warps of a block share a row, along y they have rows of their own.
template <int UNITS>
__device__ __forceinline__ Own<UNITS> own_units(Int8 x, int columns)
{
    Own<UNITS> own;
    own.unit = threadIdx.x;
    own.stride = blockDim.x;
    own.units = columns / 32;
    const uint4 nothing = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int unit = own.unit + u * own.stride;
        const bool is_there = unit < own.units;
        const uint4* at = (const uint4*)x.codes + 2 * unit;
        uint4 a = is_there ? __ldg(at) : nothing, b = is_there ? __ldg(at + 1) : nothing;
        uint32_t* q = own.codes[u];
        q[0] = a.x; q[1] = a.y; q[2] = a.z; q[3] = a.w;
        q[4] = b.x; q[5] = b.y; q[6] = b.z; q[7] = b.w;
        own.factors[u] = is_there ? __ldg((const float4*)x.factors + unit) : make_float4(0, 0, 0, 0);
    }
    return own;
}

// What of a row is read before anything is computed.
template <class Format, int UNITS>
struct Read {
    uint32_t codes[UNITS][8];
    float4 scales[UNITS];

    __device__ __forceinline__ void load(const Format& weights, const Own<UNITS>& own, int row)
    {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            int64_t at = (int64_t)row * own.units + min(own.unit + u * own.stride, own.units - 1);
            weights.codes(at, codes[u]);
            scales[u] = weights.scales(at);
        }
    }
    __device__ __forceinline__ float times(const Own<UNITS>& own) const
    {
        float sum = 0;
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            int low = 0, high = 0;
#pragma unroll
            for (int g = 0; g < 4; g++) {
                low = __dp4a((int)codes[u][g], (int)own.codes[u][g], low);
                high = __dp4a((int)codes[u][4 + g], (int)own.codes[u][4 + g], high);
            }
            float4 f = own.factors[u], s = scales[u];
            sum += f.x * (s.x * (float)low + s.z * (float)high) - (f.z * s.y + f.w * s.w);
        }
        return warp_sum(sum);
    }
};

// Sums of the warps that share a row, in all their threads; `space`: 32 float2, of which turns take halves. Where
// warps share rows there is one along y: all of a block come here together.
__device__ __forceinline__ float2 of_all_warps(float2 sum, float2* space, int turn)
{
    const int warps = blockDim.x / 32;
    if (warps > 1) {
        float2* own = space + turn * warps;
        if (threadIdx.x % 32 == 0) own[threadIdx.x / 32] = sum;
        __syncthreads();
        sum = make_float2(0, 0);
        for (int w = 0; w < warps; w++) {
            sum.x += own[w].x;
            sum.y += own[w].y;
        }
    }
    return sum;
}
__device__ __forceinline__ void write_row(const Matrix& matrix, int row, float sum)
{
    matrix.out[row] = sum + (matrix.bias ? matrix.bias[row] : 0.0f);
}

// Rows 2 * pair and the next one.
template <class Format, int UNITS>
__device__ __forceinline__ void two_rows(
    const Matrix& matrix, const Own<UNITS>& own, int columns, int pair, bool is_there, float2* space, int turn)
{
    const Format weights(matrix.planes, (int64_t)matrix.rows * columns);
    const int row = min(2 * pair, matrix.rows - 1), other = min(row + 1, matrix.rows - 1);
    Read<Format, UNITS> a, b;
    a.load(weights, own, row);
    b.load(weights, own, other);
    float2 sums = of_all_warps(make_float2(a.times(own), b.times(own)), space, turn);
    if (threadIdx.x == 0 && is_there) {
        write_row(matrix, row, sums.x);
        if (other > row) write_row(matrix, other, sums.y);
    }
}

template <class Format, int UNITS>
__device__ __forceinline__ void product_in_turn(Matrix matrix, Int8 x, int columns, float2* space)
{
    const Own<UNITS> own = own_units<UNITS>(x, columns);
    const int pairs = (matrix.rows + 1) / 2, all = gridDim.x * blockDim.y;
    int turn = 0;
    for (int begin = blockIdx.x * blockDim.y; begin < pairs; begin += all, turn ^= 1) {
        const int pair = begin + threadIdx.y;
        two_rows<Format, UNITS>(matrix, own, columns, min(pair, pairs - 1), pair < pairs, space, turn);
    }
}

// Three matrices of the same activations, whose rows stand behind each other.
template <class First, class Second, class Third, int UNITS>
__device__ __forceinline__ void products_in_turn(
    Matrix first, Matrix second, Matrix third, Int8 x, int columns, float2* space)
{
    const Own<UNITS> own = own_units<UNITS>(x, columns);
    const int of_first = (first.rows + 1) / 2, to_third = of_first + (second.rows + 1) / 2;
    const int pairs = to_third + (third.rows + 1) / 2, all = gridDim.x * blockDim.y;
    int turn = 0;
    for (int begin = blockIdx.x * blockDim.y; begin < pairs; begin += all, turn ^= 1) {
        const int pair = min(begin + (int)threadIdx.y, pairs - 1);
        const bool is_there = begin + threadIdx.y < pairs;
        if (pair < of_first)
            two_rows<First, UNITS>(first, own, columns, pair, is_there, space, turn);
        else if (pair < to_third)
            two_rows<Second, UNITS>(second, own, columns, pair - of_first, is_there, space, turn);
        else
            two_rows<Third, UNITS>(third, own, columns, pair - to_third, is_there, space, turn);
    }
}

// A row of the gate beside that of up, and SwiGLU of both products.
template <class Gate, class Up, int UNITS>
__device__ __forceinline__ void gated_in_turn(Matrix gate, Matrix up, float* out, Int8 x, int columns, float2* space)
{
    const Own<UNITS> own = own_units<UNITS>(x, columns);
    const Gate gates(gate.planes, (int64_t)gate.rows * columns);
    const Up ups(up.planes, (int64_t)up.rows * columns);
    const int all = gridDim.x * blockDim.y;
    int turn = 0;
    for (int begin = blockIdx.x * blockDim.y; begin < gate.rows; begin += all, turn ^= 1) {
        const int row = min(begin + (int)threadIdx.y, gate.rows - 1);
        Read<Gate, UNITS> a;
        Read<Up, UNITS> b;
        a.load(gates, own, row);
        b.load(ups, own, row);
        float2 sums = of_all_warps(make_float2(a.times(own), b.times(own)), space, turn);
        if (threadIdx.x == 0 && begin + threadIdx.y < gate.rows) {
            float g = sums.x + (gate.bias ? gate.bias[row] : 0.0f), u = sums.y + (up.bias ? up.bias[row] : 0.0f);
            gate.out[row] = g;
            up.out[row] = u;
            out[row] = g / (1 + expf(-g)) * u;
        }
    }
}
"""


SPACE = "__shared__ float2 space[32];"  # the sums of warps that share rows


def source_of(formats: Iterable[BlockFormat], entries: Iterable[str]) -> str:
    """The whole of a module whose entries multiply by matrices of these formats."""
    return products.source_of(formats, [TURNS, *entries])


def shape_of(columns: int) -> tuple[int, Dimensions] | None:
    """Units of a thread, and a block: the threads that share a row, and as many rows. Of what leaves an eighth of the
    threads at most without work, or as few as can be, the one with the most loads under way; None: rows are too long.
    """
    units = columns // UNIT
    ways = []
    for warps in range(1, MOST_WARPS + 1):
        for each in UNITS_OF_THREAD:
            idle = each * warps * WARP - units
            if idle >= 0:
                ways.append((idle if 8 * idle > units else 0, -each, warps))
    if not ways:
        return None
    _, each, warps = min(ways)
    return -each, (warps * WARP, 1 if warps > 1 else WARPS_OF_BLOCK, 1)


def blocks_for(pieces: int, block: Dimensions, multiprocessors: int) -> int:
    """The blocks that take so many pieces of work in turn, of which one along y has one at a time."""
    return min(-(-pieces // block[1]), BLOCKS_OF_MULTIPROCESSOR * multiprocessors)
