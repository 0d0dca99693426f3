"""CUDA C++ of attention: a few rows over a divided context, and many rows by tensor cores.

A row is a head of a token. Rows of a group, and of several tokens, share every read of keys and values. Numbers of a
cache in float16 are multiplied as they are. Their factors (queries, and the softmax's weights) are float32, split
into two float16 that add up to it within 2^-24: two products instead of one, added in float32.
"""

from __future__ import annotations

ROWS = 8  # of a block with few rows
OUTPUTS = 128  # most numbers of a head's output in such a block
SLOT = ROWS * (OUTPUTS + 2)  # its partial result for the last block: outputs, maximum and sum of each row
FEW_THREADS = 256
MANY_ROWS, MANY_THREADS = 64, 128  # of a block with many rows

ATTENTION = r"""
#define LOWEST -1e30f          // below any score; a difference of two infinities would be no number
#define HIDDEN __int_as_float(0xff800000)  // the score of what is not seen
#define LOG2_E 1.4426950408889634f

struct Sizes {
    int tokens, heads, group, head_dim, stride, context;  // stride: numbers that a position takes in a cache
    __device__ __forceinline__ int rows() const { return tokens * group; }
    // No division where one token is all: what a block reads first waits for it.
    __device__ __forceinline__ int token_of(int row) const { return tokens == 1 ? 0 : row / group; }
    // Where a row of a group of heads stands in the queries and in the output.
    __device__ __forceinline__ int64_t place(int row, int kv_head) const
    {
        const int token = token_of(row);
        return ((int64_t)token * heads + kv_head * group + row - token * group) * head_dim;
    }
};
// Scores are kept as powers of two: a query times `unit` and a key is one, or what `held` makes of that.
struct Scores {
    float unit;
    __device__ __forceinline__ Scores(float scale, float) : unit(scale * LOG2_E) {}
    __device__ __forceinline__ float held(float score) const { return score; }
};
struct HeldScores {
    float unit, cap;
    __device__ __forceinline__ HeldScores(float scale, float cap) : unit(scale / cap), cap(cap * LOG2_E) {}
    __device__ __forceinline__ float held(float score) const { return cap * tanhf(score); }
};
__device__ __forceinline__ int first_seen(int position, int window)
{
    return window && position + 1 > window ? position + 1 - window : 0;
}
__device__ __forceinline__ float power(float exponent)
{
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(exponent));
    return value;
}
// 16 bytes that are read once, past the first-level cache; zeros where they are not there. Without a branch.
__device__ __forceinline__ uint4 load(const void* from, bool is_there)
{
    uint4 words;
    asm("{\n\t.reg .pred there;\n\tsetp.ne.b32 there, %5, 0;\n\t"
        "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
        "@there ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "l"(from), "r"((int)is_there));
    return words;
}
__device__ __forceinline__ float4 load_floats(const void* from, bool is_there)
{
    const uint4 words = load(from, is_there);
    return {__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z), __uint_as_float(words.w)};
}
// Of the four threads that have a row.
__device__ __forceinline__ float quad_max(float value)
{
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
    return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}
__device__ __forceinline__ float quad_sum(float value)
{
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
}
// A power of two that brings what is at most `largest` to about 1, so that float16 holds it.
__device__ __forceinline__ int exponent_of(float largest)
{
    return min(max(__float_as_int(largest) >> 23 & 255, 1), 253);
}
__device__ __forceinline__ float shrink(int exponent) { return __int_as_float((254 - exponent) << 23); }
__device__ __forceinline__ float grow(int exponent) { return __int_as_float(exponent << 23); }
"""

