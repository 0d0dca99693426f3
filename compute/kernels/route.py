"""The kernel Route: choose each token's experts and their weights, and group the tokens of each expert.

reference    NumPy, float64
numba        searches for the next largest logit once for each chosen expert, then sorts pairs by counting
cuda         one block. First each warp processes a token. Then each thread searches all pairs for the pairs of one
             expert

A pair is a token and one of its experts. Pairs are sorted by expert, so that an expert's weights are read once for
all its tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.cuda.launches import WARP, CudaKernel, CudaLaunch, CudaModule, line, whole_warps
from cbtop.compute.jit.compile import jit
from cbtop.compute.jit.exponential import EXPONENTIAL_FLOPS, exponential
from cbtop.compute.jit.halves import INFINITE, MAGNITUDE, NOT_A_NUMBER
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats

LEAST = np.float32(-3e38)  # this value replaces a logit that is not finite, so that its expert is chosen last


def reference(
    logits: Any, normalised: bool, scale: Any, weights: Any, places: Any, tokens: Any, experts: Any, starts: Any
) -> None:
    """Choose the experts with the largest logits for each token, largest first.

    Among equal logits, the earlier expert is first.

    - logits: float32 (tokens, experts).
    - weights: float32 (tokens, used), `scale` times the softmax. If `normalised`, the softmax is over the chosen
      experts, otherwise over all experts.

    A pair is a token and one of its experts. Pairs are ordered by expert, then by token.

    - places: int64 (tokens, used), each pair's index in that order.
    - tokens and experts: int64 (tokens * used,), the token and the expert of each pair in that order.
    - starts: int64 (experts + 1,). The pairs of expert e have the indices from starts[e] to before starts[e + 1].
    """
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, : weights.shape[1]]
    chances = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    taken = np.take_along_axis(chances, chosen, axis=1)
    weights[:] = scale * taken / (taken if normalised else chances).sum(axis=1, keepdims=True)
    order = np.argsort(chosen.reshape(-1), kind="stable")
    tokens[:] = order // chosen.shape[1]
    places.reshape(-1)[order] = np.arange(order.size)
    experts[:] = chosen.reshape(-1)[order]
    starts[:] = np.searchsorted(experts, np.arange(len(starts)))


@jit
def _value(logits: Any, t: Any, expert: Any) -> Any:
    value = np.float32(logits[t, expert])
    return value if (value.view(np.int32) & MAGNITUDE) < INFINITE else LEAST


@jit
def route(
    logits: Any, normalised: Any, scale: Any, weights: Any, places: Any, tokens: Any, experts: Any, starts: Any
) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles.

    If a token has a logit that is not finite, its weights are NaN.
    """
    count, used = logits.shape[1], weights.shape[1]
    starts[:] = 0
    for t in range(logits.shape[0]):
        last, last_value = -1, np.float32(0)
        for j in range(used):
            best, best_value = -1, np.float32(0)
            for expert in range(count):
                value = _value(logits, t, expert)
                follows = last < 0 or value < last_value or (value == last_value and expert > last)
                if follows and (best < 0 or value > best_value):
                    best, best_value = expert, value
            # At first, `places` has the number of the expert. The loop below replaces it by the index of the pair.
            places[t, j] = best
            weights[t, j] = best_value
            starts[best + 1] += 1
            last, last_value = best, best_value
        _weigh(logits, t, normalised, np.float32(scale), weights)
    for expert in range(count):
        starts[expert + 1] += starts[expert]
    # While pairs are placed, starts[e] is the index for the next pair of expert e. Afterwards starts[e] is the start
    # of expert e + 1, so all starts are moved back by one.
    for t in range(logits.shape[0]):
        for j in range(used):
            expert = places[t, j]
            places[t, j] = starts[expert]
            tokens[starts[expert]] = t
            experts[starts[expert]] = expert
            starts[expert] += 1
    for expert in range(count, 0, -1):
        starts[expert] = starts[expert - 1]
    starts[0] = 0


@jit
def _weigh(logits: Any, t: Any, normalised: Any, scale: Any, weights: Any) -> None:
    """Replace the logits in weights[t] by the weights of the chosen experts."""
    largest, total = weights[t, 0], np.float32(0)
    is_finite: Any = True
    for expert in range(logits.shape[1]):
        is_finite = is_finite and (np.float32(logits[t, expert]).view(np.int32) & MAGNITUDE) < INFINITE
        if not normalised:
            total += exponential(np.float32(_value(logits, t, expert) - largest))
    for j in range(weights.shape[1]):
        weights[t, j] = exponential(np.float32(weights[t, j] - largest))
        if normalised:
            total += weights[t, j]
    for j in range(weights.shape[1]):
        weights[t, j] = scale * weights[t, j] / total if is_finite else np.int32(NOT_A_NUMBER).view(np.float32)


