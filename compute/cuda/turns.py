"""CUDA C++ of products of one token with int8 activations.

Few blocks run, and their warps process one row after another. All rows use the same activations, so each thread keeps
its part of the activations in registers. A thread loads two rows at the same time. On an H100 with Q4_K, this code
reads 18,944 x 3,584 weights at 2.34 TB/s, and one block per row reads only 1.86 TB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from cbtop.compute.cuda.launches import WARP, CudaModule, Dimensions
from cbtop.compute.cuda.products import (
    EXPERTS,
    INT8,
    INT8_OF_EXPERT,
    INT8_PARAMETERS,
    expert_matrix,
    expert_out,
    expert_parameters,
    matrix,
    matrix_parameters,
    source_of,
)
from cbtop.compute.quantization.base import BlockFormat
from cbtop.compute.quantization.planes import UNIT

# The possible numbers of units (of 32 weights) per thread; more do not fit into registers.
UNITS_OF_THREAD = (1, 2, 4, 5)
MOST_WARPS = 16  # largest number of warps that share a row
WARPS_OF_BLOCK = 4  # number of warps of a block, if each warp has rows of its own
BLOCKS_OF_MULTIPROCESSOR = 8
# How many warps run on a multiprocessor at a time. FEWER_WARPS is used if a thread has more than MANY_UNITS units.
WARPS_AT_A_TIME, FEWER_WARPS, MANY_UNITS = 16, 12, 4

TURNS = r"""
// The units of a thread: its own in the WARPS that share a row, and every one that many threads after it.

template <int UNITS, int WARPS>
struct Own {
    uint32_t codes[UNITS][8];
    float4 factors[UNITS];
    int units;
};

// Along x the warps of a block share a row, along y they have rows of their own.
template <int UNITS, int WARPS>
__device__ __forceinline__ Own<UNITS, WARPS> own_units(Int8 x, int columns)
{
    Own<UNITS, WARPS> own;
    own.units = columns / 32;
    const uint4 nothing = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int unit = threadIdx.x + u * 32 * WARPS;
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
template <class Format, int UNITS, int WARPS>
struct Read {
    uint32_t codes[UNITS][8];
    float4 scales[UNITS];

    __device__ __forceinline__ void load(const Format& weights, const Own<UNITS, WARPS>& own, int row)
    {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            // 32 bits suffice for 137e9 weights of a matrix. Numbers of 64 bits took registers that were spilled.
            const uint32_t unit = (uint32_t)row * own.units + threadIdx.x + u * 32 * WARPS;
            const uint32_t at = min(unit, (uint32_t)(row + 1) * own.units - 1);
            weights.codes(at, codes[u]);
            scales[u] = weights.scales(at);
        }
    }
    __device__ __forceinline__ float times(const Own<UNITS, WARPS>& own) const
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

// Asks for the codes of a block's first rows before anything is waited for: no launch before this writes weights.
template <int BYTES, int UNITS, int WARPS, int ROWS>
__device__ __forceinline__ void ahead(const uint8_t* planes, int rows, int columns)
{
    const int units = columns / 32, row = ROWS * (blockIdx.x * blockDim.y + threadIdx.y);
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int unit = threadIdx.x + u * 32 * WARPS;
            if (row + r < rows && unit < units)
                asm volatile("prefetch.global.L2 [%0];" ::"l"(planes + ((int64_t)(row + r) * units + unit) * BYTES));
        }
}