FEW = r"""
#define ROWS 8
#define OUTPUTS 128
#define WARPS 8
#define SLOT (ROWS * (OUTPUTS + 2))

// What a block works on: some rows of a group, and of the positions that these see a piece.
template <int PARTS> struct Piece {
    int kv_head, first_row, rows, part, unit, first, end, length, from, to, begin, window;
    __device__ __forceinline__ Piece(const Sizes& sizes) : kv_head(blockIdx.y)
    {
        first_row = blockIdx.z / PARTS * ROWS;
        rows = min(ROWS, sizes.rows() - first_row);
        part = blockIdx.z % PARTS * OUTPUTS;
        unit = blockIdx.z * gridDim.y + blockIdx.y;
    }
    // `share`: of the positions, a block's.
    __device__ __forceinline__ void place(const Sizes& sizes, const int* start, float share, int its_window)
    {
        begin = *start;
        window = its_window;
        first = first_seen(begin + sizes.token_of(first_row), window);
        end = begin + sizes.token_of(first_row + rows - 1) + 1;
        length = max(((int)((end - first) * share) + 32) / 32 * 32, 64);
        from = first + blockIdx.x * length;
        to = min(end, from + length);
    }
    __device__ __forceinline__ int pieces() const { return (end - first + length - 1) / length; }
    // The positions that a row sees, from .x to .y; none of a row that there is not.
    __device__ __forceinline__ int2 seen(const Sizes& sizes, int row) const
    {
        const int position = begin + sizes.token_of(first_row + row);
        return row < rows ? int2{first_seen(position, window), min(position + 1, to)} : int2{0, 0};
    }
};
// What the warps of a block have found: of each row the weighted sum of values, the largest score, all weights' sum.
template <int OUT> struct Found {
    float outputs[WARPS][ROWS][OUT + 4];
    float largest[WARPS][ROWS], sum[WARPS][ROWS];
};

__device__ __forceinline__ void add(float4& total, float weight, const float4& one)
{
    total.x += weight * one.x;
    total.y += weight * one.y;
    total.z += weight * one.z;
    total.w += weight * one.w;
}
__device__ __forceinline__ void write(float* out, int at, int head_dim, const float4& four, float factor)
{
    if (at < head_dim) out[at] = four.x * factor;
    if (at + 1 < head_dim) out[at + 1] = four.y * factor;
    if (at + 2 < head_dim) out[at + 2] = four.z * factor;
    if (at + 3 < head_dim) out[at + 3] = four.w * factor;
}

// What the warps have found becomes one, and what the blocks have that share rows: the last that comes sees to it.
template <int OUT, int PARTS>
__device__ __forceinline__ void bring_together(
    Found<OUT>& found, const Piece<PARTS>& piece, const Sizes& sizes, float* out, float* scratch)
{
    __shared__ bool is_last;
    const int pieces = piece.pieces();
    uint32_t* arrived = (uint32_t*)scratch + piece.unit;  // 0 between calls
    float* slots = scratch + SLOT + (int64_t)piece.unit * gridDim.x * SLOT;
    float* own = slots + (int64_t)blockIdx.x * SLOT;
    const bool is_alone = pieces == 1;
    __syncthreads();
    for (int each = threadIdx.x; each < piece.rows * (OUT / 4); each += blockDim.x) {
        const int row = each / (OUT / 4), column = each % (OUT / 4) * 4;
        float largest = LOWEST, sum = 0;
        for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, found.largest[w][row]);
        float4 total = {0, 0, 0, 0};
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float weight = power(found.largest[w][row] - largest);
            sum += weight * found.sum[w][row];
            add(total, weight, *(const float4*)&found.outputs[w][row][column]);
        }
        if (is_alone) {
            float* to = out + sizes.place(piece.first_row + row, piece.kv_head);
            write(to, piece.part + column, sizes.head_dim, total, 1 / sum);
        } else {
            *(float4*)(own + row * OUTPUTS + column) = total;
            if (column == 0) {
                own[ROWS * OUTPUTS + row] = largest;
                own[ROWS * (OUTPUTS + 1) + row] = sum;
            }
        }
    }
    if (!is_alone) {
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();  // what the block has written, before it counts
            is_last = atomicAdd(arrived, 1) == pieces - 1;
            __threadfence();
        }
        __syncthreads();
        if (is_last) {
            float* weights = &found.outputs[0][0][0];  // of each row and piece
            const int row_of_warp = threadIdx.x / 32;
            if (row_of_warp < piece.rows) {
                const float* states = slots + ROWS * OUTPUTS + row_of_warp;
                float largest = LOWEST, sum = 0;
                for (int s = threadIdx.x % 32; s < pieces; s += 32)
                    largest = fmaxf(largest, __ldcg(states + (int64_t)s * SLOT));
                largest = warp_max(largest);
                for (int s = threadIdx.x % 32; s < pieces; s += 32) {
                    const float weight = power(__ldcg(states + (int64_t)s * SLOT) - largest);
                    sum += weight * __ldcg(states + (int64_t)s * SLOT + ROWS);
                    weights[row_of_warp * pieces + s] = weight;
                }
                sum = warp_sum(sum);
                if (threadIdx.x % 32 == 0) found.sum[0][row_of_warp] = 1 / sum;
            }
            __syncthreads();
            for (int each = threadIdx.x; each < piece.rows * (OUT / 4); each += blockDim.x) {
                const int row = each / (OUT / 4), column = each % (OUT / 4) * 4;
                float4 total = {0, 0, 0, 0};
#pragma unroll 16  // the quickest of 8, 16 and 33 (benchmarks/gpu/h100-attention-2026-11-24.txt)
                for (int s = 0; s < pieces; s++) {
                    const float weight = weights[row * pieces + s];
                    add(total, weight, __ldcg((const float4*)(slots + (int64_t)s * SLOT + row * OUTPUTS + column)));
                }
                float* to = out + sizes.place(piece.first_row + row, piece.kv_head);
                write(to, piece.part + column, sizes.head_dim, total, found.sum[0][row]);
            }
            if (threadIdx.x == 0) *arrived = 0;
        }
    }
}
"""

