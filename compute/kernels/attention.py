"""Attention: the sum of the values of all positions that a new token sees, weighted by a softmax.

reference    NumPy, float64: scores, softmax, weighted sum
numba        64 positions at a time with a running maximum and sum (Milakov and Gimelshein 2018; Rabe and Staats
             2021), so that no buffer grows with the context. A row is a head of a token. Six rows of a group share
             every read of keys and values. In a prompt, these rows may belong to several tokens. The rows left over
             share reads in groups of four or two. With several threads, each thread does some of the groups
             (attention_loops.py).
cuda         few rows: flash decoding (Dao et al. 2023). The context is cut into enough pieces to fill the GPU, and
             the last block combines their results. Many rows: one block for every 64 rows. Both kernels use tensor
             cores (cuda/attention_*.py).

On the CPU, the keys of sixteen positions are stored together, so that scores need no sum across a register. Values,
and keys on a GPU, are stored position by position.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.cuda import attention as shared
from cbtop.compute.cuda import attention_few as few
from cbtop.compute.cuda import attention_many as many
from cbtop.compute.cuda.launches import CudaKernel, CudaLaunch, CudaModule
from cbtop.compute.jit.exponential import POWER_FLOPS, TANGENT_FLOPS
from cbtop.compute.jit.halves import from_bits
from cbtop.compute.jit.vectors import LANES
from cbtop.compute.kernels.attention_loops import LN_2, attend, compiled_loops, hold, scratch_for
from cbtop.compute.kernels.base import Arguments, Kernel, KernelWork, floats
from cbtop.compute.kernels.kv_caches import POSITIONS, empty_caches, keys_of, padded


def reference(
    q: Any, k_cache: Any, v_cache: Any, start: int, scale: float, window: int, cap: float, out: Any, scratch: Any
) -> None:
    """Set out[t, h] = sum over p <= start + t of softmax(scale * q[t, h] . k[h // group, p]) * v[h // group, p].

    A token sees only the last `window` positions, including its own (0: all positions). A score s becomes cap *
    tanh(s / cap), unless `cap` is 0. A group of query heads shares a key head (Ainslie et al. 2023).

    q, out: float32 (tokens, heads * head_dim). k_cache, v_cache: from `empty_caches` or `plain_caches`. `scratch` is
    not used.
    """
    head_dim = k_cache.shape[2]
    for t in range(len(q)):
        first, end = first_seen(start + t, window), start + t + 1
        weights = attention_weights(q[t], k_cache, start + t, scale, window, cap)[:, first:]
        seen = from_bits(v_cache)[:, first:end, :head_dim].astype(np.float64)
        grouped = weights.reshape(len(v_cache), -1, end - first)
        out[t] = np.einsum("kgp,kpd->kgd", grouped, seen).reshape(-1)


def first_seen(position: int, window: int) -> int:
    """Return the first position that the token at `position` sees."""
    return max(position + 1 - window, 0) if window else 0


def positions_seen(start: int, tokens: int, window: int) -> int:
    """Return the number of positions that each token sees, added up over `tokens` tokens from position `start` on."""
    # number of tokens that see one position more than the token before them
    growing = min(max(window - start, 0), tokens) if window else tokens
    return growing * start + growing * (growing + 1) // 2 + (tokens - growing) * window


def attention_weights(q: Any, k_cache: Any, position: int, scale: float, window: int, cap: float) -> Any:
    """Return the softmax of one token's query. It is 0 for positions outside the token's window.

    q is float32 (heads * head_dim,), and the result is float64 (heads, position + 1).
    """
    kv_heads, _, head_dim = k_cache.shape[:3]
    first = first_seen(position, window)
    keys = keys_of(k_cache)[:, first : position + 1].astype(np.float64)
    queries = q.reshape(kv_heads, -1, head_dim).astype(np.float64)
    scores = scale * np.einsum("kgd,kpd->kgp", queries, keys).reshape(-1, position + 1 - first)
    if cap:
        scores = cap * np.tanh(scores / cap)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.pad(powers / powers.sum(axis=1, keepdims=True), ((0, 0), (first, 0)))


# Without a cap, separate loops run. Testing for a cap in each call would cost 4 % (a query of 6 heads, 513
# positions).
_attend, _attend_parallel = compiled_loops("_attend")
_attend_held, _attend_held_parallel = compiled_loops("_attend_held", _held=hold)


def attention(
    q: Any, k_cache: Any, v_cache: Any, start: int, scale: float, window: int, cap: float, out: Any, scratch: Any
) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles.

    `scratch` is from `scratch_for`. Its size determines the number of threads.
    """
    loops = (_attend_held, _attend_held_parallel) if cap else (_attend, _attend_parallel)
    attend(loops, q, (k_cache, v_cache), start, (scale, window, cap), out, scratch)


# By how much scores rise from one block of positions to the next, in some examples. Some rises are below
# `attention_loops.ABOVE`, and some above. All rises are small enough that earlier blocks still contribute to the
# result.
RISES = np.array([0, 5, 10, 15], np.float32)
LARGEST_HEAD = 256
# largest head_dim of the kernel for many rows; larger heads need too many registers for 16 rows per warp
LARGEST_OF_MANY = 128
HELD = "_held"


def _entries(name: str, numbers: str, call: str, *, of_pieces: bool = True) -> str:
    """Return the CUDA entries for one size of heads: one without a cap and one with a cap."""
    more, given = ("float* scratch, float share, ", "scratch, share, ") if of_pieces else ("", "")
    return "".join(
        f"""
KERNEL {name}{held}(const float* q, const {numbers}* keys, const {numbers}* values, const int* start, float scale,
    int window, float cap, float* out, {more}int tokens, int heads, int group, int head_dim, int stride,
    int context STAMP)
{{
    ENTER
    const Sizes sizes = {{tokens, heads, group, head_dim, stride, context}};
    {call}(q, keys, values, start, {scores}(scale, cap), window, out, {given}sizes);
    LEAVE
}}
"""
        for held, scores in (("", "Scores"), (HELD, "HeldScores"))
    )


FEW_OF_HALVES = CudaModule(
    "attention_few_f16",
    shared.ATTENTION
    + few.PIECES
    + shared.TENSOR_CORES
    + few.OF_HALVES
    + _entries("few_64", "uint16_t", "attend_few<2, 64>")
    + _entries("few_128", "uint16_t", "attend_few<4, 128>")
    + _entries("few_256", "uint16_t", "attend_few<8, 128>"),
)
FEW_OF_FLOATS = CudaModule(
    "attention_few_f32",
    shared.ATTENTION
    + few.PIECES
    + few.OF_FLOATS
    + _entries("few_128", "float", "attend_few<1>")
    + _entries("few_256", "float", "attend_few<2>"),
)
MANY_OF_HALVES = CudaModule(
    "attention_many_f16",
    shared.ATTENTION
    + shared.TENSOR_CORES
    + many.OF_HALVES
    + _entries("many_64", "uint16_t", "attend_many<64>", of_pieces=False)
    + _entries("many_128", "uint16_t", "attend_many<128>", of_pieces=False),
)


def scratch_shape(multiprocessors: int) -> tuple[int, int]:
    """Return the shape of the float32 scratch memory of the CUDA version, for this number of multiprocessors.

    One row contains counters. Each other row is for the partial result of a block, which the last block reads. The
    scratch must contain zeros before its first use. Calls that do not overlap may share it.
    """
    return multiprocessors + 1, few.SLOT


def launches(
    q: Any, k_cache: Any, v_cache: Any, start: Any, scale: float, window: int, cap: float, out: Any, scratch: Any
) -> tuple[CudaLaunch, ...]:
    """Return one launch. The caches are from `plain_caches`, and `scratch` has the shape `scratch_shape`.

    Raises ValueError for heads larger than 256.
    """
    (tokens, columns), (kv_heads, context, head_dim) = q.shape, k_cache.shape
    if head_dim > LARGEST_HEAD:
        raise ValueError(f"heads are of {head_dim} numbers; on a GPU at most {LARGEST_HEAD} are wanted")
    heads, is_half = columns // head_dim, k_cache.dtype == np.uint16
    group, held = heads // kv_heads, HELD if cap else ""
    rows = tokens * group
    sizes = [np.int32(one) for one in (tokens, heads, group, head_dim, padded(head_dim), context)]
    first = q, k_cache, v_cache, start, np.float32(scale), np.int32(window), np.float32(cap), out
    if is_half and head_dim <= LARGEST_OF_MANY and rows >= many.ROWS:
        grid, block = (kv_heads, -(-rows // many.ROWS), 1), (many.THREADS, 1, 1)
        entry = ("many_64" if head_dim <= 64 else "many_128") + held
        return (CudaLaunch(MANY_OF_HALVES, entry, grid, block, (*first, *sizes)),)
    parts = -(-padded(head_dim) // few.OUTPUTS)
    grid_of_rows = -(-rows // few.ROWS) * parts
    pieces = max((scratch.shape[0] - 1) // (kv_heads * grid_of_rows), 1)
    entry = ("few_256" if parts > 1 else "few_64" if is_half and head_dim <= 64 else "few_128") + held
    module, block = FEW_OF_HALVES if is_half else FEW_OF_FLOATS, (few.THREADS, 1, 1)
    arguments = *first, scratch, np.float32(1 / pieces), *sizes
    return (CudaLaunch(module, entry, (pieces, kv_heads, grid_of_rows), block, arguments),)


def work(head_dim: int, heads_per_key: int, cache_bytes: int, is_capped: bool = False) -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are heads x positions, added up over the
    tokens.

    A number in the cache takes `cache_bytes`. A key and its value are read once for all heads that share them.
    """
    return KernelWork(
        flops_per_element=4.0 * head_dim + POWER_FLOPS + 3 + is_capped * (TANGENT_FLOPS + 2),
        bytes_per_element=2.0 * cache_bytes * head_dim / heads_per_key,
    )


def examples_of(
    tokens: int, threads: int, dtype: Any, slides: bool, cap: float, group: int = 3, rises: bool = False
) -> Any:
    """Return a function that makes examples.

    Its parameter `size` is head_dim up to 64. For larger sizes, head_dim is 256.

    `group` heads share keys and values. With `rises`, scores rise by RISES from block to block.
    """

    def examples(rng: np.random.Generator, size: int) -> Arguments:
        head_dim = size if size <= 64 else 256
        kv_heads, start = 2, 8 * min(size, 16) if tokens == 1 else size
        if rises:
            start = max(9 * head_dim, len(RISES) * POSITIONS)
        k_cache, v_cache = empty_caches(kv_heads, start + tokens + 1, head_dim, np.float32)
        k_cache[:], v_cache[:] = floats(rng, *k_cache.shape), floats(rng, *v_cache.shape)
        columns = kv_heads * group * head_dim
        times = 1 if rises or tokens == 1 else 3  # if there is only one token, make every position matter
        q, out = times * floats(rng, tokens, columns), np.zeros((tokens, columns), np.float32)
        if rises:
            q[:, ::head_dim] = 1
            rise = np.take(RISES, np.arange(k_cache.shape[1]) * LANES // POSITIONS, mode="clip")
            # this rise makes the token's own position matter among thousands of positions
            rise[start // LANES :] += RISES[1]
            k_cache[:, :, 0] += (head_dim**0.5 * LN_2 * rise)[:, None]
        if dtype == np.uint16:
            k_cache, v_cache = (cache.astype(np.float16).view(np.uint16) for cache in (k_cache, v_cache))
        window = 1 + size // 2 if slides else 0
        return q, k_cache, v_cache, start, head_dim**-0.5, window, cap, out, scratch_for(threads, head_dim)

    return examples


def kernel_for(
    tokens: int = 1,
    threads: int = 1,
    dtype: Any = np.uint16,
    slides: bool = False,
    cap: float = 0.0,
    group: int = 3,
    rises: bool = False,
) -> Kernel:
    """Return the kernel of attention. Its examples have `tokens` tokens, `threads` threads and a cache of `dtype`.

    The scores in the examples are limited by `cap`. If `slides`, the examples have a window. See `examples_of` for
    the other arguments.
    """
    return Kernel(
        name="attention",
        reference=reference,
        implementation=attention,
        work=work,
        outputs=(7,),
        contract=contract("attention"),
        examples=examples_of(tokens, threads, dtype, slides, cap, group, rises),
        parallel=True,
        by_token=(0, 7),
        cuda=CudaKernel((FEW_OF_HALVES, FEW_OF_FLOATS, MANY_OF_HALVES), launches),
    )


ATTENTION = kernel_for()