// Sums of the warps that share a row, in all their threads; `space`: 32 float2, of which turns take halves. Where
// warps share rows there is one along y: all of a block come here together.
template <int WARPS>
__device__ __forceinline__ float2 of_all_warps(float2 sum, float2* space, int turn)
{
    if (WARPS > 1) {
        float2* own = space + turn * WARPS;
        if (threadIdx.x % 32 == 0) own[threadIdx.x / 32] = sum;
        __syncthreads();
        sum = make_float2(0, 0);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
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
template <class Format, int UNITS, int WARPS>
__device__ __forceinline__ void two_rows(
    const Matrix& matrix, const Own<UNITS, WARPS>& own, int columns, int pair, bool is_there, float2* space, int turn)
{
    const Format weights(matrix.planes, (int64_t)matrix.rows * columns);
    const int row = min(2 * pair, matrix.rows - 1), other = min(row + 1, matrix.rows - 1);
    Read<Format, UNITS, WARPS> a, b;
    a.load(weights, own, row);
    b.load(weights, own, other);
    float2 sums = of_all_warps<WARPS>(make_float2(a.times(own), b.times(own)), space, turn);
    if (threadIdx.x == 0 && is_there) {
        write_row(matrix, row, sums.x);
        if (other > row) write_row(matrix, other, sums.y);
    }
}

template <class Format, int UNITS, int WARPS>
__device__ __forceinline__ void linear_in_turn(Matrix matrix, Int8 x, int columns, float2* space)
{
    const Own<UNITS, WARPS> own = own_units<UNITS, WARPS>(x, columns);
    const int pairs = (matrix.rows + 1) / 2, all = gridDim.x * blockDim.y;
    int turn = 0;
    for (int begin = blockIdx.x * blockDim.y; begin < pairs; begin += all, turn ^= 1) {
        const int pair = begin + threadIdx.y;
        two_rows<Format, UNITS, WARPS>(matrix, own, columns, min(pair, pairs - 1), pair < pairs, space, turn);
    }
}

// Three matrices of the same activations, whose rows stand behind each other.
template <class First, class Second, class Third, int UNITS, int WARPS>
__device__ __forceinline__ void qkv_in_turn(
    Matrix first, Matrix second, Matrix third, Int8 x, int columns, float2* space)
{
    const Own<UNITS, WARPS> own = own_units<UNITS, WARPS>(x, columns);
    const int of_first = (first.rows + 1) / 2, to_third = of_first + (second.rows + 1) / 2;
    const int pairs = to_third + (third.rows + 1) / 2, all = gridDim.x * blockDim.y;
    int turn = 0;
    for (int begin = blockIdx.x * blockDim.y; begin < pairs; begin += all, turn ^= 1) {
        const int pair = min(begin + (int)threadIdx.y, pairs - 1);
        const bool is_there = begin + threadIdx.y < pairs;
        if (pair < of_first)
            two_rows<First, UNITS, WARPS>(first, own, columns, pair, is_there, space, turn);
        else if (pair < to_third)
            two_rows<Second, UNITS, WARPS>(second, own, columns, pair - of_first, is_there, space, turn);
        else
            two_rows<Third, UNITS, WARPS>(third, own, columns, pair - to_third, is_there, space, turn);
    }
}

// A row of the gate beside that of up, and SwiGLU of both products.
template <class Gate, class Up, int UNITS, int WARPS>
__device__ __forceinline__ void gated_in_turn(Matrix gate, Matrix up, float* out, Int8 x, int columns, float2* space)
{
    const Own<UNITS, WARPS> own = own_units<UNITS, WARPS>(x, columns);
    const Gate gates(gate.planes, (int64_t)gate.rows * columns);
    const Up ups(up.planes, (int64_t)up.rows * columns);
    const int all = gridDim.x * blockDim.y;
    int turn = 0;
    for (int begin = blockIdx.x * blockDim.y; begin < gate.rows; begin += all, turn ^= 1) {
        const int row = min(begin + (int)threadIdx.y, gate.rows - 1);
        Read<Gate, UNITS, WARPS> a;
        Read<Up, UNITS, WARPS> b;
        a.load(gates, own, row);
        b.load(ups, own, row);
        float2 sums = of_all_warps<WARPS>(make_float2(a.times(own), b.times(own)), space, turn);
        if (threadIdx.x == 0 && begin + threadIdx.y < gate.rows) {
            float g = sums.x + (gate.bias ? gate.bias[row] : 0.0f), u = sums.y + (up.bias ? up.bias[row] : 0.0f);
            gate.out[row] = g;
            up.out[row] = u;
            out[row] = g / (1 + expf(-g)) * u;
        }
    }
}
"""


@dataclass(frozen=True, slots=True)
class ThreadShape:
    """How many threads share a row, and which part of the row each thread has.

    `warps` warps share a row. Each thread has `units` units (of 32 weights) of the row. Both numbers are template
    arguments.
    """

    units: int
    warps: int

    @property
    def block(self) -> Dimensions:
        """The size of a block. Threads with the same y share a row. Threads with different y have different rows."""
        return self.warps * WARP, 1 if self.warps > 1 else WARPS_OF_BLOCK, 1

    @property
    def bounds(self) -> str:
        """The launch bounds, which tell the compiler to leave enough registers for the loads of two rows."""
        threads = self.block[0] * self.block[1]
        blocks = max((FEWER_WARPS if self.units > MANY_UNITS else WARPS_AT_A_TIME) * WARP // threads, 1)
        return f"__launch_bounds__({threads}, {blocks})"

    def blocks(self, pieces: int, multiprocessors: int) -> int:
        """Return the number of blocks for `pieces` pieces of work.

        A block works on several pieces at the same time, one for each of its rows of threads along y. Then it takes
        the next pieces.
        """
        return min(-(-pieces // self.block[1]), BLOCKS_OF_MULTIPROCESSOR * multiprocessors)

    def __str__(self) -> str:
        return f"{self.units}x{self.warps}"


@cache
def shape_of(columns: int) -> ThreadShape | None:
    """Return how threads best share rows of `columns` columns, or None if the rows are too long.

    At most an eighth of the threads should be idle. If no shape achieves that, the shape with the fewest idle threads
    is used. Among equally good shapes, the result has the most loads in flight.
    """
    units, ways = columns // UNIT, []
    for warps in range(1, MOST_WARPS + 1):
        for each in UNITS_OF_THREAD:
            idle = each * warps * WARP - units
            if idle >= 0:
                ways.append((idle if 8 * idle > units else 0, -each, warps))
    if not ways:
        return None
    _, each, warps = min(ways)
    return ThreadShape(-each, warps)


def _code_bytes(block_format: BlockFormat) -> int:
    """Return the number of bytes that a unit (32 weights) takes in the first plane of its format."""
    assert block_format.planes is not None
    return block_format.planes.bits[0] * UNIT // 8


def module(
    name: str,
    formats: Sequence[BlockFormat],
    shape: ThreadShape,
    names: Sequence[str],
    more: str = "",
    *,
    of_experts: bool = False,
) -> CudaModule:
    """Return a module with one entry, `name`, which calls the function `name` of TURNS.

    The parameters of the entry are matrices of `formats`, called `names`, then an output called `more` (if it is
    given), then int8 activations. If `of_experts`, the entry is called `expert_` + `name`. Such an entry does not
    prefetch rows, because the experts are chosen too late.
    """
    rows = 1 if more else 2  # rows of a matrix in one piece of work
    ahead = "".join(
        f"    ahead<{_code_bytes(one)}, {shape.units}, {shape.warps}, {rows}>({of}_weights, {of}_rows, columns);\n"
        for of, one in [*zip(names, formats, strict=True)][: 3 - rows]
    )
    outs, x = [more] if more else [], INT8
    parameters = [*map(matrix_parameters, names), *(f"float* {one}" for one in outs)]
    given = [*map(matrix, names), *outs]
    entry = name
    if of_experts:
        ahead, entry, x = "", f"expert_{name}", INT8_OF_EXPERT
        parameters = [*map(expert_parameters, names), *(f"float* {one}" for one in outs), EXPERTS]
        given = [*map(expert_matrix, names), *(expert_out(one, names[0]) for one in outs)]
    body = f"""
KERNEL {shape.bounds} {entry}({", ".join([*parameters, INT8_PARAMETERS])}, int columns STAMP)
{{
{ahead}    ENTER
    __shared__ float2 space[32];  // the sums of warps that share rows
    {name}<{", ".join(one.name for one in formats)}, {shape.units}, {shape.warps}>(
        {", ".join([*given, x])}, columns, space);
    LEAVE
}}
"""
    structs = "_".join(one.name.lower() for one in formats)
    return CudaModule(f"{entry}_{shape}_{structs}", source_of(dict.fromkeys(formats), [TURNS, body]))