TENSOR_CORES = r"""
// sum += a * b, 16 rows by 8 columns (PTX ISA, "mma.m16n8k16 with floating point type").
__device__ __forceinline__ void multiply(float (&sum)[4], uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t x,
    uint32_t y)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a), "r"(b), "r"(c), "r"(d), "r"(x), "r"(y));
}
__device__ __forceinline__ uint32_t two_halves(float low, float high)
{
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
// Two floats as halves, and what these leave of them.
__device__ __forceinline__ void take_apart(float low, float high, uint32_t& most, uint32_t& rest)
{
    most = two_halves(low, high);
    rest = two_halves(low - of_half((uint16_t)most), high - of_half((uint16_t)(most >> 16)));
}
"""

FEW_OF_HALVES = r"""
__device__ __forceinline__ uint32_t word_of(const uint4& words, int i)
{
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// KEY_UNITS times 32 numbers of a head are keys, OUT of the output are this block's. A warp takes 16 positions at a
// time, and loads the next ones where those before are used up. Of the 16 rows of a product the first 8 are the rows,
// the last 8 what their halves leave. The order of numbers inside of a key, and of those of a value, is as they are
// loaded: the sums do not mind, as long as the queries have the same.
template <int KEY_UNITS, int OUT, class Scores>
__device__ __forceinline__ void attend_few(
    const float* q, const uint16_t* keys, const uint16_t* values, const int* start, Scores scores, int window,
    float* out, float* scratch, float share, const Sizes& sizes)
{
    constexpr int VALUE_UNITS = OUT / 64, STEP = 16 * WARPS, FOURS = KEY_UNITS > 4 ? 2 : 1;
    constexpr int CHAINS = KEY_UNITS > 4 ? 1 : 2;  // sums of a product, so that fewer wait for one another
    __shared__ uint4 query[2 * KEY_UNITS][32];
    __shared__ int exponents[ROWS];
    __shared__ __align__(16) Found<OUT> found;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, quarter = lane % 4;
    Piece<KEY_UNITS * 32 / OUT> piece(sizes);
    // A warp has a row of the queries, each thread four numbers of it, or twice four.
    float numbers[FOURS][4], most_of_row = 0;
    const float* own = q + sizes.place(piece.first_row + min(warp, piece.rows - 1), piece.kv_head);
#pragma unroll
    for (int f = 0; f < FOURS; f++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = 128 * f + 4 * lane + i;
            numbers[f][i] = warp < piece.rows && at < sizes.head_dim ? __ldg(own + at) : 0.0f;
        }
    piece.place(sizes, start, share, window);
    if (piece.from < piece.end) {
        keys += (int64_t)piece.kv_head * sizes.context * sizes.stride;
        values += (int64_t)piece.kv_head * sizes.context * sizes.stride + piece.part;
        uint4 key[2][KEY_UNITS], value[4][VALUE_UNITS];
        auto load_keys = [&](int position) {
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int at = position + 8 * n + row;
#pragma unroll
                for (int d = 0; d < KEY_UNITS; d++) {
                    const bool is_there = at < piece.to && 32 * d + 8 * quarter < sizes.stride;
                    key[n][d] = load(keys + (int64_t)at * sizes.stride + 32 * d + 8 * quarter, is_there);
                }
            }
        };
        auto load_values = [&](int position) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int at = position + 8 * (n / 2) + 2 * quarter + n % 2;
#pragma unroll
                for (int d = 0; d < VALUE_UNITS; d++) {
                    const bool is_there = at < piece.to && piece.part + 64 * d + 8 * row < sizes.stride;
                    value[n][d] = load(values + (int64_t)at * sizes.stride + 64 * d + 8 * row, is_there);
                }
            }
        };
        int p = piece.from + 16 * warp;
        load_keys(p);
        load_values(p);

#pragma unroll
        for (int f = 0; f < FOURS; f++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                numbers[f][i] *= scores.unit;
                most_of_row = fmaxf(most_of_row, fabsf(numbers[f][i]));
            }
        const int exponent = exponent_of(warp_max(most_of_row));
        if (lane == 0) exponents[warp] = exponent;
#pragma unroll
        for (int f = 0; f < FOURS; f++)
            if (32 * f + lane < 8 * KEY_UNITS) {
                const float less = shrink(exponent);
                uint4 made;
                take_apart(numbers[f][0] * less, numbers[f][1] * less, made.x, made.y);
                take_apart(numbers[f][2] * less, numbers[f][3] * less, made.z, made.w);
                query[2 * (4 * f + lane / 8) + lane % 2][4 * warp + lane % 8 / 2] = made;
            }
        __syncthreads();

        const float factor = grow(exponents[row]);
        const int2 seen = piece.seen(sizes, row);
        float outputs[VALUE_UNITS][8][4] = {}, largest = LOWEST, sum = 0;
#pragma unroll 1
        for (; p < piece.to; p += STEP) {
            float products[2][CHAINS][4] = {};
#pragma unroll
            for (int d = 0; d < KEY_UNITS; d++) {
                const uint4 a = query[2 * d][lane], b = query[2 * d + 1][lane];
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    multiply(products[n][0], a.x, a.y, a.z, a.w, key[n][d].x, key[n][d].y);
                    multiply(products[n][CHAINS - 1], b.x, b.y, b.z, b.w, key[n][d].z, key[n][d].w);
                }
            }
            load_keys(p + STEP);
            float weights[4], most = largest;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = p + i / 2 * 8 + 2 * quarter + i % 2;
                const auto& sums = products[i / 2];
                float product = sums[0][i % 2] + sums[0][i % 2 + 2];
                if (CHAINS == 2) product += sums[CHAINS - 1][i % 2] + sums[CHAINS - 1][i % 2 + 2];
                const float score = scores.held(product * factor);
                weights[i] = at >= seen.x && at < seen.y ? score : HIDDEN;
                most = fmaxf(most, weights[i]);
            }
            most = quad_max(most);
            if (__any_sync(~0u, most > largest)) {
                const float less = power(largest - most);
                sum *= less;
#pragma unroll
                for (int d = 0; d < VALUE_UNITS; d++)
#pragma unroll
                    for (int n = 0; n < 8; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) outputs[d][n][i] *= less;
                largest = most;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                weights[i] = power(weights[i] - largest);
                sum += weights[i];
            }
            uint32_t a, b, c, e;
            take_apart(weights[0], weights[1], a, b);
            take_apart(weights[2], weights[3], c, e);
#pragma unroll
            for (int d = 0; d < VALUE_UNITS; d++)
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    const int halves = n % 2 ? 0x7632 : 0x5410;
                    const uint32_t x = __byte_perm(word_of(value[0][d], n / 2), word_of(value[1][d], n / 2), halves);
                    const uint32_t y = __byte_perm(word_of(value[2][d], n / 2), word_of(value[3][d], n / 2), halves);
                    multiply(outputs[d][n], a, b, c, e, x, y);
                }
            load_values(p + STEP);
        }
        sum = quad_sum(sum);
        if (quarter == 0) {
            found.largest[warp][row] = largest;
            found.sum[warp][row] = sum;
        }
#pragma unroll
        for (int d = 0; d < VALUE_UNITS; d++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float4* to = (float4*)&found.outputs[warp][row][64 * d + 16 * quarter + 8 * i];
                float eight[8];
#pragma unroll
                for (int n = 0; n < 8; n++) eight[n] = outputs[d][n][i] + outputs[d][n][i + 2];
                to[0] = {eight[0], eight[1], eight[2], eight[3]};
                to[1] = {eight[4], eight[5], eight[6], eight[7]};
            }
        bring_together(found, piece, sizes, out, scratch);
    }
}
"""

