"""CUDA C++ of sampling.

It finds the first largest logit, or draws one of the likeliest tokens without sorting all logits.

A logit and its index are combined into one number. The number is larger if the logit is larger. If logits are equal,
it is larger if the index is smaller.

The kernel searches for three tokens: the last of top_k, the last of top_p, and the drawn token. Each search finds the
number at which the sum over all larger numbers exceeds a bound.

First all logits are counted and summed in BINS of equal width. Then each search takes one launch. The last block of
the launch sorts only the bin that contains the result. If this bin has too many logits, the block searches all logits
digit by digit. This happens if many logits are equal, or if outliers make the bins wide.
"""

from __future__ import annotations

PLACE_BITS = 22  # number of bits for the index of a logit; there are at most 2^22 logits
THREADS = 256
BLOCKS = 128  # number of blocks that read the logits together; the last block to end does the remaining work

SAMPLING = r"""
#define PLACE_BITS 22
#define LAST_PLACE ((1u << PLACE_BITS) - 1)
#define BINS 2048
#define THREADS 256
#define EACH (BINS / THREADS)
#define CAPACITY 4096
#define WIDEST 64.0  // logits over a temperature that bins reach over: what is farther below the largest weighs 1e-28

// Between launches, and from one call to the next: the first four are 0 then.
struct State {
    uint64_t largest_number, smallest_number;  // the smallest: its complement
    uint32_t arrived, listed;
    float largest, bins_a_logit;
    double total;  // the weights of what is chosen from
};
__device__ State state;
__device__ uint32_t bin_counts[BINS];  // 0 between calls, and so are the weights
__device__ double bin_weights[BINS];
__device__ uint32_t counts_before[BINS + 1];  // of each bin those of larger logits; behind the last all
__device__ double weights_before[BINS + 1];
__device__ uint64_t numbers_of_bin[CAPACITY];

// Numbers in the order of logits; above them all what is infinite, and NaN.
#define NOT_FINITE ((uint64_t)0xff800000u << PLACE_BITS)
__device__ __forceinline__ uint64_t number_of(float logit, int place)
{
    uint32_t bits = fabsf(logit) <= 3.4028235e38f ? __float_as_uint(logit + 0.0f) : 0x7fffffffu;  // -0 as 0
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
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(&state.arrived, 1) == gridDim.x - 1;
        if (is_last) state.arrived = 0;
        __threadfence();
    }
    __syncthreads();
    return is_last;
}
__device__ __forceinline__ uint64_t block_largest(uint64_t number)  // in the first thread
{
    __shared__ uint64_t of_warps[THREADS / 32];
    for (int apart = 16; apart; apart /= 2) number = max(number, __shfl_xor_sync(~0u, number, apart));
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = number;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int w = 1; w < THREADS / 32; w++) number = max(number, of_warps[w]);
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

struct Logits {
    const float* logits;
    int count;
    double temperature;
    __device__ __forceinline__ int bin(float logit) const
    {
        return min((int)((state.largest - logit) * state.bins_a_logit), BINS - 1);
    }
    __device__ __forceinline__ double weight(float logit) const
    {
        return exp((double)logit / temperature - (double)state.largest / temperature);
    }
};
enum Search { OF_TOP_K, OF_TOP_P, OF_DRAW };
// Where sums from the largest number on pass it; `total`: what a weight is a fraction of (top_p, or the draw).
struct Bound {
    Search search;
    int top_k;
    double weight;
    // Of the sums that there are `most` is the largest, so that one passes whatever was rounded.
    __device__ __forceinline__ Bound(Search search, int top_k, double fraction, double total, double most)
        : search(search), top_k(top_k),
          weight(fmin(fraction * total, search == OF_DRAW ? most * (1 - 0x1p-53) : most)) {}
    __device__ __forceinline__ bool is_passed(uint32_t count, double sum) const
    {
        return search == OF_TOP_K ? count >= top_k : search == OF_TOP_P ? sum >= weight : sum > weight;
    }
};

// A thread has a count and a sum; what it and those before it have, from given ones on, and what comes before it.
struct Sums {
    uint32_t before, to;
    double weight_before, weight_to;
};
__device__ __forceinline__ Sums sums_of_threads(uint32_t count, double sum, uint32_t first_count, double first_sum)
{
    __shared__ uint32_t counts[THREADS + 1], counts_of_warps[THREADS / 32];
    __shared__ double sums[THREADS + 1], sums_of_warps[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int apart = 1; apart < 32; apart *= 2) {
        const uint32_t its_count = __shfl_up_sync(~0u, count, apart);
        const double its_sum = __shfl_up_sync(~0u, sum, apart);
        if (lane >= apart) count += its_count, sum += its_sum;
    }
    __syncthreads();
    if (lane == 31) counts_of_warps[warp] = count, sums_of_warps[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; w++) first_count += counts_of_warps[w], first_sum += sums_of_warps[w];
    counts[threadIdx.x + 1] = count += first_count;
    sums[threadIdx.x + 1] = sum += first_sum;
    if (threadIdx.x == 0) counts[0] = first_count, sums[0] = first_sum;
    __syncthreads();
    return {counts[threadIdx.x], count, sums[threadIdx.x], sum};
}
// The first thread of which it holds; the last where it holds of none, as where a logit is no number.
__device__ __forceinline__ int first_thread(bool holds)
{
    __shared__ int first;
    __syncthreads();
    if (threadIdx.x == 0) first = THREADS - 1;
    __syncthreads();
    if (holds) atomicMin(&first, threadIdx.x);
    __syncthreads();
    return first;
}
// Into bins, into none where `bin` is below 0. By whole warps: where all have one bin, as equal logits do, one adds.
__device__ __forceinline__ void add_to(uint32_t* counts, double* weights, int bin, double weight)
{
    int all_alike;
    __match_all_sync(~0u, bin, &all_alike);
    if (!all_alike) {
        if (bin >= 0) {
            atomicAdd(counts + bin, 1);
            atomicAdd(weights + bin, weight);
        }
    } else if (bin >= 0) {
        for (int apart = 16; apart; apart /= 2) weight += __shfl_xor_sync(~0u, weight, apart);
        if (threadIdx.x % 32 == 0) {
            atomicAdd(counts + bin, 32);
            atomicAdd(weights + bin, weight);
        }
    }
}

__device__ __forceinline__ void find_range(const Logits& all)
{
    uint64_t number = 0, complement = 0;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < all.count; i += gridDim.x * THREADS) {
        const uint64_t one = number_of(all.logits[i], i);
        number = max(number, one);
        complement = max(complement, ~one);
    }
    number = block_largest(number);
    complement = block_largest(complement);
    if (threadIdx.x == 0) {
        atomicMax(&state.largest_number, number);
        atomicMax(&state.smallest_number, complement);
    }
    if (is_last_block() && threadIdx.x == 0) {
        const float largest = logit_of(atomicExch(&state.largest_number, 0));
        const float smallest = logit_of(~atomicExch(&state.smallest_number, 0));
        const double range = fmin((double)largest - smallest, WIDEST * all.temperature);
        state.largest = largest;
        state.bins_a_logit = range > 0 ? (float)((BINS - 1) / range) : 0.0f;
    }
}

__device__ __forceinline__ void weigh(const Logits& all)
{
    __shared__ uint32_t counts[BINS];
    __shared__ double weights[BINS];
    for (int i = threadIdx.x; i < BINS; i += THREADS) counts[i] = 0, weights[i] = 0;
    __syncthreads();
    for (int first = blockIdx.x * THREADS; first < all.count; first += gridDim.x * THREADS) {
        const int i = first + threadIdx.x;
        const float logit = i < all.count ? all.logits[i] : 0.0f;
        add_to(counts, weights, i < all.count ? all.bin(logit) : -1, all.weight(logit));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS)
        if (counts[i]) {
            atomicAdd(bin_counts + i, counts[i]);
            atomicAdd(bin_weights + i, weights[i]);
        }
    if (is_last_block()) {
        const int first = threadIdx.x * EACH;
        uint32_t own[EACH], count = 0;
        double own_weights[EACH], sum = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            own[i] = __ldcg(bin_counts + first + i);
            own_weights[i] = __ldcg(bin_weights + first + i);
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            bin_counts[first + i] = 0;
            bin_weights[first + i] = 0;
            count += own[i];
            sum += own_weights[i];
        }
        const Sums sums = sums_of_threads(count, sum, 0, 0);
        count = sums.before;
        sum = sums.weight_before;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            counts_before[first + i] = count;
            weights_before[first + i] = sum;
            count += own[i];
            sum += own_weights[i];
        }
        if (threadIdx.x == THREADS - 1) {
            counts_before[BINS] = sums.to;
            weights_before[BINS] = sums.weight_to;
            state.total = sums.weight_to;
        }
    }
}

// The number of a bin that passes the bound, and the sum of weights to it and with it.
struct Found {
    uint64_t number;
    double sum;
};
// Of `listed` numbers; `numbers` has room for CAPACITY.
__device__ __forceinline__ Found find_sorted(
    const Logits& all, Search search, int top_k, double fraction, int bin, int listed, uint64_t* numbers)
{
    __shared__ Found found;
    if (threadIdx.x == 0) found = {0, 0};  // no token, where the thread below has no number
    int size = THREADS;
    while (size < listed) size *= 2;
    for (int i = threadIdx.x; i < size; i += THREADS) numbers[i] = i < listed ? __ldcg(numbers_of_bin + i) : 0;
    for (int part = 2; part <= size; part *= 2)  // Batcher 1968: sequences that rise and fall are merged
        for (int apart = part / 2; apart; apart /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < size / 2; i += THREADS) {
                const int low = 2 * i - (i & apart - 1), high = low + apart;
                const uint64_t a = numbers[low], b = numbers[high];
                if ((a < b) == !(low & part)) numbers[low] = b, numbers[high] = a;
            }
        }
    __syncthreads();
    const int each = size / THREADS, first = threadIdx.x * each, end = min(first + each, listed);
    double sum = 0;
    for (int i = first; i < end; i++) sum += all.weight(logit_of(numbers[i]));
    const Sums sums = sums_of_threads(max(end - first, 0), sum, counts_before[bin], weights_before[bin]);
    __shared__ double most;
    if (threadIdx.x == THREADS - 1) most = sums.weight_to;
    __syncthreads();
    const Bound bound(search, top_k, fraction, state.total, most);
    if (threadIdx.x == first_thread(bound.is_passed(sums.to, sums.weight_to))) {
        uint32_t count = sums.before;
        sum = sums.weight_before;
        for (int i = first; i < end; i++) {
            sum += all.weight(logit_of(numbers[i]));
            found = {numbers[i], sum};
            if (bound.is_passed(++count, sum)) break;
        }
    }
    __syncthreads();
    return found;
}
// Of as many as there are, which are gone through five times; `space` has room for BINS weights and counts.
__device__ __forceinline__ Found find_by_digits(
    const Logits& all, Search search, int top_k, double fraction, int bin, uint64_t* space)
{
    __shared__ Found found;
    __shared__ uint32_t shared_count;
    __shared__ double shared_sum, most;
    double* weights = (double*)space;
    uint32_t* counts = (uint32_t*)(space + BINS);
    uint64_t prefix = 0;
    uint32_t count = counts_before[bin];
    double sum = weights_before[bin];
    for (int digit = 0; digit < 5; digit++) {
        const int shift = digit == 0 ? 43 : digit == 1 ? 32 : digit == 2 ? 22 : digit == 3 ? 11 : 0;
        const int width = digit == 2 ? 10 : 11, values = 1 << width, each = values / THREADS;
        __syncthreads();
        for (int i = threadIdx.x; i < values; i += THREADS) counts[i] = 0, weights[i] = 0;
        __syncthreads();
        for (int start = 0; start < all.count; start += THREADS) {
            const int i = start + threadIdx.x;
            const float logit = i < all.count ? all.logits[i] : 0.0f;
            const uint64_t number = number_of(logit, i) >> shift;
            const bool is_meant = i < all.count && all.bin(logit) == bin && number >> width == prefix;
            add_to(counts, weights, is_meant ? (int)(number & values - 1) : -1, is_meant ? all.weight(logit) : 0);
        }
        __syncthreads();
        const int first = values - 1 - threadIdx.x * each;  // the first thread has the largest values
        uint32_t own_count = 0;
        double own_sum = 0;
        for (int i = first; i > first - each; i--) own_count += counts[i], own_sum += weights[i];
        const Sums sums = sums_of_threads(own_count, own_sum, count, sum);
        if (threadIdx.x == THREADS - 1) most = sums.weight_to;
        __syncthreads();
        const Bound bound(search, top_k, fraction, state.total, most);
        if (threadIdx.x == first_thread(bound.is_passed(sums.to, sums.weight_to))) {
            int value = first;  // of those here the first that passes, or the last
            count = sums.before;
            sum = sums.weight_before;
            while (value > first - each + 1 && !bound.is_passed(count + counts[value], sum + weights[value])) {
                count += counts[value];
                sum += weights[value];
                value--;
            }
            shared_count = count;
            shared_sum = sum;
            found = {prefix << width | value, sum + weights[value]};
        }
        __syncthreads();
        prefix = found.number;
        count = shared_count;
        sum = shared_sum;
    }
    return found;
}

__device__ __forceinline__ void look_for(const Logits& all, Search search, int top_k, double fraction, int64_t* out)
{
    __shared__ uint64_t space[CAPACITY];
    __shared__ int bin;
    const double most = __ldcg(weights_before + BINS);
    const Bound bound(search, top_k, fraction, state.total, most);
    uint32_t to[EACH];
    double weight_to[EACH];
    const int first = threadIdx.x * EACH;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        to[i] = __ldcg(counts_before + first + i + 1);
        weight_to[i] = __ldcg(weights_before + first + i + 1);
    }
    bool passes = false;
#pragma unroll
    for (int i = 0; i < EACH; i++) passes = passes || bound.is_passed(to[i], weight_to[i]);
    if (threadIdx.x == first_thread(passes)) {
        int own = EACH - 1;
#pragma unroll
        for (int i = EACH - 1; i >= 0; i--)
            if (bound.is_passed(to[i], weight_to[i])) own = i;
        bin = first + own;
    }
    __syncthreads();
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < all.count; i += gridDim.x * THREADS)
        if (all.bin(all.logits[i]) == bin) {
            const uint32_t at = atomicAdd(&state.listed, 1);
            if (at < CAPACITY) numbers_of_bin[at] = number_of(all.logits[i], i);
        }
    if (is_last_block()) {
        const uint32_t listed = __ldcg(&state.listed);
        const Found found = listed <= CAPACITY
            ? find_sorted(all, search, top_k, fraction, bin, listed, space)
            : find_by_digits(all, search, top_k, fraction, bin, space);
        __syncthreads();
        if (threadIdx.x == 0) {
            state.listed = 0;
            if (search == OF_DRAW) *out = place_of(found.number);
            else state.total = found.sum;
        }
    }
}

KERNEL greedy(const float* logits, int64_t* out, int vocabulary, int row STAMP)
{
    ENTER
    uint64_t number = 0;
    logits += (int64_t)row * vocabulary;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < vocabulary; i += gridDim.x * THREADS)
        number = max(number, number_of(logits[i], i));
    number = block_largest(number);
    if (threadIdx.x == 0) atomicMax(&state.largest_number, number);
    if (is_last_block() && threadIdx.x == 0) {
        const uint64_t largest = atomicExch(&state.largest_number, 0);
        out[row] = largest < NOT_FINITE ? place_of(largest) : vocabulary;  // which is no token
    }
    LEAVE
}
KERNEL find_logits_range(const float* logits, int vocabulary, double temperature STAMP)
{
    ENTER
    find_range({logits, vocabulary, temperature});
    LEAVE
}
KERNEL weigh_logits(const float* logits, int vocabulary, double temperature STAMP)
{
    ENTER
    weigh({logits, vocabulary, temperature});
    LEAVE
}
KERNEL find_last(const float* logits, int vocabulary, double temperature, int top_k, double top_p STAMP)
{
    ENTER
    look_for({logits, vocabulary, temperature}, top_k ? OF_TOP_K : OF_TOP_P, top_k, top_p, nullptr);
    LEAVE
}
KERNEL draw(const float* logits, int vocabulary, double temperature, uint64_t seed, const int* position,
    const int* sequence, int64_t* out STAMP)
{
    ENTER
    look_for({logits, vocabulary, temperature}, OF_DRAW, 0, uniform(*position, *sequence, seed), out);
    LEAVE
}
"""
