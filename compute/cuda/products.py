"""CUDA C++ of products with int8 activations: a block has rows of a matrix, and its threads the units of these."""

from __future__ import annotations

# A thread reads one unit of each of ROWS rows, so that as many loads are under way, and what it has of the
# activations it uses ROWS times. dp4a: four products of int8 and their sum (CUDA math API, "SIMD intrinsics").
PRODUCTS = r"""
struct Activations {  // of quantize_rows
    const uint8_t* codes;    // int8 (tokens, columns)
    const float* factors;    // (tokens, columns / 8): of each unit its scale, and this times minus sums of codes
};

// sums[r][t] = row first + r . token first_token + t, of all columns, in every thread of the first warp
template <class Format, int ROWS, int TOKENS>
__device__ __forceinline__ void multiply(
    const Format& weights, Activations x, int rows, int columns, int tokens, int first, int first_token,
    float (&sums)[ROWS][TOKENS])
{
    __shared__ float partial[32][ROWS * TOKENS];
    const int units = columns / 32;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int t = 0; t < TOKENS; t++) sums[r][t] = 0;
    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
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
            const uint4* codes = (const uint4*)(x.codes + token * columns + unit * 32);
            uint4 a = __ldg(codes), b = __ldg(codes + 1);
            float4 f = __ldg((const float4*)(x.factors + token * (columns / 8) + unit * 4));
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                int low = __dp4a((int)q[r][0], (int)a.x, 0), high = __dp4a((int)q[r][4], (int)b.x, 0);
                low = __dp4a((int)q[r][1], (int)a.y, low);
                low = __dp4a((int)q[r][2], (int)a.z, low);
                low = __dp4a((int)q[r][3], (int)a.w, low);
                high = __dp4a((int)q[r][5], (int)b.y, high);
                high = __dp4a((int)q[r][6], (int)b.z, high);
                high = __dp4a((int)q[r][7], (int)b.w, high);
                sums[r][t] += f.x * (s[r].x * (float)low + s[r].z * (float)high) - (f.z * s[r].y + f.w * s[r].w);
            }
        }
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float sum = warp_sum(sums[r][t]);
            if (lane == 0) partial[warp][r * TOKENS + t] = sum;
        }
    __syncthreads();
    if (warp == 0) {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                sums[r][t] = 0;
                for (int w = 0; w < blockDim.x / 32; w++) sums[r][t] += partial[w][r * TOKENS + t];
            }
    }
}

template <class Format, int ROWS, int TOKENS>
__device__ __forceinline__ void write_product(
    const uint8_t* planes, const float* bias, int biased, Activations x, float* out, int rows, int columns,
    int tokens)
{
    float sums[ROWS][TOKENS];
    const int first = blockIdx.x * ROWS, first_token = blockIdx.y * TOKENS;
    multiply(Format(planes, (int64_t)rows * columns), x, rows, columns, tokens, first, first_token, sums);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
                if (first + r < rows && first_token + t < tokens) {
                    float sum = sums[r][t] + (biased ? bias[first + r] : 0.0f);
                    out[(int64_t)(first_token + t) * rows + first + r] = sum;
                }
    }
}
"""
