"""The functions that formats share to unpack interleaved rows.

They return sixteen rows as bytes, and their scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.bytes64 import load_64, looked_up, masked, shifted, with_fifth_bits, with_upper_bits
from cbtop.compute.jit.compile import copy_of, jit_inlined
from cbtop.compute.jit.cpu import ASKS_TWICE, L1_AHEAD, L2_AHEAD, LOOKS_AHEAD, TIER
from cbtop.compute.jit.vectors import (
    add,
    bits_and,
    bits_or,
    load_bytes,
    load_halves,
    load_words,
    multiply,
    prefetch,
    prefetch_to_l2,
    shift_left,
    shift_right,
    splat,
    to_floats,
)
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import BlockColumns
from cbtop.compute.quantization.uneven_levels import LEVELS

U = np.uint64
# How far ahead to prefetch, in bytes, into L1 and into L2.
AHEAD, FAR_AHEAD = map(np.uint64, (L1_AHEAD, L2_AHEAD) if ASKS_TWICE else (4096, 8192))
# Without AVX-512, the distance is 768 bytes. A Zen 2 (EPYC) then reads Q4_0 and Q4_1 from memory at 0.90 to 0.95 of
# its bandwidth, but with 4 KiB at 0.80 and 0.83. The processor itself has already brought lines that are so near into
# L2 (see one_token_avx2).
NEAR_AHEAD = np.uint64(768) if TIER == "AVX2" else AHEAD
# the sixteen levels of IQ4_NL and IQ4_XS, repeated for each sixteen bytes of a vector
UNEVEN = np.tile(LEVELS.astype(np.int8).view(np.uint8), 4)


@jit_inlined
def ask_ahead(w: Any, row: Any, at: Any, lines: Any, ahead: Any = AHEAD) -> None:
    if not LOOKS_AHEAD:
        for line in range(U(lines)):
            prefetch(w, row, at + ahead + U(64) * line)
            if ASKS_TWICE:
                prefetch_to_l2(w, row, at + FAR_AHEAD + U(64) * line)


@jit_inlined
def ask_out_of_order(w: Any, row: Any, at: Any, lines: Any) -> None:
    """Prefetch into L2, for reads that are not in memory order.

    Processors do not recognise such reads as a stream.

    On a Zen 4, a product of four tokens and a Q5_K matrix in memory takes 1.5 times as long without this prefetching.
    """
    for line in range(U(lines)):
        prefetch_to_l2(w, row, at + FAR_AHEAD + U(64) * line)
        if ASKS_TWICE:
            prefetch(w, row, at + AHEAD + U(64) * line)


@jit_inlined
def nibbles_64(w: Any, row: Any, at: Any, shift: Any) -> Any:
    return masked(shifted(load_64(w, row, at), shift), np.int32(15))


@jit_inlined
def four_bits_64(w: Any, row: Any, at: Any) -> Any:
    """Return 32 columns of weights of 4 bits. The low nibbles come first, then the high ones."""
    low, high = np.int32(0), np.int32(4)
    return (
        nibbles_64(w, row, at, low),
        nibbles_64(w, row, at + U(64), low),
        nibbles_64(w, row, at + U(128), low),
        nibbles_64(w, row, at + U(192), low),
        nibbles_64(w, row, at, high),
        nibbles_64(w, row, at + U(64), high),
        nibbles_64(w, row, at + U(128), high),
        nibbles_64(w, row, at + U(192), high),
    )


@jit_inlined
def five_bits_64(w: Any, row: Any, at: Any) -> Any:
    """Do the same as `four_bits_64`, and add the highest bits.

    The highest bits are in the sixteen words before the nibbles.
    """
    words = load_words(w, row, at)
    q, r, s, t, a, b, c, d = four_bits_64(w, row, at + U(64))
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
def uneven_levels_64(w: Any, row: Any, at: Any) -> Any:
    """Do the same as `four_bits_64`, but return the levels that the bits select, plus 128."""
    table = load_64(UNEVEN, U(0), U(0))
    q, r, s, t, a, b, c, d = four_bits_64(w, row, at)
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
def less_32(low: Any, low_shift: Any, high: Any, high_shift: Any) -> Any:
    """Return a scale of six bits minus 32. The lower four bits come from `low`, the upper two from `high`."""
    low = bits_and(shift_right(low, low_shift), np.int32(15))
    high = bits_and(shift_left(shift_right(high, high_shift), np.int32(4)), np.int32(48))
    return add(to_floats(bits_or(low, high)), splat(np.float32(-32)))


@jit_inlined
def _of_either_half(a: Any, c: Any, whole: Any, low: Any, high: Any) -> Any:
    """Return six bits from one of two places.

    The masks `whole`, `low` and `high` select either all six bits of `a`, or the low four bits of `c` and the upper
    two of `a`.
    """
    return bits_or(bits_or(bits_and(a, whole), bits_and(c, low)), bits_and(shift_right(a, np.int32(2)), high))


@jit_inlined
def six_bit_factors(w: Any, row: Any, base: Any, half: Any, part: Any) -> Any:
    """Return the scale and the minimum of a sub-block. From `base` on, they are stored as in Q4_K and Q5_K (see
    six_bits.py).
    """
    # A branch is avoided here. With a branch, LLVM would load all weights and activations of a step before it. It
    # would then run out of registers, and could not make loads part of the instructions that need them.
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


# The functions below are for Q5_K and Q6_K. In their blocks, a part (turn) has bytes with the low bits, followed by
# bytes with the upper bits.


@jit_inlined
def _with_upper(w: Any, row: Any, low: Any, high: Any, low_shift: Any, high_shift: Any, mask: Any) -> Any:
    return with_upper_bits(nibbles_64(w, row, low, low_shift), load_64(w, row, high), high_shift, mask)


@jit_inlined
def with_uppers(w: Any, row: Any, low: Any, high: Any, apart: Any, low_shift: Any, high_shift: Any, mask: Any) -> Any:
    """Return 32 columns: eight vectors of four columns.

    The bytes of two neighbouring vectors are `apart` bytes apart. The columns are nibbles, combined with the bits of
    `high` that `mask` selects.
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
def low_with(low: Any, high: Any, place: Any, mask: Any) -> Any:
    return with_upper_bits(masked(low, np.int32(15)), high, np.int32(place), np.int32(mask))


