"""CUDA C++ of attention for a few rows.

The context is divided into pieces. The block that ends last combines their results.
"""

from __future__ import annotations

ROWS = 8  # number of rows (heads of tokens) that one block computes
OUTPUTS = 128  # largest number of outputs of a head that one block computes
# Size in floats of the partial result that a block leaves for the last block. For each row, the partial result has
# the outputs, the maximum and the sum.
SLOT = ROWS * (OUTPUTS + 2)
THREADS = 256

PIECES = r"""
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

OF_HALVES = r"""
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

OF_FLOATS = r"""
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