FEW_OF_FLOATS = r"""
// KEY_UNITS times 128 numbers of a head are keys. A warp takes a position at a time, each thread four numbers of it.
template <int KEY_UNITS, class Scores>
__device__ __forceinline__ void attend_few(
    const float* q, const float* keys, const float* values, const int* start, Scores scores, int window, float* out,
    float* scratch, float share, const Sizes& sizes)
{
    __shared__ float4 query[ROWS][KEY_UNITS * 32];
    __shared__ __align__(16) Found<OUTPUTS> found;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Piece<KEY_UNITS> piece(sizes);
    piece.place(sizes, start, share, window);
    if (piece.from < piece.end) {
        keys += (int64_t)piece.kv_head * sizes.context * sizes.stride + 4 * lane;
        values += (int64_t)piece.kv_head * sizes.context * sizes.stride + piece.part + 4 * lane;
        for (int each = threadIdx.x; each < ROWS * KEY_UNITS * 128; each += blockDim.x) {
            const int row = each / (KEY_UNITS * 128), i = each % (KEY_UNITS * 128);
            const bool is_there = row < piece.rows && i < sizes.head_dim;
            const int64_t at = sizes.place(piece.first_row + row, piece.kv_head) + i;
            ((float*)query)[each] = is_there ? q[at] * scores.unit : 0.0f;
        }
        __syncthreads();
        float4 outputs[ROWS] = {};
        float largest[ROWS], sum[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) largest[r] = LOWEST, sum[r] = 0;
#pragma unroll 1
        for (int p = piece.from + warp; p < piece.to; p += WARPS) {
            float4 key[KEY_UNITS];
#pragma unroll
            for (int d = 0; d < KEY_UNITS; d++) {
                key[d] = load_floats(keys + (int64_t)p * sizes.stride + 128 * d, 128 * d + 4 * lane < sizes.stride);
            }
            const bool has_value = piece.part + 4 * lane < sizes.stride;
            const float4 value = load_floats(values + (int64_t)p * sizes.stride, has_value);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float product = 0;
#pragma unroll
                for (int d = 0; d < KEY_UNITS; d++) {
                    const float4 own = query[r][32 * d + lane];
                    product += own.x * key[d].x + own.y * key[d].y + own.z * key[d].z + own.w * key[d].w;
                }
                const int2 seen = piece.seen(sizes, r);
                float score = scores.held(warp_sum(product));
                score = p >= seen.x && p < seen.y ? score : HIDDEN;
                const float most = fmaxf(largest[r], score);
                const float less = power(largest[r] - most), weight = power(score - most);
                largest[r] = most;
                sum[r] = sum[r] * less + weight;
                outputs[r].x = outputs[r].x * less + weight * value.x;
                outputs[r].y = outputs[r].y * less + weight * value.y;
                outputs[r].z = outputs[r].z * less + weight * value.z;
                outputs[r].w = outputs[r].w * less + weight * value.w;
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            *(float4*)&found.outputs[warp][r][4 * lane] = outputs[r];
            if (lane == 0) {
                found.largest[warp][r] = largest[r];
                found.sum[warp][r] = sum[r];
            }
        }
        bring_together(found, piece, sizes, out, scratch);
    }
}
"""