@jit_inlined
def high_with(low: Any, high: Any, place: Any, mask: Any) -> Any:
    return low_with(shifted(low, np.int32(4)), high, place, mask)


# The functions below are for Q2_K and Q3_K. In these, sixteen columns share a scale and a minimum. Each byte with low
# bits belongs to four columns that are 32 apart, with two bits each.


@jit_inlined
def two_bits_64(w: Any, row: Any, at: Any, half: Any, part: Any) -> Any:
    """Return the four columns that begin 128 * half + 32 * part after the first column of a part (turn) of the
    block.
    """
    return masked(shifted(load_64(w, row, at + U(64) * U(half)), np.int32(2) * np.int32(part)), np.int32(3))


# Each format has a copy of the code below. In the copy, the format's own functions and sizes replace the following
# ones.
_four: Any = None
_factors_of_16: Any = None
_TURN_BYTES, _BLOCK_BYTES = 2 * 64, 84


def _four_columns(w: Any, row: Any, at: Any) -> Any:  # compiled
    """Return the columns of one part (turn) of a block."""
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
    """Return both scales of 32 columns, followed by both minima."""
    first, minimum = _factors_of_16(w, row, base, part * U(2))
    last, other_minimum = _factors_of_16(w, row, base, part * U(2) + U(1))
    return first, last, minimum, other_minimum


def _unpack(w: Any, row: Any, step: Any, part: Any) -> Any:  # compiled
    base, half = (step >> U(1)) * U(_BLOCK_BYTES * ROWS), step & U(1)
    place = half * U(4) + part
    ask_out_of_order(w, row, base + place * U(2 * _BLOCK_BYTES), _BLOCK_BYTES // 32 + 1)
    return (
        _four(w, row, base, half, part),
        _four(w, row, base + U(_TURN_BYTES), half, part),
        _four(w, row, base + U(2 * _TURN_BYTES), half, part),
        _four(w, row, base + U(3 * _TURN_BYTES), half, part),
        _four(w, row, base + U(4 * _TURN_BYTES), half, part),
        _four(w, row, base + U(5 * _TURN_BYTES), half, part),
        _four(w, row, base + U(6 * _TURN_BYTES), half, part),
        _four(w, row, base + U(7 * _TURN_BYTES), half, part),
        *_factors(w, row, base, place),
    )


def of_sixteen_columns(
    name: str, block_bytes: int, turn_bytes: int, four: Any, factors_of_16: Any
) -> tuple[Any, BlockColumns]:
    """Return `unpack` and `block` for a layout with a scale and a minimum for every sixteen columns.

    Both are made from the format's own `four` and `factors_of_16`, which are compiled by @jit_inlined.
    """
    own = {"_four": four, "_factors_of_16": factors_of_16, "_TURN_BYTES": turn_bytes, "_BLOCK_BYTES": block_bytes}
    four_columns = jit_inlined(copy_of(_four_columns, f"four_columns_{name}", **own))
    factors = jit_inlined(copy_of(_factors, f"factors_{name}", **own))
    unpack = jit_inlined(copy_of(_unpack, f"unpack_{name}", **own, _factors=factors))
    return unpack, BlockColumns(turn_bytes, four_columns, factors, factors_of_16, four)
