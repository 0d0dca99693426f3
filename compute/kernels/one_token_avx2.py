"""The product of one token and sixteen interleaved rows of Q4_K, Q5_K, Q6_K or Q8_0, with AVX2.

Each call processes one block. A Zen 2 reads memory at its full bandwidth, 17 GB/s, if a loop reads line after line,
and prefetches each line about 1 KiB ahead. The processor then recognises the loop's load instruction as a stream, and
brings the lines into L2.

The loops here are not unrolled (`turns`), and read lines nearly in order. In an unrolled loop, each of the many load
instructions skips lines, and the processor reads only 7 to 10 GB/s. (L1 can wait for 22 lines, and each takes 139
ns.)

The factors of a block follow its weights. Until they are read, sums are stored on the stack.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.np import numpy_support

from cbtop.compute.jit.bytes64 import load_64, masked, shifted, store_64, with_upper_bits
from cbtop.compute.jit.compile import jit_inlined
from cbtop.compute.jit.pairs import add_pairs, add_signed, sums_of_pairs
from cbtop.compute.jit.vectors import (
    add_ints,
    load_bytes,
    load_halves,
    load_signed_bytes,
    load_words,
    multiply,
    multiply_add,
    no_ints,
    on_stack,
    splat,
    store_words,
    to_floats,
    turns,
)
from cbtop.compute.kernels.quantize_rows import BLOCK, FACTORS
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.compute.quantization.q5_k import Q5_K
from cbtop.compute.quantization.q5_k import TURN_BYTES as Q5_K_TURN
from cbtop.compute.quantization.q6_k import Q6_K
from cbtop.compute.quantization.q6_k import TURN_BYTES as Q6_K_TURN
from cbtop.compute.quantization.q8_0 import Q8_0
from cbtop.compute.quantization.unpacking import ask_ahead, high_with, low_with

# For the formats below, the following functions replace `_one_token` of int8_rows. In these functions a step is a
# block. They return `total` plus the products of the block.

carray: Any = numpy_support.carray  # a type of Numba that is needed to make an array from a pointer
U = np.uint64
LINE = 64  # bytes of a line of the processor's cache
# How far ahead to prefetch, in bytes. Q5_K needs more, because its loop moves to later cache lines after every four
# passes.
AHEAD, Q5_K_AHEAD = U(1024), U(1344)


def _q8_0(w: Any, row: Any, step: Any, codes: Any, factors: Any, t: Any, total: Any) -> Any:  # compiled
    base, sums = step * U(34 * ROWS), no_ints()
    for i in range(turns(U(8))):
        at = base + U(2 * ROWS) + i * U(LINE)
        ask_ahead(w, row, at, 1, AHEAD)
        sums = add_signed(sums, load_64(w, row, at), codes, t, step * U(BLOCK) + i * U(4))
    scaled = multiply(to_floats(sums), splat(factors[t, step * U(FACTORS)]))
    return multiply_add(scaled, load_halves(w, row, base), total)


@jit_inlined
def _store_six_bits(w: Any, row: Any, at: Any, kept: Any, place: Any) -> None:
    """Store the eight scales and eight minima of 16 rows in kept[0, place:].

    The scales and minima are read from `at` on, in the layout of Q4_K and Q5_K.
    """
    zero, six, four, two = U(0), np.int32(63), np.int32(15), np.int32(48)
    a, m = load_64(w, row, at), load_64(w, row, at + U(LINE))
    c = load_64(w, row, at + U(2 * LINE))
    store_64(kept, zero, place, masked(a, six))
    store_64(kept, zero, place + U(LINE), with_upper_bits(masked(c, four), a, np.int32(6), two))
    store_64(kept, zero, place + U(2 * LINE), masked(m, six))
    upper = masked(shifted(c, np.int32(4)), four)
    store_64(kept, zero, place + U(3 * LINE), with_upper_bits(upper, m, np.int32(6), two))


@jit_inlined
def _add_part(
    sums: Any, kept: Any, place: Any, part: Any, factors: Any, t: Any, step: Any, scaled: Any, minima: Any
) -> Any:
    """Add the products of 32 columns to the sums `scaled` and `minima`, and return both.

    `kept` was filled by `_store_six_bits`.
    """
    at, own = place + part * U(ROWS), (step * U(8) + part) * U(FACTORS)
    scale = multiply(to_floats(load_bytes(kept, U(0), at)), splat(factors[t, own]))
    minimum = to_floats(load_bytes(kept, U(0), at + U(2 * LINE)))
    return (
        multiply_add(to_floats(sums), scale, scaled),
        multiply_add(minimum, splat(factors[t, own + U(1)]), minima),
    )


@jit_inlined
def _with_halves(w: Any, row: Any, at: Any, scaled: Any, minima: Any, total: Any) -> Any:
    """Return total + scale * `scaled` + minimum * `minima`, where w[row, at] has the scale and the minimum of the
    block.
    """
    total = multiply_add(load_halves(w, row, at), scaled, total)
    return multiply_add(load_halves(w, row, at + U(2 * ROWS)), minima, total)


def _q4_k(w: Any, row: Any, step: Any, codes: Any, factors: Any, t: Any, total: Any) -> Any:  # compiled
    base, kept = step * U(144 * ROWS), carray(on_stack(4), (1, 4 * LINE), np.uint8)
    ask_ahead(w, row, base, 4, AHEAD)
    _store_six_bits(w, row, base + U(4 * ROWS), kept, U(0))
    scaled, minima = splat(np.float32(0)), splat(np.float32(0))
    for pair in range(U(4)):
        low, high = no_ints(), no_ints()
        for i in range(turns(U(8))):
            at, column = base + U(16 * ROWS) + (pair * U(8) + i) * U(LINE), step * U(256) + pair * U(64) + i * U(4)
            ask_ahead(w, row, at, 1, AHEAD)
            both = load_64(w, row, at)
            low = add_pairs(low, masked(both, np.int32(15)), codes, t, column)
            upper = masked(shifted(both, np.int32(4)), np.int32(15))
            high = add_pairs(high, upper, codes, t, column + U(BLOCK))
        part = pair * U(2)
        scaled, minima = _add_part(sums_of_pairs(low), kept, U(0), part, factors, t, step, scaled, minima)
        scaled, minima = _add_part(sums_of_pairs(high), kept, U(0), part + U(1), factors, t, step, scaled, minima)
    return _with_halves(w, row, base, scaled, minima, total)


@jit_inlined
def _store_sums(kept: Any, turn: Any, pairs: Any) -> None:
    a, b, c, d = pairs
    at = turn * U(4 * LINE)
    store_words(kept, U(0), at, sums_of_pairs(a))
    store_words(kept, U(0), at + U(LINE), sums_of_pairs(b))
    store_words(kept, U(0), at + U(2 * LINE), sums_of_pairs(c))
    store_words(kept, U(0), at + U(3 * LINE), sums_of_pairs(d))


@jit_inlined
def _kept_sums(kept: Any, at: Any) -> Any:
    """Return the sum of 32 columns (16 in Q6_K), which is stored in two parts."""
    return add_ints(load_words(kept, U(0), at), load_words(kept, U(0), at + U(8 * LINE)))


@jit_inlined
def _store_five_bits(w: Any, row: Any, step: Any, two: Any, half: Any, codes: Any, t: Any, kept: Any) -> None:
    """Store four sums of 16 columns each.

    `half` is a constant in each call, because the shifts differ between the halves.
    """
    base, zero, turn = step * U(176 * ROWS), no_ints(), two * U(2) + half
    first, place = base + two * U(4 * Q5_K_TURN), step * U(256) + half * U(128) + two * U(16)
    pairs = zero, zero, zero, zero
    for i in range(turns(U(4))):
        ask_ahead(w, row, base + (turn * U(4) + i) * U(11 * ROWS), 3, Q5_K_AHEAD)
        at, column = first + i * U(Q5_K_TURN), place + i * U(4)
        a, b = load_64(w, row, at + half * U(2 * LINE)), load_64(w, row, at + half * U(2 * LINE) + U(LINE))
        bits = shifted(load_64(w, row, at + U(4 * LINE)), np.int32(4) * np.int32(half))
        p, q, r, s = pairs
        pairs = (
            add_pairs(p, low_with(a, bits, 0, 16), codes, t, column),
            add_pairs(q, high_with(a, bits, 1, 16), codes, t, column + U(BLOCK)),
            add_pairs(r, low_with(b, bits, 2, 16), codes, t, column + U(2 * BLOCK)),
            add_pairs(s, high_with(b, bits, 3, 16), codes, t, column + U(3 * BLOCK)),
        )
    _store_sums(kept, turn, pairs)


def _q5_k(w: Any, row: Any, step: Any, codes: Any, factors: Any, t: Any, total: Any) -> Any:  # compiled
    base, kept = step * U(176 * ROWS), carray(on_stack(20), (1, 20 * LINE), np.uint8)
    for two in range(turns(U(2))):
        _store_five_bits(w, row, step, two, U(0), codes, t, kept)
        _store_five_bits(w, row, step, two, U(1), codes, t, kept)
    _store_six_bits(w, row, base + U(164 * ROWS), kept, U(16 * LINE))
    scaled, minima = splat(np.float32(0)), splat(np.float32(0))
    for part in range(turns(U(8))):
        sums = _kept_sums(kept, part * U(LINE))
        scaled, minima = _add_part(sums, kept, U(16 * LINE), part, factors, t, step, scaled, minima)
    return _with_halves(w, row, base + U(160 * ROWS), scaled, minima, total)


@jit_inlined
def _add_six_bits(w: Any, row: Any, at: Any, codes: Any, t: Any, column: Any, pairs: Any) -> Any:
    a, b, bits = load_64(w, row, at), load_64(w, row, at + U(LINE)), load_64(w, row, at + U(2 * LINE))
    p, q, r, s = pairs
    return (
        add_pairs(p, low_with(a, bits, 0, 48), codes, t, column),
        add_pairs(q, low_with(b, bits, 2, 48), codes, t, column + U(BLOCK)),
        add_pairs(r, high_with(a, bits, 4, 48), codes, t, column + U(2 * BLOCK)),
        add_pairs(s, high_with(b, bits, 6, 48), codes, t, column + U(3 * BLOCK)),
    )


@jit_inlined
def _add_half(w: Any, row: Any, at: Any, half: Any, sums: Any, factors: Any, t: Any, own: Any, scaled: Any) -> Any:
    """Return scaled + scale * (weights - 32) . x for 16 columns."""
    offset = multiply(splat(np.float32(32)), splat(factors[t, own + U(2) + half]))
    products = multiply_add(to_floats(sums), splat(factors[t, own]), offset)
    return multiply_add(products, to_floats(load_signed_bytes(w, row, at + half * U(ROWS))), scaled)


def _q6_k(w: Any, row: Any, step: Any, codes: Any, factors: Any, t: Any, total: Any) -> Any:  # compiled
    base, zero, kept = step * U(210 * ROWS), no_ints(), carray(on_stack(32), (1, 32 * LINE), np.uint8)
    for turn in range(turns(U(8))):
        half, two = turn & U(1), turn >> U(1)
        ask_ahead(w, row, base + turn * U(420), 7, AHEAD)
        at, column = base + two * U(2 * Q6_K_TURN) + half * U(3 * LINE), step * U(256) + half * U(128) + two * U(8)
        pairs = _add_six_bits(w, row, at, codes, t, column, (zero, zero, zero, zero))
        pairs = _add_six_bits(w, row, at + U(Q6_K_TURN), codes, t, column + U(4), pairs)
        _store_sums(kept, turn, pairs)
    scaled = splat(np.float32(0))
    for part in range(turns(U(8))):
        at, own = base + U(192 * ROWS) + part * U(2 * ROWS), (step * U(8) + part) * U(FACTORS)
        first, last = _kept_sums(kept, part * U(LINE)), _kept_sums(kept, (part + U(16)) * U(LINE))
        scaled = _add_half(w, row, at, U(0), first, factors, t, own, scaled)
        scaled = _add_half(w, row, at, U(1), last, factors, t, own, scaled)
    return multiply_add(load_halves(w, row, base + U(208 * ROWS)), scaled, total)


ONE_TOKEN = {Q8_0.code: _q8_0, Q4_K.code: _q4_k, Q5_K.code: _q5_k, Q6_K.code: _q6_k}