MANY_OF_HALVES = r"""
#define TILE 64  // rows of a block, and positions that it looks at together
#define MANY_THREADS 128

__device__ __forceinline__ uint32_t shared_address(const void* at)
{
    return (uint32_t)__cvta_generic_to_shared(at);
}
__device__ __forceinline__ void load_squares(uint32_t (&words)[4], const void* row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void load_turned_squares(uint32_t (&words)[4], const void* row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(shared_address(row)) : "memory");
}
// Eights of numbers of a position lie in another order in each of eight positions, so that no two of what is read
// together are in the same banks.
template <int DIM> __device__ __forceinline__ int place_of(int position, int eight)
{
    return position * (DIM / 8) + (eight ^ position & 7);
}
// 64 positions of a cache from `first` on, zeros from `end` on; they come while other work is done.
template <int DIM>
__device__ __forceinline__ void begin_copy(uint4* to, const uint16_t* cache, int first, int end, int stride)
{
#pragma unroll
    for (int i = 0; i < TILE * DIM / 8 / MANY_THREADS; i++) {
        const int each = i * MANY_THREADS + threadIdx.x, position = each / (DIM / 8), eight = each % (DIM / 8);
        const bool is_there = first + position < end && 8 * eight < stride;
        const uint16_t* from = cache + (is_there ? (int64_t)(first + position) * stride + 8 * eight : 0);
        const uint32_t place = shared_address(to + place_of<DIM>(position, eight));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
            :: "r"(place), "l"(from), "r"(is_there ? 16 : 0) : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ void end_copy()
{
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
}

// A warp has 16 rows. A thread has of rows lane / 4 and 8 + lane / 4 of a product columns 2 (lane % 4) and the next.
template <int DIM, class Scores>
__device__ __forceinline__ void attend_many(
    const float* q, const uint16_t* keys, const uint16_t* values, const int* start, Scores scores, int window,
    float* out, const Sizes& sizes)
{
    __shared__ uint4 key[TILE * DIM / 8], value[TILE * DIM / 8], rests[DIM / 16][MANY_THREADS];
    const int lane = threadIdx.x % 32, quarter = lane % 4, kv_head = blockIdx.x, begin = *start;
    const int first_row = (gridDim.y - 1 - blockIdx.y) * TILE;  // what sees most is begun first
    const int last_row = min(first_row + TILE, sizes.rows()) - 1, warp_row = first_row + threadIdx.x / 32 * 16;
    const int first = first_seen(begin + first_row / sizes.group, window);
    const int end = begin + last_row / sizes.group + 1;
    keys += (int64_t)kv_head * sizes.context * sizes.stride;
    values += (int64_t)kv_head * sizes.context * sizes.stride;
    begin_copy<DIM>(key, keys, first, end, sizes.stride);

    uint32_t most[DIM / 16][4];  // of the queries; what they leave is read by the thread that has written it
    float factor[2];
    int2 seen[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = warp_row + lane / 4 + 8 * r, position = begin + row / sizes.group;
        const bool is_row = row <= last_row;
        const float* own = q + sizes.place(min(row, last_row), kv_head);
        seen[r] = is_row ? int2{first_seen(position, window), position + 1} : int2{0, 0};
        auto number = [&](int i) { return is_row && i < sizes.head_dim ? own[i] * scores.unit : 0.0f; };
        float largest = 0;
        for (int i = quarter; i < sizes.head_dim; i += 4) largest = fmaxf(largest, fabsf(number(i)));
        const int exponent = exponent_of(quad_max(largest));
        const float less = shrink(exponent);
        factor[r] = grow(exponent);
#pragma unroll
        for (int d = 0; d < DIM / 16; d++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int i = 16 * d + 8 * h + 2 * quarter;
                uint32_t* rest = (uint32_t*)&rests[d][threadIdx.x];
                take_apart(number(i) * less, number(i + 1) * less, most[d][2 * h + r], rest[2 * h + r]);
            }
    }
    // Between these every row of the warp sees all.
    const int last_of_warp = min(warp_row + 15, last_row);
    const int seen_by_all = first_seen(begin + last_of_warp / sizes.group, window);
    const int ends_for_all = warp_row + 15 <= last_row ? begin + warp_row / sizes.group + 1 : 0;

    float outputs[DIM / 8][4] = {}, largest[2] = {LOWEST, LOWEST}, sum[2] = {};
#pragma unroll 1
    for (int p = first; p < end; p += TILE) {
        end_copy();  // the keys; and nobody reads values any more
        begin_copy<DIM>(value, values, p, end, sizes.stride);
        float weights[TILE / 8][4] = {};
#pragma unroll
        for (int d = 0; d < DIM / 16; d += 2) {
            const uint4 rest[2] = {rests[d][threadIdx.x], rests[d + 1][threadIdx.x]};
#pragma unroll
            for (int n = 0; n < TILE / 8; n++) {
                uint32_t words[4];
                load_squares(words, key + place_of<DIM>(8 * n + lane % 8, 2 * d + lane / 8));
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint32_t* a = most[d + h];
                    const uint4& b = rest[h];
                    multiply(weights[n], a[0], a[1], a[2], a[3], words[2 * h], words[2 * h + 1]);
                    multiply(weights[n], b.x, b.y, b.z, b.w, words[2 * h], words[2 * h + 1]);
                }
            }
        }
        const bool sees_all = p >= seen_by_all && p + TILE <= ends_for_all;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = largest[r];
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float score = scores.held(weights[n][2 * r + i] * factor[r]);
                    if (!sees_all) {
                        const int at = p + 8 * n + 2 * quarter + i;
                        score = at >= seen[r].x && at < seen[r].y ? score : HIDDEN;
                    }
                    weights[n][2 * r + i] = score;
                    top = fmaxf(top, score);
                }
            top = quad_max(top);
            const float less = power(largest[r] - top);
            largest[r] = top;
            sum[r] *= less;
#pragma unroll
            for (int d = 0; d < DIM / 8; d++)
#pragma unroll
                for (int i = 0; i < 2; i++) outputs[d][2 * r + i] *= less;
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    weights[n][2 * r + i] = power(weights[n][2 * r + i] - top);
                    sum[r] += weights[n][2 * r + i];
                }
        }
        end_copy();  // the values; and nobody reads keys any more
        if (p + TILE < end) begin_copy<DIM>(key, keys, p + TILE, end, sizes.stride);
#pragma unroll
        for (int n = 0; n < TILE / 16; n++) {
            uint32_t a[4], b[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* two = weights[2 * n + i / 2] + i % 2 * 2;
                take_apart(two[0], two[1], a[i], b[i]);
            }
#pragma unroll
            for (int d = 0; d < DIM / 8; d += 2) {
                uint32_t words[4];
                load_turned_squares(words, value + place_of<DIM>(16 * n + lane % 16, d + lane / 16));
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    multiply(outputs[d + h], a[0], a[1], a[2], a[3], words[2 * h], words[2 * h + 1]);
                    multiply(outputs[d + h], b[0], b[1], b[2], b[3], words[2 * h], words[2 * h + 1]);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = warp_row + lane / 4 + 8 * r;
        const float inverse = 1 / quad_sum(sum[r]);
        if (row <= last_row) {
            float* to = out + sizes.place(row, kv_head);
#pragma unroll
            for (int d = 0; d < DIM / 8; d++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (8 * d + 2 * quarter + i < sizes.head_dim)
                        to[8 * d + 2 * quarter + i] = outputs[d][2 * r + i] * inverse;
        }
    }
}
"""
