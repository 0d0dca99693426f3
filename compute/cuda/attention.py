"""CUDA C++ that attention for a few rows and attention for many rows share: sizes, scores and tensor core products.

A row is a head of a token. All rows of a group share every read of keys and values, even if the rows belong to
different tokens. Float16 keys and values are multiplied without conversion. Queries and softmax weights are float32.
Each query and each weight is split into two float16 numbers. Their sum is exact within 2^-24. So each multiplication
becomes two. The sums are float32.
"""

from __future__ import annotations

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