CUDA = CudaModule(
    "route",
    r"""
__device__ __forceinline__ bool is_finite(float value) { return (__float_as_int(value) & 0x7fffffff) < 0x7f800000; }
__device__ __forceinline__ float value_of(float logit) { return is_finite(logit) ? logit : -3e38f; }  // LEAST

// A warp chooses the experts of a token, into places for now, and makes their weights. Of weights each lane reads
// what it wrote itself.
__device__ __forceinline__ void choose(
    const float* logits, int experts, int used, int normalised, float scale, float* weights, int64_t* places)
{
    const int lane = threadIdx.x % 32;
    int last = -1, is_whole = 1;
    float last_value = 0, largest = 0, total = 0;
    for (int j = 0; j < used; j++) {
        int best = -1;
        float best_value = 0;
        for (int i = lane; i < experts; i += 32) {
            const float value = value_of(logits[i]);
            const bool follows = last < 0 || value < last_value || (value == last_value && i > last);
            if (follows && (best < 0 || value > best_value)) {
                best = i;
                best_value = value;
            }
        }
        for (int apart = 16; apart; apart /= 2) {
            const int other = __shfl_xor_sync(~0u, best, apart);
            const float other_value = __shfl_xor_sync(~0u, best_value, apart);
            const bool is_first = other_value > best_value || (other_value == best_value && other < best);
            if (other >= 0 && (best < 0 || is_first)) {
                best = other;
                best_value = other_value;
            }
        }
        if (j == 0) largest = best_value;
        if (normalised) total += expf(best_value - largest);
        if (j % 32 == lane) {
            weights[j] = best_value;
            places[j] = best;
        }
        last = best;
        last_value = best_value;
    }
    for (int i = lane; i < experts; i += 32) {
        is_whole = is_whole && is_finite(logits[i]);
        if (!normalised) total += expf(value_of(logits[i]) - largest);
    }
    if (!normalised) total = warp_sum(total);
    const bool is_broken = __any_sync(~0u, !is_whole);
    for (int j = lane; j < used; j += 32)
        weights[j] = is_broken ? __int_as_float(0x7fc00000) : scale * expf(weights[j] - largest) / total;
}

KERNEL route(const float* logits, int normalised, float scale, float* weights, int64_t* places, int64_t* tokens,
    int64_t* experts, int64_t* starts, int token_count, int expert_count, int used STAMP)
{
    ENTER
    for (int t = threadIdx.x / 32; t < token_count; t += blockDim.x / 32)
        choose(logits + (int64_t)t * expert_count, expert_count, used, normalised, scale, weights + (int64_t)t * used,
               places + (int64_t)t * used);
    __syncthreads();
    const int pairs = token_count * used;
    for (int e = threadIdx.x; e < expert_count; e += blockDim.x) {
        int before = 0;
        for (int pair = 0; pair < pairs; pair++) before += places[pair] < e;
        starts[e] = before;
    }
    if (threadIdx.x == 0) starts[expert_count] = pairs;
    __syncthreads();
    // Others look for theirs meanwhile: what is placed is below 0, as no expert is.
    for (int e = threadIdx.x; e < expert_count; e += blockDim.x) {
        int at = (int)starts[e];
        for (int pair = 0; pair < pairs; pair++)
            if (places[pair] == e) {
                tokens[at] = pair / used;
                experts[at] = e;
                places[pair] = ~(int64_t)at;
                at++;
            }
    }
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) places[pair] = ~places[pair];
    LEAVE
}
""",
)


def launches(
    logits: Any, normalised: bool, scale: Any, weights: Any, places: Any, tokens: Any, experts: Any, starts: Any
) -> tuple[CudaLaunch, ...]:
    """Return one launch with a single block, because the block must order all pairs."""
    (count, expert_count), used = logits.shape, weights.shape[1]
    outs = weights, places, tokens, experts, starts
    sizes = np.int32(count), np.int32(expert_count), np.int32(used)
    shape = line(1, whole_warps(max(WARP * count, expert_count)))
    return (CudaLaunch(CUDA, "route", *shape, (logits, np.int32(normalised), np.float32(scale), *outs, *sizes)),)


def work(used: int) -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are logits.

    A logit is compared once for every chosen expert, and takes at most one exponential.
    """
    return KernelWork(flops_per_element=used + EXPONENTIAL_FLOPS + 1.0, bytes_per_element=FLOAT_BYTES)


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    token_count, experts, used = 3, size + 3, 2
    pairs = token_count, used
    return (
        floats(rng, token_count, experts),
        True,
        1.0,
        np.zeros(pairs, np.float32),
        np.zeros(pairs, np.int64),
        np.zeros(token_count * used, np.int64),
        np.zeros(token_count * used, np.int64),
        np.zeros(experts + 1, np.int64),
    )


ROUTE = Kernel(
    "route",
    reference,
    route,
    work,
    (3, 4, 5, 6, 7),
    contract("route"),
    _examples,
    cuda=CudaKernel((CUDA,), launches),
)
