"""Attention in bfloat16: queries, keys, values and weights are multiplied as bfloat16, two at a time.

reference    NumPy: the same numbers, multiplied in float64
numba        the loops of `attention`, with an instruction of AVX512-BF16. The instruction multiplies and adds twice
             as many numbers as one for float32. Queries and weights are rounded to bfloat16. Keys and values in
             the cache are float16, with three bits more than bfloat16. These bits are cut off, because rounding takes
             twice as long. A factor for all numbers makes up for the average loss.

Models with int8 products use this kernel on processors that run this kernel faster than `attention`
(`cpu.BF16_PAYS`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.jit.bfloats import add_products_of_pairs, bfloats, high_floats, low_floats, store_ints
from cbtop.compute.jit.compile import jit_inlined
from cbtop.compute.jit.exponential import powers_of_two
from cbtop.compute.jit.halves import from_bits
from cbtop.compute.jit.sums import load_sums, store_sums, zero_sums
from cbtop.compute.jit.vectors import LANES, add, load_floats, prefetch_to_l2, splat, store_floats
from cbtop.compute.kernels import attention as plain
from cbtop.compute.kernels.attention import first_seen
from cbtop.compute.kernels.attention_loops import (
    LOG2_E,
    MANY,
    PAIR,
    SOME,
    attend,
    compiled_loops,
    hold,
    of_rows,
    take_query,
)
from cbtop.compute.kernels.base import Arguments, Kernel, KernelWork
from cbtop.compute.kernels.kv_caches import POSITIONS, keys_of
from cbtop.compute.quantization.floats import BF16

U = np.uint64
# Values m * 2^e, with m in [1, 2), lose their last three of ten bits. The average loss is 3.5 * 2^-10 * 2^e, which is
# 3.5 * 2^-10 / m of the value. The average of 1 / m is 1 / (2 ln 2), because m is as often below sqrt(2) as above it
# (Benford).
CUT = 1 / (1 - 3.5 * 2**-10 / (2 * np.log(2)))

_ROWS, _VECTORS = 2, 2  # copies of the functions below use other numbers of rows and vectors, see `attention_loops`


def _scores(
    keys: Any, first: Any, head_dim: Any, ahead: Any, scratch: Any, row: Any, query: Any, column: Any
) -> None:
    """Do the same as `attention_loops._scores`, but multiply numbers in pairs."""
    # compiled
    sums = zero_sums(_ROWS, _VECTORS)
    none = U(0)
    for i in range(head_dim // U(2)):
        key = first + i * U(2)
        for vector in range(U(_VECTORS)):
            prefetch_to_l2(keys, key + vector * head_dim + ahead, none)
        sums = add_products_of_pairs(
            sums, keys, (key, key + U(1), none), (head_dim, none), scratch, (row, query + i), _ROWS, _VECTORS
        )
    store_sums(scratch, row, column, sums, _ROWS, _VECTORS)


def _add_values(
    values: Any, first: Any, skipped: Any, count: Any, ahead: Any, scratch: Any, row: Any, output: Any, column: Any
) -> None:
    """Do the same as `attention_loops._add_values`, but multiply numbers in pairs."""
    # compiled
    sums = load_sums(scratch, row, output + column, _ROWS, _VECTORS)
    none, lanes = U(0), U(LANES)
    for p in range(skipped // U(2) * U(2), count, U(2)):
        for vector in range(U(_VECTORS)):
            prefetch_to_l2(values, first + ahead, column * U(POSITIONS) + (p * U(_VECTORS) + vector * U(2)) * lanes)
        # Positions that are not visible are not read. If only one position of a pair is visible, it is read twice,
        # and the weight of the second read is 0.
        low, high = max(p, skipped), min(p + U(1), count - U(1))
        sums = add_products_of_pairs(
            sums,
            values,
            (first + low, first + high, column),
            (none, lanes),
            scratch,
            (row, p // U(2)),
            _ROWS,
            _VECTORS,
        )
    store_sums(scratch, row, output + column, sums, _ROWS, _VECTORS)


@jit_inlined
def _take_query(
    q: Any, token: Any, first: Any, head_dim: Any, scale: Any, scratch: Any, row: Any, query: Any
) -> None:
    """Do the same as `attention_loops.take_query`, but pack two numbers into each word."""
    take_query(q, token, first, head_dim, scale, scratch, row, query)
    lanes = U(LANES)
    for i in range(U(0), head_dim, lanes + lanes):  # numbers after the end of a head go to words that are not used
        low, high = load_floats(scratch, row, query + i), load_floats(scratch, row, query + i + lanes)
        store_ints(scratch, row, query + i // U(2), bfloats(low, high))


@jit_inlined
def _weigh(scratch: Any, row: Any, state: Any) -> None:
    """Do the same as `attention_loops._weigh`, but pack two powers into each word."""
    lanes = U(LANES)
    less, sums = splat(np.float32(-scratch[row, state])), load_floats(scratch, row, state + lanes)
    for p in range(U(0), U(POSITIONS), lanes + lanes):
        low = powers_of_two(add(load_floats(scratch, row, p), less))
        high = powers_of_two(add(load_floats(scratch, row, p + lanes), less))
        words = bfloats(low, high)
        sums = add(sums, add(low_floats(words), high_floats(words)))
        store_ints(scratch, row, p // U(2), words)
    store_floats(scratch, row, state + lanes, sums)


_OWN = {
    "WIDE": False,
    "TIMES": CUT,
    "take_query": _take_query,
    "_weigh": _weigh,
    "_scores_of_six": of_rows(_scores, MANY, 1),
    "_scores_of_four": of_rows(_scores, SOME, 1),
    "_scores_of_pair": of_rows(_scores, PAIR, 2),
    "_add_values_of_six": of_rows(_add_values, MANY, 1),
    "_add_values_of_four": of_rows(_add_values, SOME, 1),
    "_add_values_of_pair": of_rows(_add_values, PAIR, 2),
    "_add_last_of_pair": of_rows(_add_values, PAIR, 1),
}
_attend, _attend_parallel = compiled_loops("_attend_bf16", **_OWN)
_attend_held, _attend_held_parallel = compiled_loops("_attend_bf16_held", **_OWN, _held=hold)


def attention_bf16(
    q: Any, k_cache: Any, v_cache: Any, start: int, scale: float, window: int, cap: float, out: Any, scratch: Any
) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles.

    `scratch` is from `attention_loops.scratch_for`. Its size determines the number of threads.
    """
    loops = (_attend_held, _attend_held_parallel) if cap else (_attend, _attend_parallel)
    attend(loops, q, (k_cache, v_cache), start, (scale * CUT, window, cap), out, scratch)


