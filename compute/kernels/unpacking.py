"""Shared code for products of interleaved weights. It unpacks sixteen rows to bytes and reads their scales.

`narrow` selects the rows to check.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.bytes64 import flipped, load_64, looked_up, masked, shifted, with_fifth_bits, with_upper_bits
from cbtop.compute.jit.compile import copy_of, jit_inlined
from cbtop.compute.jit.cpu import ASKS_TWICE, L1_AHEAD, L2_AHEAD, LOOKS_AHEAD, TIER
from cbtop.compute.jit.vectors import (
    add,
    bits_and,
    bits_or,
    load_bytes,
    load_halves,
    load_signed_bytes,
    load_words,
    multiply,
    prefetch,
    prefetch_to_l2,
    shift_left,
    shift_right,
    splat,
    to_floats,
)
from cbtop.compute.kernels.base import Arguments
from cbtop.compute.kernels.linear import CHECKED_ROWS, spread
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.q2_k import Q2_K
from cbtop.compute.quantization.q3_k import Q3_K
from cbtop.compute.quantization.uneven_levels import LEVELS

U = np.uint64
# Prefetch distances in bytes, into L1 and into L2.
AHEAD, FAR_AHEAD = map(np.uint64, (L1_AHEAD, L2_AHEAD) if ASKS_TWICE else (4096, 8192))
# Without AVX-512: an EPYC of Zen 2 reads Q4_0 and Q4_1 from memory at 0.90 to 0.95 of its bandwidth, compared to 0.80
# and 0.83 with a distance of 4 KiB. The processor's own prefetching has brought lines that are this near into L2 (see
# one_token_avx2).
NEAR_AHEAD = np.uint64(768) if TIER == "AVX2" else AHEAD
# The table of levels, repeated for each sixteen bytes of a vector.
UNEVEN = np.tile(LEVELS.astype(np.int8).view(np.uint8), 4)
# Bytes of four columns, and of the columns 32, 64, ... 224 after them.
Q2_K_COLUMNS, Q3_K_COLUMNS, Q5_K_COLUMNS, Q6_K_COLUMNS = 2 * 64, 3 * 64, 5 * 64, 6 * 64


def narrow(arguments: Arguments, turn: int) -> Arguments:
    """Return the same product for CHECKED_ROWS rows, in groups that are spread over the matrix.

    Each turn takes the next groups.
    """
    code, weights, bias, x, out, scratch = arguments
    groups = spread(len(weights) // ROWS, CHECKED_ROWS // ROWS, turn)
    rows = (groups[:, None] * ROWS + np.arange(ROWS)).reshape(-1)
    return code, weights[rows], bias[rows] if bias.size else bias, x, out[:, rows], scratch


# The functions that unpack each format return eight vectors of 64 unsigned weights, which are 32 columns of 16 rows,
# and then the factors of these columns.


@jit_inlined
def ask_ahead(w: Any, row: Any, at: Any, lines: Any, ahead: Any = AHEAD) -> None:
    if not LOOKS_AHEAD:
        for line in range(U(lines)):
            prefetch(w, row, at + ahead + U(64) * line)
            if ASKS_TWICE:
                prefetch_to_l2(w, row, at + FAR_AHEAD + U(64) * line)


@jit_inlined
def ask_out_of_order(w: Any, row: Any, at: Any, lines: Any) -> None:
    """Prefetch into L2, for reads that are not in order. The processor does not recognise a stream in such reads.

    Without this, four tokens times a matrix of Q5_K in memory take 1.5 times as long on a Zen 4.
    """
    for line in range(U(lines)):
        prefetch_to_l2(w, row, at + FAR_AHEAD + U(64) * line)
        if ASKS_TWICE:
            prefetch(w, row, at + AHEAD + U(64) * line)


@jit_inlined
def unpack_q8_0(w: Any, row: Any, step: Any, part: Any) -> Any:
    base, sign = step * U(34 * ROWS), np.int32(128)
    at = base + U(2 * ROWS)
    ask_ahead(w, row, base, 8)
    scale = load_halves(w, row, base)
    return (
        flipped(load_64(w, row, at), sign),
        flipped(load_64(w, row, at + U(64)), sign),
        flipped(load_64(w, row, at + U(128)), sign),
        flipped(load_64(w, row, at + U(192)), sign),
        flipped(load_64(w, row, at + U(256)), sign),
        flipped(load_64(w, row, at + U(320)), sign),
        flipped(load_64(w, row, at + U(384)), sign),
        flipped(load_64(w, row, at + U(448)), sign),
        scale,
        multiply(scale, splat(np.float32(128))),
    )


@jit_inlined
def _nibbles(w: Any, row: Any, at: Any, shift: Any) -> Any:
    return masked(shifted(load_64(w, row, at), shift), np.int32(15))


@jit_inlined
def _four_bits(w: Any, row: Any, at: Any) -> Any:
    """Return thirty-two columns: first the low nibbles, then the high nibbles."""
    low, high = np.int32(0), np.int32(4)
    return (
        _nibbles(w, row, at, low),
        _nibbles(w, row, at + U(64), low),
        _nibbles(w, row, at + U(128), low),
        _nibbles(w, row, at + U(192), low),
        _nibbles(w, row, at, high),
        _nibbles(w, row, at + U(64), high),
        _nibbles(w, row, at + U(128), high),
        _nibbles(w, row, at + U(192), high),
    )


@jit_inlined
def _five_bits(w: Any, row: Any, at: Any) -> Any:
    """Return thirty-two columns as `_four_bits` does, with the fifth bits, which are in the sixteen words before."""
    words = load_words(w, row, at)
    q, r, s, t, a, b, c, d = _four_bits(w, row, at + U(64))
    return (
        with_fifth_bits(q, words, np.int32(0)),
        with_fifth_bits(r, words, np.int32(4)),
        with_fifth_bits(s, words, np.int32(8)),
        with_fifth_bits(t, words, np.int32(12)),
        with_fifth_bits(a, words, np.int32(16)),
        with_fifth_bits(b, words, np.int32(20)),
        with_fifth_bits(c, words, np.int32(24)),
        with_fifth_bits(d, words, np.int32(28)),
    )


@jit_inlined
def _uneven_levels(w: Any, row: Any, at: Any) -> Any:
    """Return thirty-two columns as `_four_bits` does, but return the levels that the bits select, plus 128."""
    table = load_64(UNEVEN, U(0), U(0))
    q, r, s, t, a, b, c, d = _four_bits(w, row, at)
    return (
        looked_up(table, q),
        looked_up(table, r),
        looked_up(table, s),
        looked_up(table, t),
        looked_up(table, a),
        looked_up(table, b),
        looked_up(table, c),
        looked_up(table, d),
    )


@jit_inlined
def unpack_iq4_nl(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = step * U(18 * ROWS)
    ask_ahead(w, row, base, 5)
    scale = load_halves(w, row, base)
    return (*_uneven_levels(w, row, base + U(2 * ROWS)), scale, multiply(scale, splat(np.float32(128))))


@jit_inlined
def _less_32(low: Any, low_shift: Any, high: Any, high_shift: Any) -> Any:
    """Return a scale of six bits, minus 32. Its low four bits are from `low`, and its upper two from `high`."""
    low = bits_and(shift_right(low, low_shift), np.int32(15))
    high = bits_and(shift_left(shift_right(high, high_shift), np.int32(4)), np.int32(48))
    return add(to_floats(bits_or(low, high)), splat(np.float32(-32)))


@jit_inlined
def unpack_iq4_xs(w: Any, row: Any, step: Any, part: Any) -> Any:
    base, half = (step >> U(1)) * U(136 * ROWS), step & U(1)
    place = half * U(4) + part
    ask_ahead(w, row, base + place * U(17 * ROWS), 5)
    high = load_bytes(w, row, base + U(2 * ROWS) + half * U(ROWS))
    low = load_bytes(w, row, base + U(4 * ROWS) + (place >> U(1)) * U(ROWS))
    level = _less_32(low, np.int32(4) * np.int32(part & U(1)), high, np.int32(2) * np.int32(part))
    scale = multiply(load_halves(w, row, base), level)
    levels = _uneven_levels(w, row, base + U(8 * ROWS) + place * U(16 * ROWS))
    return (*levels, scale, multiply(scale, splat(np.float32(128))))


@jit_inlined
def unpack_q4_0(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = step * U(18 * ROWS)
    ask_ahead(w, row, base, 5, NEAR_AHEAD)
    scale = load_halves(w, row, base)
    return (*_four_bits(w, row, base + U(2 * ROWS)), scale, multiply(scale, splat(np.float32(8))))


@jit_inlined
def unpack_q4_1(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = step * U(20 * ROWS)
    ask_ahead(w, row, base, 5, NEAR_AHEAD)
    minimum = multiply(load_halves(w, row, base + U(2 * ROWS)), splat(np.float32(-1)))
    return (*_four_bits(w, row, base + U(4 * ROWS)), load_halves(w, row, base), minimum)


@jit_inlined
def unpack_q5_0(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = step * U(22 * ROWS)
    ask_ahead(w, row, base, 6)
    scale = load_halves(w, row, base)
    return (*_five_bits(w, row, base + U(2 * ROWS)), scale, multiply(scale, splat(np.float32(16))))


@jit_inlined
def unpack_q5_1(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = step * U(24 * ROWS)
    ask_ahead(w, row, base, 6)
    minimum = multiply(load_halves(w, row, base + U(2 * ROWS)), splat(np.float32(-1)))
    return (*_five_bits(w, row, base + U(4 * ROWS)), load_halves(w, row, base), minimum)


@jit_inlined
def _of_either_half(a: Any, c: Any, whole: Any, low: Any, high: Any) -> Any:
    """Return six bits, selected by masks: either all of `a`, or the low four of `c` below the two highest of `a`."""
    return bits_or(bits_or(bits_and(a, whole), bits_and(c, low)), bits_and(shift_right(a, np.int32(2)), high))


@jit_inlined
def _six_bit_factors(w: Any, row: Any, base: Any, half: Any, part: Any) -> Any:
    """Return the scale and minimum of a sub-block that is stored from `base` on, as in Q4_K and Q5_K.

    See quantization/six_bits.py for the format.
    """
    # This code has no branch. Before a branch, LLVM loads all weights and activations of a step. Then it runs out of
    # registers, and cannot merge loads into the instructions that need them.
    is_last = np.int32(half)
    whole, low, high = np.int32(63) - np.int32(63) * is_last, np.int32(15) * is_last, np.int32(48) * is_last
    a = load_bytes(w, row, base + U(4 * ROWS) + part * U(ROWS))
    m = load_bytes(w, row, base + U(8 * ROWS) + part * U(ROWS))
    c = load_bytes(w, row, base + U(12 * ROWS) + part * U(ROWS))
    scales = _of_either_half(a, c, whole, low, high)
    minima = _of_either_half(m, shift_right(c, np.int32(4)), whole, low, high)
    return (
        multiply(load_halves(w, row, base), to_floats(scales)),
        multiply(load_halves(w, row, base + U(2 * ROWS)), to_floats(minima)),
    )


@jit_inlined
def unpack_q4_k(w: Any, row: Any, step: Any, part: Any) -> Any:
    base, half = (step >> U(1)) * U(144 * ROWS), step & U(1)
    at = base + U(16 * ROWS) + half * U(1024) + (part >> U(1)) * U(512)
    shift = np.int32(4) * np.int32(part & U(1))
    ask_ahead(w, row, base + (half * U(4) + part) * U(18 * ROWS), 5)
    return (
        _nibbles(w, row, at, shift),
        _nibbles(w, row, at + U(64), shift),
        _nibbles(w, row, at + U(128), shift),
        _nibbles(w, row, at + U(192), shift),
        _nibbles(w, row, at + U(256), shift),
        _nibbles(w, row, at + U(320), shift),
        _nibbles(w, row, at + U(384), shift),
        _nibbles(w, row, at + U(448), shift),
        *_six_bit_factors(w, row, base, half, part),
    )


# A block of Q5_K or Q6_K consists of eight groups: four columns and the columns 32, 64, ... 224 after them. Each
# group has bytes of low bits, then bytes of upper bits (see UNITS). The scales follow the groups.


@jit_inlined
def _with_upper(w: Any, row: Any, low: Any, high: Any, low_shift: Any, high_shift: Any, mask: Any) -> Any:
    return with_upper_bits(_nibbles(w, row, low, low_shift), load_64(w, row, high), high_shift, mask)


@jit_inlined
def _with_uppers(
    w: Any, row: Any, low: Any, high: Any, apart: Any, low_shift: Any, high_shift: Any, mask: Any
) -> Any:
    """Return thirty-two columns, four from every `apart` bytes: nibbles, with bits of `high` (selected by `mask`)
    above.
    """
    return (
        _with_upper(w, row, low, high, low_shift, high_shift, mask),
        _with_upper(w, row, low + apart, high + apart, low_shift, high_shift, mask),
        _with_upper(w, row, low + U(2) * apart, high + U(2) * apart, low_shift, high_shift, mask),
        _with_upper(w, row, low + U(3) * apart, high + U(3) * apart, low_shift, high_shift, mask),
        _with_upper(w, row, low + U(4) * apart, high + U(4) * apart, low_shift, high_shift, mask),
        _with_upper(w, row, low + U(5) * apart, high + U(5) * apart, low_shift, high_shift, mask),
        _with_upper(w, row, low + U(6) * apart, high + U(6) * apart, low_shift, high_shift, mask),
        _with_upper(w, row, low + U(7) * apart, high + U(7) * apart, low_shift, high_shift, mask),
    )


@jit_inlined
def factors_q5_k(w: Any, row: Any, base: Any, part: Any) -> Any:
    """Return the scale and minimum of 32 columns of the block at `base`."""
    return _six_bit_factors(w, row, base + U(160 * ROWS), part >> U(2), part & U(3))


@jit_inlined
def factor_q6_k(w: Any, row: Any, base: Any, place: Any) -> Any:
    """Return the scale of 16 columns of the block at `base`."""
    scales = load_signed_bytes(w, row, base + U(192 * ROWS) + place * U(ROWS))
    return multiply(load_halves(w, row, base + U(208 * ROWS)), to_floats(scales))


@jit_inlined
def factors_q6_k(w: Any, row: Any, base: Any, part: Any) -> Any:
    """Return the two scales of 32 columns."""
    return factor_q6_k(w, row, base, part * U(2)), factor_q6_k(w, row, base, part * U(2) + U(1))


@jit_inlined
def unpack_q5_k(w: Any, row: Any, step: Any, part: Any) -> Any:
    base, half = (step >> U(1)) * U(176 * ROWS), step & U(1)
    low, high = base + (half * U(2) + (part >> U(1))) * U(64), base + U(4 * 64)
    low_shift, high_shift = np.int32(4) * np.int32(part & U(1)), np.int32(half * U(4) + part)
    ask_out_of_order(w, row, base + (half * U(4) + part) * U(22 * ROWS), 6)
    return (
        *_with_uppers(w, row, low, high, U(Q5_K_COLUMNS), low_shift, high_shift, np.int32(16)),
        *factors_q5_k(w, row, base, half * U(4) + part),
    )


@jit_inlined
def unpack_q6_k(w: Any, row: Any, step: Any, part: Any) -> Any:
    base, half = (step >> U(1)) * U(210 * ROWS), step & U(1)
    low, high = base + (half * U(3) + (part & U(1))) * U(64), base + (half * U(3) + U(2)) * U(64)
    low_shift, high_shift = np.int32(4) * np.int32(part >> U(1)), np.int32(2) * np.int32(part)
    ask_out_of_order(w, row, base + (half * U(4) + part) * U(420), 7)
    return (
        *_with_uppers(w, row, low, high, U(Q6_K_COLUMNS), low_shift, high_shift, np.int32(48)),
        *factors_q6_k(w, row, base, half * U(4) + part),
    )


@jit_inlined
def low_with(low: Any, high: Any, place: Any, mask: Any) -> Any:
    return with_upper_bits(masked(low, np.int32(15)), high, np.int32(place), np.int32(mask))


@jit_inlined
def high_with(low: Any, high: Any, place: Any, mask: Any) -> Any:
    return low_with(shifted(low, np.int32(4)), high, place, mask)


@jit_inlined
def four_columns_q5_k(w: Any, row: Any, at: Any) -> Any:
    """Return the four columns that are stored at `at`, and the columns 32, 64, ... 224 after them."""
    a, b = load_64(w, row, at), load_64(w, row, at + U(64))
    c, d = load_64(w, row, at + U(128)), load_64(w, row, at + U(192))
    high = load_64(w, row, at + U(256))
    return (
        low_with(a, high, 0, 16),
        high_with(a, high, 1, 16),
        low_with(b, high, 2, 16),
        high_with(b, high, 3, 16),
        low_with(c, high, 4, 16),
        high_with(c, high, 5, 16),
        low_with(d, high, 6, 16),
        high_with(d, high, 7, 16),
    )


@jit_inlined
def four_columns_q6_k(w: Any, row: Any, at: Any) -> Any:
    """Return the same columns as `four_columns_q5_k`, for Q6_K."""
    a, b, first = load_64(w, row, at), load_64(w, row, at + U(64)), load_64(w, row, at + U(128))
    c, d, second = load_64(w, row, at + U(192)), load_64(w, row, at + U(256)), load_64(w, row, at + U(320))
    return (
        low_with(a, first, 0, 48),
        low_with(b, first, 2, 48),
        high_with(a, first, 4, 48),
        high_with(b, first, 6, 48),
        low_with(c, second, 0, 48),
        low_with(d, second, 2, 48),
        high_with(c, second, 4, 48),
        high_with(d, second, 6, 48),
    )


# Q2_K and Q3_K have a scale and a minimum for each sixteen columns. The layout of their blocks is as above, but a
# byte of low bits contains two bits each of four columns that are 32 apart.


@jit_inlined
def four_q2_k(w: Any, row: Any, at: Any, half: Any, part: Any) -> Any:
    """Return the four columns that are 128 * half + 32 * part after those stored at `at`."""
    return masked(shifted(load_64(w, row, at + U(64) * U(half)), np.int32(2) * np.int32(part)), np.int32(3))


@jit_inlined
def four_q3_k(w: Any, row: Any, at: Any, half: Any, part: Any) -> Any:
    """Return the same columns as `four_q2_k`, for Q3_K."""
    # Shift once for all parts, then by a constant. AVX2 needs more shifts if the amount is known only at run time.
    high = shifted(load_64(w, row, at + U(128)), np.int32(4) * np.int32(half))
    return with_upper_bits(four_q2_k(w, row, at, half, part), high, np.int32(part) + np.int32(2), np.int32(4))


@jit_inlined
def factors_of_16_q2_k(w: Any, row: Any, base: Any, place: Any) -> Any:
    """Return the scale and minimum of 16 columns of the block at `base`."""
    both, at = load_bytes(w, row, base + U(64 * ROWS) + place * U(ROWS)), base + U(80 * ROWS)
    scale, minimum = to_floats(bits_and(both, np.int32(15))), to_floats(shift_right(both, np.int32(4)))
    return multiply(load_halves(w, row, at), scale), multiply(load_halves(w, row, at + U(2 * ROWS)), minimum)


@jit_inlined
def factors_of_16_q3_k(w: Any, row: Any, base: Any, place: Any) -> Any:
    """Return the scale of 16 columns, and the value of the highest bit as the minimum, for Q3_K."""
    at = base + U(96 * ROWS)
    low = load_bytes(w, row, at + (place & U(7)) * U(ROWS))
    high = load_bytes(w, row, at + (U(8) + (place & U(3))) * U(ROWS))
    level = _less_32(low, np.int32(4) * np.int32(place >> U(3)), high, np.int32(2) * np.int32(place >> U(2)))
    scale = multiply(load_halves(w, row, base + U(108 * ROWS)), level)
    return scale, multiply(scale, splat(np.float32(4)))


# Names that each format replaces by its own functions and sizes, in its copy of the code below.
_four, _factors_of_16, _COLUMNS_BYTES, _BLOCK_BYTES = four_q2_k, factors_of_16_q2_k, Q2_K_COLUMNS, Q2_K.block_bytes


def _four_columns(w: Any, row: Any, at: Any) -> Any:  # compiled
    """Return the same columns as `four_columns_q5_k`, for Q2_K and Q3_K."""
    return (
        _four(w, row, at, 0, 0),
        _four(w, row, at, 0, 1),
        _four(w, row, at, 0, 2),
        _four(w, row, at, 0, 3),
        _four(w, row, at, 1, 0),
        _four(w, row, at, 1, 1),
        _four(w, row, at, 1, 2),
        _four(w, row, at, 1, 3),
    )


def _factors(w: Any, row: Any, base: Any, part: Any) -> Any:  # compiled
    """Return the two scales of 32 columns, then the two minima."""
    first, minimum = _factors_of_16(w, row, base, part * U(2))
    last, other_minimum = _factors_of_16(w, row, base, part * U(2) + U(1))
    return first, last, minimum, other_minimum


def _unpack(w: Any, row: Any, step: Any, part: Any) -> Any:  # compiled
    base, half = (step >> U(1)) * U(_BLOCK_BYTES * ROWS), step & U(1)
    place = half * U(4) + part
    ask_out_of_order(w, row, base + place * U(2 * _BLOCK_BYTES), _BLOCK_BYTES // 32 + 1)
    return (
        _four(w, row, base, half, part),
        _four(w, row, base + U(_COLUMNS_BYTES), half, part),
        _four(w, row, base + U(2 * _COLUMNS_BYTES), half, part),
        _four(w, row, base + U(3 * _COLUMNS_BYTES), half, part),
        _four(w, row, base + U(4 * _COLUMNS_BYTES), half, part),
        _four(w, row, base + U(5 * _COLUMNS_BYTES), half, part),
        _four(w, row, base + U(6 * _COLUMNS_BYTES), half, part),
        _four(w, row, base + U(7 * _COLUMNS_BYTES), half, part),
        *_factors(w, row, base, place),
    )


four_columns_q2_k = jit_inlined(copy_of(_four_columns, "four_columns_q2_k"))
factors_q2_k = jit_inlined(copy_of(_factors, "factors_q2_k"))
unpack_q2_k = jit_inlined(copy_of(_unpack, "unpack_q2_k", _factors=factors_q2_k))
_OF_Q3_K = {
    "_four": four_q3_k,
    "_factors_of_16": factors_of_16_q3_k,
    "_COLUMNS_BYTES": Q3_K_COLUMNS,
    "_BLOCK_BYTES": Q3_K.block_bytes,
}
four_columns_q3_k = jit_inlined(copy_of(_four_columns, "four_columns_q3_k", **_OF_Q3_K))
factors_q3_k = jit_inlined(copy_of(_factors, "factors_q3_k", **_OF_Q3_K))
unpack_q3_k = jit_inlined(copy_of(_unpack, "unpack_q3_k", **_OF_Q3_K, _factors=factors_q3_k))
