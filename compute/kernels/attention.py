"""Attention: each new token's weighted sum of the values of all positions that it sees. No softmax is stored whole.

reference    NumPy, float64: scores, softmax, weighted sum
numba        64 positions at a time with a running maximum and sum (Milakov and Gimelshein 2018; Rabe and Staats
             2021), so that no buffer grows with the context. Six rows, each a token's head, share every read of
             keys and values: the heads of a group, and in a prompt its tokens; the remainder in fours or twos. One
             thread, or some groups for each.
cuda         a few rows: flash decoding (Dao et al. 2023), the context in enough pieces to fill the GPU, which the
             last block combines; many: a block for 64. Both by tensor cores (cuda/attention.py)

Keys are stored sixteen positions together, so that scores need no sum across a register. Values are stored as they
come, and on a GPU keys, too.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.cuda import attention as cuda
from cbtop.compute.cuda.launches import CudaKernel, CudaLaunch, CudaModule
from cbtop.compute.jit.compile import copy_of, jit, jit_inlined, jit_parallel, prange
from cbtop.compute.jit.cpu import CPU_NAME, HAS_VNNI
from cbtop.compute.jit.exponential import (
    POWER_FLOPS,
    TANGENT_FLOPS,
    exponential,
    powers_of_two,
    tangent,
)
from cbtop.compute.jit.halves import from_bits
from cbtop.compute.jit.sums import add_products, load_sums, store_sums, zero_sums
from cbtop.compute.jit.vectors import (
    LANES,
    add,
    any_above,
    larger,
    largest_of,
    load_floats,
    prefetch_to_l2,
    splat,
    store_floats,
    total_of,
)
from cbtop.compute.kernels.base import Arguments, Kernel, KernelWork, floats
from cbtop.compute.memory import line_aligned_zeros, zeros_on_huge_pages
from cbtop.compute.settings import crossovers

CACHE_TYPES = {"f16": np.uint16, "f32": np.float32}  # the element type of a KV cache: uint16 has the bits of f16
POSITIONS = 64  # processed together; a cache has a multiple of them
# Rows that share a read. A processor begins two multiply-adds a cycle, and each takes four cycles. So eight registers
# of sums just keep it busy, and more leave some slack. In pairs of rows each has two vectors. With AVX-512, whose
# vectors are one register, each row of larger groups has two, too, except on a Zen 4: it begins one multiply-add a
# cycle, and takes 1.16 times as long with them.
MANY, SOME, PAIR = 6, 4, 2
WIDE = HAS_VNNI and CPU_NAME != "znver4"
MAX_ROWS = 64  # in one piece of work
LOG2_E, LN_2 = math.log2(math.e), np.float32(math.log(2))  # scores are scaled for powers of two
# Below any score; and the score of an unseen position, lower still, so that its weight is 0 even if no position has
# been seen. An infinity would be undefined under fastmath.
LOWEST, UNSEEN = np.float32(-1e30), np.float32(-2e30)
# A score may exceed the reference of the weights by this much before a higher reference replaces it, because finding
# the largest of every block takes 4 % of all. No weight is above 2^8, so sums of weights are far from infinite.
ABOVE = np.float32(8)
NOTHING_LEFT = np.float32(126)  # a rise by this much reduces everything before to nothing
TIMES = 1  # values were divided by this, so sums are multiplied by it


def reference(
    q: Any, k_cache: Any, v_cache: Any, start: int, scale: float, window: int, cap: float, out: Any, scratch: Any
) -> None:
    """out[t, h] = sum over p <= start + t of softmax(scale * q[t, h] . k[h // group, p]) * v[h // group, p].

    A token sees only the last `window` positions, its own included; 0: all. Scores s become cap * tanh(s / cap); 0:
    they are not capped. q, out: float32 (tokens, heads * head_dim); k_cache, v_cache: from `empty_caches` or
    `plain_caches`; `scratch` is not used. A group of heads shares a key head (Ainslie et al. 2023).
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
    """Return the number of positions that `tokens` tokens see, the first of them at `start`, added up."""
    growing = min(max(window - start, 0), tokens) if window else tokens  # each sees one more than the token before it
    return growing * start + growing * (growing + 1) // 2 + (tokens - growing) * window


def attention_weights(q: Any, k_cache: Any, position: int, scale: float, window: int, cap: float) -> Any:
    """Return the softmax of one token's query, float32 (heads * head_dim,), as float64 (heads, position + 1); 0
    outside its window."""
    kv_heads, _, head_dim = k_cache.shape[:3]
    first = first_seen(position, window)
    keys = keys_of(k_cache)[:, first : position + 1].astype(np.float64)
    queries = q.reshape(kv_heads, -1, head_dim).astype(np.float64)
    scores = scale * np.einsum("kgd,kpd->kgp", queries, keys).reshape(-1, position + 1 - first)
    if cap:
        scores = cap * np.tanh(scores / cap)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.pad(powers / powers.sum(axis=1, keepdims=True), ((0, 0), (first, 0)))


def empty_caches(kv_heads: int, context: int, head_dim: int, dtype: Any) -> tuple[Any, Any]:
    """Return keys (kv_heads, context / 16, head_dim, 16) and values (kv_heads, context, head_dim), zeros.

    The context is rounded up to a multiple of 64, the values' head_dim to one of 16. `dtype` is float32, or uint16
    for the bits of float16.
    """
    (caches,) = caches_of_layers(1, kv_heads, context, head_dim, dtype)
    return caches


def caches_of_layers(layers: int, kv_heads: int, context: int, head_dim: int, dtype: Any) -> list[tuple[Any, Any]]:
    """Return `empty_caches` for each layer.

    They are on huge pages: a token reads them once, from memory, which takes 1.1 of the time from small pages
    (position 2,000, AMD EPYC).
    """
    positions = -(-context // POSITIONS) * POSITIONS
    of_one = (kv_heads, positions // LANES, head_dim, LANES), (kv_heads, positions, padded(head_dim))
    arrays = zeros_on_huge_pages(of_one * layers, dtype)
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def plain_caches(kv_heads: int, context: int, head_dim: int, dtype: Any, zeros: Any = np.zeros) -> tuple[Any, Any]:
    """Return keys and values in a GPU's layout, both (kv_heads, context, head_dim), made by `zeros`.

    They are views: each position is padded with zeros to a multiple of 16 numbers, so that whole vectors are read.
    """
    keys, values = (zeros((kv_heads, context, padded(head_dim)), dtype)[..., :head_dim] for _ in range(2))
    return keys, values


def padded(head_dim: int) -> int:
    """Return the numbers that a position takes in a cache: whole vectors."""
    return -(-head_dim // LANES) * LANES


def keys_of(k_cache: Any) -> Any:
    """Return the keys as (kv_heads, positions, head_dim), of float16 or float32."""
    if k_cache.ndim == 3:
        return from_bits(k_cache)
    kv_heads, _, head_dim, _ = k_cache.shape
    return from_bits(k_cache).transpose(0, 1, 3, 2).reshape(kv_heads, -1, head_dim)


def scratch_for(threads: int, head_dim: int) -> Any:
    """Return float32 (threads * 64, columns): for each row its weights, its output, its query, the reference of its
    weights, and their sums."""
    return line_aligned_zeros((threads * MAX_ROWS, POSITIONS + 2 * padded(head_dim) + 2 * LANES), np.float32)


_ROWS, _VECTORS = 2, 2  # of sums that stay in registers; each copy of the functions below has its own


def _scores(
    keys: Any, first: Any, head_dim: Any, ahead: Any, scratch: Any, row: Any, query: Any, column: Any
) -> None:
    """scratch[row : row + _ROWS, column : + 16 * _VECTORS] = the queries of these rows times as many keys."""
    # compiled
    sums = zero_sums(_ROWS, _VECTORS)
    none = np.uint64(0)
    for i in range(head_dim):
        for vector in range(np.uint64(_VECTORS)):
            prefetch_to_l2(keys, first + i + vector * head_dim + ahead, none)
        sums = add_products(sums, keys, first + i, none, head_dim, none, scratch, row, query + i, _ROWS, _VECTORS)
    store_sums(scratch, row, column, sums, _ROWS, _VECTORS)


def _add_values(
    values: Any, first: Any, skipped: Any, count: Any, ahead: Any, scratch: Any, row: Any, output: Any, column: Any
) -> None:
    """scratch[row : row + _ROWS, output + column : + 16 * _VECTORS] += the weights of these rows times `count`
    values, except the skipped ones."""
    # compiled
    sums = load_sums(scratch, row, output + column, _ROWS, _VECTORS)
    none, lanes = np.uint64(0), np.uint64(LANES)
    for p in range(skipped, count):
        prefetch_to_l2(values, first + ahead, column * np.uint64(POSITIONS) + p * np.uint64(LANES * _VECTORS))
        sums = add_products(sums, values, first + p, column, none, lanes, scratch, row, p, _ROWS, _VECTORS)
    store_sums(scratch, row, output + column, sums, _ROWS, _VECTORS)


@cache
def of_rows(function: Any, rows: int, vectors: int) -> Any:
    """Return `function`, compiled for this number of rows and of vectors of sums at once."""
    own = {"_ROWS": rows, "_VECTORS": vectors}
    return jit_inlined(copy_of(function, f"{function.__name__}_of_{rows}_by_{vectors}", **own))


_scores_of_six, _scores_of_four = (of_rows(_scores, rows, 2 if WIDE else 1) for rows in (MANY, SOME))
_add_values_of_six, _add_values_of_four = (of_rows(_add_values, rows, 2 if WIDE else 1) for rows in (MANY, SOME))
_scores_of_pair, _add_values_of_pair = of_rows(_scores, PAIR, 2), of_rows(_add_values, PAIR, 2)
# The remainder of a head's values if it is an odd number of vectors. With one vector at once nothing remains.
_add_last_of_six, _add_last_of_four, _add_last_of_pair = (
    of_rows(_add_values, rows, 1) for rows in (MANY, SOME, PAIR)
)


@jit_inlined
def _first_seen(position: Any, window: Any) -> Any:
    """As `first_seen`."""
    end = position + np.uint64(1)
    return end - window if window > np.uint64(0) and end > window else np.uint64(0)


@jit_inlined
def _leave(scratch: Any, row: Any, hidden: Any, visible: Any, cap: Any) -> None:
    """Leave scores as they are."""


@jit_inlined
def hold(scratch: Any, row: Any, hidden: Any, visible: Any, cap: Any) -> None:
    """Limit scores of visible positions after the hidden ones to between -cap and cap."""
    largest, inverse = np.float32(cap), np.float32(1 / cap)
    for p in range(hidden, visible):
        scratch[row, p] = largest * tangent(np.float32(scratch[row, p] * inverse))


@jit_inlined
def _rise(scratch: Any, row: Any, hidden: Any, visible: Any, head_dim: Any, output: Any, state: Any) -> None:
    """Set all scores to UNSEEN except those of visible positions after the hidden ones. If one is far above the
    reference of the weights, the largest becomes the reference, and the sums are rescaled."""
    positions, lanes = np.uint64(POSITIONS), np.uint64(LANES)
    for p in range(hidden):
        scratch[row, p] = np.float32(UNSEEN)
    for p in range(visible, positions):
        scratch[row, p] = np.float32(UNSEEN)
    before = scratch[row, state]
    most = splat(before)
    for p in range(np.uint64(0), positions, lanes):
        most = larger(load_floats(scratch, row, p), most)
    if any_above(most, np.float32(before + ABOVE)):
        largest = np.floor(largest_of(most))  # an exact power of two, so that rounding is unchanged
        rise = np.float32(largest - before)
        factor = exponential(np.float32(-rise * LN_2)) if rise < NOTHING_LEFT else np.float32(0)
        scratch[row, state] = largest
        for i in range(lanes):
            scratch[row, state + lanes + i] *= factor
        for i in range(head_dim):
            scratch[row, output + i] *= factor


@jit_inlined
def take_query(q: Any, token: Any, first: Any, head_dim: Any, scale: Any, scratch: Any, row: Any, query: Any) -> None:
    """scratch[row, query : query + head_dim] = a head's query times the scale."""
    for i in range(head_dim):
        scratch[row, query + i] = q[token, first + i] * np.float32(scale)


@jit_inlined
def _weigh(scratch: Any, row: Any, state: Any) -> None:
    """Turn scores into powers of two; those of UNSEEN are 0."""
    positions, lanes = np.uint64(POSITIONS), np.uint64(LANES)
    less, sums = splat(np.float32(-scratch[row, state])), load_floats(scratch, row, state + lanes)
    for p in range(np.uint64(0), positions, lanes):
        powers = powers_of_two(add(load_floats(scratch, row, p), less))
        store_floats(scratch, row, p, powers)
        sums = add(sums, powers)
    store_floats(scratch, row, state + lanes, sums)


_held = _leave  # becomes `hold` in the copy of the code below for scores with a cap


def attend_any(  # compiled
    q: Any,
    keys: Any,
    values: Any,
    begin: Any,
    groups: Any,
    dimensions: Any,
    pieces: Any,
    scale: Any,
    width: Any,
    cap: Any,
    out: Any,
    scratch: Any,
    chunk: Any,
    chunks: Any,
) -> None:
    """Do every `chunks`-th piece of work, from `chunk` on: the heads of one of the parts of a group, for some
    tokens."""
    start, kv_heads, head_dim, parts = np.uint64(begin), np.uint64(groups), np.uint64(dimensions), np.uint64(pieces)
    context, group = np.uint64(values.shape[0]) // kv_heads, np.uint64(q.shape[1]) // head_dim // kv_heads
    tokens, positions = np.uint64(q.shape[0]), np.uint64(POSITIONS)
    lanes, window = np.uint64(LANES), np.uint64(width)
    many, some, pair = np.uint64(MANY), np.uint64(SOME), np.uint64(PAIR)
    padded = (head_dim + lanes - np.uint64(1)) // lanes * lanes
    output, query = positions, positions + padded
    state = query + padded
    most_heads = (group + parts - np.uint64(1)) // parts
    most_tokens: Any = max(np.uint64(1), np.uint64(MAX_ROWS) // most_heads)
    blocks = (tokens + most_tokens - np.uint64(1)) // most_tokens
    base = np.uint64(chunk) * np.uint64(scratch.shape[0] // chunks)
    for piece in range(np.uint64(chunk), kv_heads * parts * blocks, np.uint64(chunks)):
        kv_head, part, block = piece // (parts * blocks), piece // blocks % parts, piece % blocks
        first_head = kv_head * group + part * group // parts
        heads_here = kv_head * group + (part + np.uint64(1)) * group // parts - first_head
        first_token = block * most_tokens
        rows = heads_here * min(most_tokens, tokens - first_token)
        whole = (rows + np.uint64(1)) // pair * pair  # rows that share are an even number
        for one in range(whole):
            for i in range(np.uint64(2) * padded):
                scratch[base + one, output + i] = np.float32(0)
            scratch[base + one, state] = np.float32(LOWEST)
            for i in range(lanes):
                scratch[base + one, state + lanes + i] = np.float32(0)
        for one in range(rows):
            t, head = first_token + one // heads_here, first_head + one % heads_here
            take_query(q, t, head * head_dim, head_dim, scale, scratch, base + one, query)
        end = start + first_token + (rows - np.uint64(1)) // heads_here + np.uint64(1)
        begin_of_all = _first_seen(start + first_token, window) // positions * positions
        for p in range(begin_of_all, end, positions):
            # Prefetch the next part, of this head or the next one, line by line and only into L2: L1 is full of the
            # present part.
            ahead = positions if p + positions < end else context + begin_of_all - p
            keys_ahead = ahead // lanes * head_dim
            r: Any = np.uint64(0)
            while r < rows:
                left, at = rows - r, base + r
                together = many if left >= many - np.uint64(1) else some if left > pair else pair
                last = min(r + together, rows) - np.uint64(1)
                position: Any = start + first_token + r // heads_here
                of_token: Any = r % heads_here
                seen = start + first_token + last // heads_here + np.uint64(1)
                lowest = _first_seen(position, window)
                own_rows = r
                r += together
                if seen <= p or lowest >= p + positions:
                    continue
                count = min(positions, seen - p)
                skipped = lowest - p if lowest > p else np.uint64(0)
                at_once = lanes + lanes if together == pair or WIDE else lanes
                for place in range(skipped // at_once * at_once, count, at_once):
                    key = (kv_head * (context // lanes) + (p + place) // lanes) * head_dim
                    if together == many:
                        _scores_of_six(keys, key, head_dim, keys_ahead, scratch, at, query, place)
                    elif together == some:
                        _scores_of_four(keys, key, head_dim, keys_ahead, scratch, at, query, place)
                    else:
                        _scores_of_pair(keys, key, head_dim, keys_ahead, scratch, at, query, place)
                for one in range(own_rows, last + np.uint64(1)):  # padding rows have scores of 0
                    visible = min(positions, position + np.uint64(1) - p) if position >= p else np.uint64(0)
                    own = _first_seen(position, window)
                    hidden = min(positions, own - p) if own > p else np.uint64(0)
                    _held(scratch, base + one, hidden, visible, cap)
                    _rise(scratch, base + one, hidden, visible, padded, output, state)
                    of_token += np.uint64(1)
                    if of_token == heads_here:  # divisions, one for each row, took 5 % of all
                        position, of_token = position + np.uint64(1), np.uint64(0)
                for one in range(own_rows, last + np.uint64(1)):
                    _weigh(scratch, base + one, state)
                first: Any = kv_head * context + p
                column: Any = np.uint64(0)
                while column + at_once <= padded:
                    if together == many:
                        _add_values_of_six(values, first, skipped, count, ahead, scratch, at, output, column)
                    elif together == some:
                        _add_values_of_four(values, first, skipped, count, ahead, scratch, at, output, column)
                    else:
                        _add_values_of_pair(values, first, skipped, count, ahead, scratch, at, output, column)
                    column += at_once
                if column < padded:
                    if WIDE and together == many:
                        _add_last_of_six(values, first, skipped, count, ahead, scratch, at, output, column)
                    elif WIDE and together == some:
                        _add_last_of_four(values, first, skipped, count, ahead, scratch, at, output, column)
                    else:
                        _add_last_of_pair(values, first, skipped, count, ahead, scratch, at, output, column)
        for one in range(rows):
            t, head = first_token + one // heads_here, first_head + one % heads_here
            inverse = np.float32(np.float32(TIMES) / total_of(load_floats(scratch, base + one, state + lanes)))
            for i in range(head_dim):
                out[t, head * head_dim + i] = scratch[base + one, output + i] * inverse


def attend_any_parallel(  # compiled
    q: Any,
    keys: Any,
    values: Any,
    begin: Any,
    groups: Any,
    dimensions: Any,
    pieces: Any,
    scale: Any,
    width: Any,
    cap: Any,
    out: Any,
    scratch: Any,
    chunks: Any,
) -> None:
    for chunk in prange(chunks):
        own = np.int64(chunk)
        _attend(q, keys, values, begin, groups, dimensions, pieces, scale, width, cap, out, scratch, own, chunks)


# Without a cap its check would cost 4 % if a call decided at run time (a query of 6 heads, 513 positions).
_attend = jit(copy_of(attend_any, "_attend"))
_attend_held = jit(copy_of(attend_any, "_attend_held", _held=hold))
_attend_parallel = jit_parallel(copy_of(attend_any_parallel, "_attend_parallel"))
_attend_held_parallel = jit_parallel(copy_of(attend_any_parallel, "_attend_held_parallel", _attend=_attend_held))


def attention(
    q: Any, k_cache: Any, v_cache: Any, start: int, scale: float, window: int, cap: float, out: Any, scratch: Any
) -> None:
    """As `reference`. `scratch` is from `scratch_for`, whose threads it uses."""
    alone, together = (_attend_held, _attend_held_parallel) if cap else (_attend, _attend_parallel)
    attend(alone, together, q, k_cache, v_cache, start, scale, window, cap, out, scratch)


def attend(
    alone: Any,
    together: Any,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    start: int,
    scale: float,
    window: int,
    cap: float,
    out: Any,
    scratch: Any,
) -> None:
    """Run the loop for one thread, or the one for all threads of `scratch` if there is enough work."""
    kv_heads, _, head_dim, _ = k_cache.shape
    tokens, columns = q.shape
    group = columns // head_dim // kv_heads
    seen = min(start + tokens, window) if window else start + tokens
    threads = scratch.shape[0] // MAX_ROWS
    chunks = threads if threads > 1 and columns * tokens * seen >= crossovers().attention_products else 1
    # A group is divided if there are fewer groups than threads, or if its heads are more rows than fit.
    parts = max(min(group, -(-chunks // kv_heads)), -(-group // MAX_ROWS))
    keys, values = k_cache.reshape(-1, LANES), v_cache.reshape(-1, v_cache.shape[2])
    scores = scale * LOG2_E, window, cap * LOG2_E
    if chunks == 1:
        alone(q, keys, values, start, kv_heads, head_dim, parts, *scores, out, scratch, 0, 1)
    else:
        together(q, keys, values, start, kv_heads, head_dim, parts, *scores, out, scratch, chunks)


# Rises of scores from block to block: by less than the weights' limit, and by more, after blocks that still count.
RISES = np.array([0, 5, 10, 15], np.float32)
LARGEST_HEAD = 256  # on a GPU
LARGEST_OF_MANY = 128  # larger heads need too many registers for 16 rows a warp
HELD = "_held"  # the end of the names of entries with a cap


def _entries(name: str, numbers: str, call: str, *, of_pieces: bool = True) -> str:
    """Return the entries of a size of heads: without a cap, and with one."""
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
    cuda.ATTENTION
    + cuda.FEW
    + cuda.TENSOR_CORES
    + cuda.FEW_OF_HALVES
    + _entries("few_64", "uint16_t", "attend_few<2, 64>")
    + _entries("few_128", "uint16_t", "attend_few<4, 128>")
    + _entries("few_256", "uint16_t", "attend_few<8, 128>"),
)
FEW_OF_FLOATS = CudaModule(
    "attention_few_f32",
    cuda.ATTENTION
    + cuda.FEW
    + cuda.FEW_OF_FLOATS
    + _entries("few_128", "float", "attend_few<1>")
    + _entries("few_256", "float", "attend_few<2>"),
)
MANY_OF_HALVES = CudaModule(
    "attention_many_f16",
    cuda.ATTENTION
    + cuda.TENSOR_CORES
    + cuda.MANY_OF_HALVES
    + _entries("many_64", "uint16_t", "attend_many<64>", of_pieces=False)
    + _entries("many_128", "uint16_t", "attend_many<128>", of_pieces=False),
)


def scratch_shape(multiprocessors: int) -> tuple[int, int]:
    """Return the shape of the CUDA version's scratch, float32, on a GPU with this number of multiprocessors:
    counters, and the partial results of as many blocks, which the last one reads. It is zeros before the first call.
    Calls may share it in turn.
    """
    return multiprocessors + 1, cuda.SLOT


def launches(
    q: Any, k_cache: Any, v_cache: Any, start: Any, scale: float, window: int, cap: float, out: Any, scratch: Any
) -> tuple[CudaLaunch, ...]:
    """One launch, with caches from `plain_caches` and a scratch of `scratch_shape`. Raises ValueError for heads above
    256."""
    (tokens, columns), (kv_heads, context, head_dim) = q.shape, k_cache.shape
    if head_dim > LARGEST_HEAD:
        raise ValueError(f"heads are of {head_dim} numbers; on a GPU at most {LARGEST_HEAD} are wanted")
    heads, is_half = columns // head_dim, k_cache.dtype == np.uint16
    group, held = heads // kv_heads, HELD if cap else ""
    rows = tokens * group
    sizes = [np.int32(one) for one in (tokens, heads, group, head_dim, padded(head_dim), context)]
    first = q, k_cache, v_cache, start, np.float32(scale), np.int32(window), np.float32(cap), out
    if is_half and head_dim <= LARGEST_OF_MANY and rows >= cuda.MANY_ROWS:
        grid, block = (kv_heads, -(-rows // cuda.MANY_ROWS), 1), (cuda.MANY_THREADS, 1, 1)
        entry = ("many_64" if head_dim <= 64 else "many_128") + held
        return (CudaLaunch(MANY_OF_HALVES, entry, grid, block, (*first, *sizes)),)
    parts = -(-padded(head_dim) // cuda.OUTPUTS)
    grid_of_rows = -(-rows // cuda.ROWS) * parts
    pieces = max((scratch.shape[0] - 1) // (kv_heads * grid_of_rows), 1)
    entry = ("few_256" if parts > 1 else "few_64" if is_half and head_dim <= 64 else "few_128") + held
    module, block = FEW_OF_HALVES if is_half else FEW_OF_FLOATS, (cuda.FEW_THREADS, 1, 1)
    arguments = *first, scratch, np.float32(1 / pieces), *sizes
    return (CudaLaunch(module, entry, (pieces, kv_heads, grid_of_rows), block, arguments),)


def work(head_dim: int, heads_per_key: int, cache_bytes: int, is_capped: bool = False) -> KernelWork:
    """Elements are heads x positions, summed over the tokens. A key and its value, of `cache_bytes` a number, are
    read once for the heads that share them."""
    return KernelWork(
        flops_per_element=4.0 * head_dim + POWER_FLOPS + 3 + is_capped * (TANGENT_FLOPS + 2),
        bytes_per_element=2.0 * cache_bytes * head_dim / heads_per_key,
    )


def examples_of(
    tokens: int, threads: int, dtype: Any, slides: bool, cap: float, group: int = 3, rises: bool = False
) -> Any:
    """Return examples with heads of `size`, or beyond 64 of a size that models have; `group` heads share keys and
    values.

    `rises`: scores rise from block to block, by more than the weights' limit, while earlier blocks still count.
    """

    def examples(rng: np.random.Generator, size: int) -> Arguments:
        head_dim = size if size <= 64 else 256
        kv_heads, start = 2, 8 * min(size, 16) if tokens == 1 else size
        if rises:
            start = max(9 * head_dim, len(RISES) * POSITIONS)
        k_cache, v_cache = empty_caches(kv_heads, start + tokens + 1, head_dim, np.float32)
        k_cache[:], v_cache[:] = floats(rng, *k_cache.shape), floats(rng, *v_cache.shape)
        columns = kv_heads * group * head_dim
        times = 1 if rises or tokens == 1 else 3  # of one token, every position counts
        q, out = times * floats(rng, tokens, columns), np.zeros((tokens, columns), np.float32)
        if rises:
            q[:, ::head_dim] = 1
            rise = np.take(RISES, np.arange(k_cache.shape[1]) * LANES // POSITIONS, mode="clip")
            rise[start // LANES :] += RISES[1]  # a token's own position counts, among thousands
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
    """Return the kernel. Its examples have `tokens`, `threads` and a cache of `dtype`, with scores limited by `cap`.
    `slides`: with a window; the others: see `examples_of`."""
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