def can_take(head_dim: int, cache_bytes: int) -> bool:
    """Return whether this kernel supports heads of `head_dim` dimensions and caches of `cache_bytes` bytes per
    number.
    """
    return head_dim % 2 == 0 and cache_bytes == 2


def reference(
    q: Any, k_cache: Any, v_cache: Any, start: int, scale: float, window: int, cap: float, out: Any, scratch: Any
) -> None:
    """Compute `attention.reference` with numbers in bfloat16.

    q * scale and the weights are rounded to bfloat16. Keys and values are cut to bfloat16 and multiplied by `CUT`.
    Weights are rounded as 2^(score - floor(largest score)), before they are divided by their sum. k_cache, v_cache:
    float16 as uint16. head_dim is even.
    """
    (kv_heads, _, head_dim, _), end = k_cache.shape, start + len(q)
    queries = _rounded(q * np.float32(scale * CUT * LOG2_E)).reshape(len(q), kv_heads, -1, head_dim)
    keys, values = cut(keys_of(k_cache)[:, :end]), cut(from_bits(v_cache)[:, :end])
    for t, of_token in enumerate(queries):
        seen = slice(first_seen(start + t, window), start + t + 1)
        scores = np.einsum("kgd,kpd->kgp", of_token, keys[:, seen])
        if cap:
            scores = cap * LOG2_E * np.tanh(scores / (cap * LOG2_E))
        weights = _rounded(np.exp2(scores - np.floor(scores.max(axis=2, keepdims=True))))
        added = np.einsum("kgp,kpd->kgd", weights, values[:, seen, :head_dim])
        out[t] = (CUT * added / weights.sum(axis=2, keepdims=True)).reshape(-1)


def _rounded(values: Any) -> Any:
    """Return the nearest bfloat16 numbers, as float64."""
    flat = np.ascontiguousarray(values, np.float32).reshape(1, -1)
    return BF16.dequantize(BF16.quantize(flat)).reshape(values.shape).astype(np.float64)


def cut(values: Any) -> Any:
    """Return the nearest bfloat16 numbers towards zero, as float64."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return (words & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def work(head_dim: int, heads_per_key: int, is_capped: bool = False) -> KernelWork:
    """Return the same as `attention.work` for caches of float16."""
    return replace(plain.work(head_dim, heads_per_key, 2, is_capped), dtype="bfloat16")


def _examples(
    tokens: int, threads: int, slides: bool, cap: float, group: int, rises: bool
) -> Callable[..., Arguments]:
    of_any = plain.examples_of(tokens, threads, np.uint16, slides, cap, group, rises)

    def examples(rng: np.random.Generator, size: int) -> Arguments:
        made: Arguments = of_any(rng, size + size % 2)
        return made

    return examples


def kernel_for(
    tokens: int = 1, threads: int = 1, slides: bool = False, cap: float = 0.0, group: int = 3, rises: bool = False
) -> Kernel:
    """Return the kernel of attention in bfloat16. It has the examples of `attention.kernel_for`, with caches of
    float16.
    """
    return Kernel(
        name="attention_bf16",
        reference=reference,
        implementation=attention_bf16,
        work=work,
        outputs=(7,),
        contract=contract("attention_bf16"),
        examples=_examples(tokens, threads, slides, cap, group, rises),
        parallel=True,
        by_token=(0, 7),
    )


ATTENTION_BF16 = kernel_for()
