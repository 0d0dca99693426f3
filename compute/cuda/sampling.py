"""CUDA C++ of sampling: the first largest logit, and a token drawn from the likeliest, which are never sorted.

A logit and its place are one number whose order is that of sampling: larger logits are larger, and of equals the
first one is. What is looked for (the last of top_k, the last of top_p, the token that is drawn) is where a sum over
larger numbers passes a bound. It is found digit by digit, as a radix sort would: a launch adds up counts and weights
of each value of a digit among the numbers that begin as what is found already, and its last block finds the next one.
"""

from __future__ import annotations

PLACE_BITS = 22  # so many logits at most
DIGITS = ((43, 11), (32, 11), (22, 10), (11, 11), (0, 11))  # (lowest bit, bits), the last two of the place
OF_LOGIT = 3  # of the digits
THREADS = 256
BLOCKS = 128  # that share a pass over the logits; the last does what follows from it

SAMPLING = r"""
#define PLACE_BITS 22
#define LAST_PLACE ((1u << PLACE_BITS) - 1)
#define BINS 2048
#define THREADS 256

// Between the launches of a call, and from one call to the next all but `largest` and `total` 0.
struct State {
    uint64_t best;
    uint32_t arrived, count;  // count: of numbers above all that begin with `prefix`
    uint64_t prefix;
    double above;  // their weights
    double total;  // the weights of what is chosen from
    float largest;
};
__device__ State state;
__device__ uint32_t bin_counts[BINS];
__device__ double bin_weights[BINS];

__device__ __forceinline__ uint64_t number_of(float logit, int place)
{
    uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 as 0
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    return (uint64_t)bits << PLACE_BITS | (LAST_PLACE - place);
}
__device__ __forceinline__ float logit_of(uint64_t number)
{
    const uint32_t bits = (uint32_t)(number >> PLACE_BITS);
    return __uint_as_float(bits ^ (bits >> 31 ? 0x80000000u : 0xffffffffu));
}
__device__ __forceinline__ int place_of(uint64_t number) { return LAST_PLACE - ((uint32_t)number & LAST_PLACE); }

// Whether this block is the last that gets here; what the others have written, it sees.
__device__ __forceinline__ bool is_last_block()
{
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(&state.arrived, 1) == gridDim.x - 1;
        if (is_last) state.arrived = 0;
        __threadfence();
    }
    __syncthreads();
    return is_last;
}
// The largest number, in the last block's first thread; 0 in all others.
__device__ __forceinline__ uint64_t largest_number(const float* logits, int vocabulary)
{
    __shared__ uint64_t of_warps[32];
    uint64_t number = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vocabulary; i += gridDim.x * blockDim.x)
        number = max(number, number_of(logits[i], i));
    for (int apart = 16; apart; apart /= 2) number = max(number, __shfl_xor_sync(~0u, number, apart));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = number;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < blockDim.x / 32; w++) number = max(number, of_warps[w]);
        atomicMax(&state.best, number);
    }
    number = 0;
    if (is_last_block() && threadIdx.x == 0) number = atomicExch(&state.best, 0);
    return number;
}

// As jit/philox.py.
__device__ __forceinline__ double uniform(uint64_t position, uint64_t sequence, uint64_t seed)
{
    uint32_t a = (uint32_t)position, b = (uint32_t)(position >> 32);
    uint32_t c = (uint32_t)sequence, d = (uint32_t)(sequence >> 32);
    uint32_t key = (uint32_t)seed, other_key = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t first = (uint64_t)0xD2511F53u * a, second = (uint64_t)0xCD9E8D57u * c;
        a = (uint32_t)(second >> 32) ^ b ^ key;
        b = (uint32_t)second;
        c = (uint32_t)(first >> 32) ^ d ^ other_key;
        d = (uint32_t)first;
        key += 0x9E3779B9u;
        other_key += 0xBB67AE85u;
    }
    return (double)((uint64_t)a << 21 | b >> 11) * 0x1p-53;
}

enum Search { OF_TOP_K, OF_TOP_P, OF_DRAW };
// The last of top_k, of top_p, or the token that is drawn. `is_of_all`: nothing was left out before.
struct Bound {
    Search search;
    int is_of_all, top_k;
    double fraction;  // of the total: top_p, or the draw
    // The bound itself, no sum that is there being above `most`, so that something passes it.
    __device__ __forceinline__ double weight(double total, double most) const
    {
        return fmin(fraction * total, search == OF_DRAW ? most * (1 - 0x1p-53) : most);
    }
    __device__ __forceinline__ bool is_passed(uint32_t count, double sum, double bound) const
    {
        return search == OF_TOP_K ? count >= top_k : search == OF_TOP_P ? sum >= bound : sum > bound;
    }
};

// One digit of what is looked for: `width` bits from `shift` on.
__device__ __forceinline__ void find_digit(
    const float* logits, int vocabulary, double temperature, const Bound& bound, int shift, int width, int64_t* out)
{
    __shared__ uint32_t counts[BINS];
    __shared__ double weights[BINS];
    const int bins = 1 << width, each = bins / THREADS;
    for (int i = threadIdx.x; i < bins; i += blockDim.x) counts[i] = 0, weights[i] = 0;
    __syncthreads();
    const uint64_t prefix = state.prefix;
    const double largest = (double)state.largest / temperature;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vocabulary; i += gridDim.x * blockDim.x) {
        const float logit = logits[i];
        const uint64_t number = number_of(logit, i) >> shift;
        if (number >> width == prefix) {
            atomicAdd(counts + (number & bins - 1), 1);
            atomicAdd(weights + (number & bins - 1), exp((double)logit / temperature - largest));
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < bins; i += blockDim.x)
        if (counts[i]) {
            atomicAdd(bin_counts + i, counts[i]);
            atomicAdd(bin_weights + i, weights[i]);
        }
    if (is_last_block()) {
        // A thread has some values of the digit, the first thread the largest ones; of each, those before it too.
        __shared__ uint32_t before[THREADS + 1], counts_of_warps[THREADS / 32];
        __shared__ double above[THREADS + 1], sums_of_warps[THREADS / 32];
        __shared__ int first_to_pass;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int first = bins - 1 - threadIdx.x * each;
        uint32_t count = 0;
        double sum = 0;
        for (int i = first; i > first - each; i--) {
            counts[i] = __ldcg(bin_counts + i);
            weights[i] = __ldcg(bin_weights + i);
            bin_counts[i] = 0;
            bin_weights[i] = 0;
            count += counts[i];
            sum += weights[i];
        }
        for (int apart = 1; apart < 32; apart *= 2) {
            const uint32_t its_count = __shfl_up_sync(~0u, count, apart);
            const double its_sum = __shfl_up_sync(~0u, sum, apart);
            if (lane >= apart) count += its_count, sum += its_sum;
        }
        if (lane == 31) counts_of_warps[warp] = count, sums_of_warps[warp] = sum;
        if (threadIdx.x == 0) before[0] = state.count, above[0] = state.above, first_to_pass = THREADS;
        __syncthreads();
        uint32_t count_before = before[0];
        double sum_before = above[0];
        for (int w = 0; w < warp; w++) count_before += counts_of_warps[w], sum_before += sums_of_warps[w];
        before[threadIdx.x + 1] = count += count_before;
        above[threadIdx.x + 1] = sum += sum_before;
        __syncthreads();
        const double most = above[THREADS], total = bound.is_of_all ? most : state.total;
        const double least = bound.weight(total, most);
        if (bound.is_passed(count, sum, least)) atomicMin(&first_to_pass, threadIdx.x);
        __syncthreads();
        if (threadIdx.x == first_to_pass) {
            count = before[threadIdx.x];
            sum = above[threadIdx.x];
            int digit = first;  // of those here the first that passes the bound
            while (digit > first - each + 1 && !bound.is_passed(count + counts[digit], sum + weights[digit], least)) {
                count += counts[digit];
                sum += weights[digit];
                digit--;
            }
            state.prefix = prefix << width | digit;
            state.count = count;
            state.above = sum;
            state.total = total;
            const bool is_found = shift == (bound.search == OF_DRAW ? 0 : PLACE_BITS);
            if (is_found) {
                if (bound.search == OF_DRAW) {
                    *out = place_of(state.prefix);
                } else {  // of equal ones as many as are wanted
                    const double weight = weights[digit] / counts[digit];
                    double wanted = bound.search == OF_TOP_K ? bound.top_k - count : ceil((least - sum) / weight);
                    wanted = fmin(fmax(wanted, 1.0), (double)counts[digit]);
                    state.total = sum + wanted * weight;
                }
                state.prefix = 0;
                state.count = 0;
                state.above = 0;
            }
        }
    }
}

KERNEL greedy(const float* logits, int64_t* out, int vocabulary, int row STAMP)
{
    ENTER
    const uint64_t number = largest_number(logits + (int64_t)row * vocabulary, vocabulary);
    if (number) out[row] = place_of(number);
    LEAVE
}
KERNEL find_largest(const float* logits, int vocabulary STAMP)
{
    ENTER
    const uint64_t number = largest_number(logits, vocabulary);
    if (number) state.largest = logit_of(number);
    LEAVE
}
KERNEL find_last(const float* logits, int vocabulary, double temperature, int is_of_all, int top_k, double top_p,
    int shift, int width STAMP)
{
    ENTER
    const Bound bound = {top_k ? OF_TOP_K : OF_TOP_P, is_of_all, top_k, top_p};
    find_digit(logits, vocabulary, temperature, bound, shift, width, nullptr);
    LEAVE
}
KERNEL draw(const float* logits, int vocabulary, double temperature, int is_of_all, uint64_t seed,
    const int* position, const int* sequence, int64_t* out, int shift, int width STAMP)
{
    ENTER
    const Bound bound = {OF_DRAW, is_of_all, 0, uniform(*position, *sequence, seed)};
    find_digit(logits, vocabulary, temperature, bound, shift, width, out);
    LEAVE
}
"""
