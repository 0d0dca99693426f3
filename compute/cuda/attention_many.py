"""CUDA C++ of attention for many rows. Each block processes 64 rows with tensor cores."""

from __future__ import annotations

ROWS, THREADS = 64, 128  # number of rows (heads of tokens) that one block computes, and number of threads of a block

OF_HALVES = r"""
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
