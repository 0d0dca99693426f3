"""The compiled rows of int8 products, for each format. They process sixteen rows at a time, from interleaved weights.

Some formats are unpacked a whole block at a time, others 32 columns at a time. A factor is for 32 columns, in some
formats for 16. For one token, weights are unpacked when they are read. For four tokens, weights are unpacked to bytes
once, and the tokens share these bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.bytes64 import LESS_128, add_products_apart, store_64, sums_of_loaded, sums_of_products
from cbtop.compute.jit.compile import copy_of, jit, jit_inlined
from cbtop.compute.jit.cpu import TIER
from cbtop.compute.jit.vectors import (
    add,
    load_floats,
    multiply,
    multiply_add,
    no_ints,
    splat,
    store_floats,
    to_floats,
)
from cbtop.compute.kernels.one_token_avx2 import ONE_TOKEN
from cbtop.compute.kernels.products import CompiledRows
from cbtop.compute.kernels.quantize_rows import BLOCK, FACTORS
from cbtop.compute.quantization import FORMATS, INTERLEAVABLE
from cbtop.compute.quantization.base import BlockFormat
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import BlockColumns, Factors, InterleavedLayout
from cbtop.compute.quantization.unpacking import ask_ahead, ask_out_of_order

U = np.uint64
LINE = 64  # size of a line of the processor's cache in bytes
# offset of the factors in `panel`; before them are the weights of 32 columns of sixteen rows (one byte per weight)
SCALES = 8 * LINE
SPREAD = SCALES + 2 * LINE
STRETCH = 32  # number of blocks of 32 columns that are unpacked together; they take 20 KiB and stay in L1


@jit_inlined
def _with_minimum(products: Any, factors: Any, token: Any, block: Any, scale: Any, minimum: Any, total: Any) -> Any:
    place = block * U(FACTORS)
    total = multiply_add(multiply(to_floats(products), splat(factors[token, place])), scale, total)
    return multiply_add(splat(factors[token, place + U(1)]), minimum, total)


@jit_inlined
def _without_minimum(
    products: Any, factors: Any, token: Any, block: Any, scale: Any, minimum: Any, total: Any
) -> Any:
    """Do the same as `_with_minimum` for products that already include the minimum.

    Formats with weights above 127 use this function if LESS_128 is set.
    """
    return multiply_add(multiply(to_floats(products), splat(factors[token, block * U(FACTORS)])), scale, total)


@jit_inlined
def _half_with_minimum(
    products: Any, factors: Any, token: Any, block: Any, half: Any, scale: Any, minimum: Any, total: Any
) -> Any:
    place = block * U(FACTORS)
    total = multiply_add(multiply(to_floats(products), splat(factors[token, place])), scale, total)
    return multiply_add(splat(factors[token, place + U(2) + half]), minimum, total)


@jit_inlined
def _with_minima(low: Any, high: Any, factors: Any, token: Any, block: Any, own: Any, total: Any) -> Any:
    first, last, minimum, other_minimum = own
    total = _half_with_minimum(low, factors, token, block, U(0), first, minimum, total)
    return _half_with_minimum(high, factors, token, block, U(1), last, other_minimum, total)


@jit_inlined
def _half_less_32(products: Any, factors: Any, token: Any, block: Any, half: Any, scale: Any, total: Any) -> Any:
    place = block * U(FACTORS)
    offset = multiply(splat(np.float32(32)), splat(factors[token, place + U(2) + half]))
    return multiply_add(multiply_add(to_floats(products), splat(factors[token, place]), offset), scale, total)


@jit_inlined
def _less_32(low: Any, high: Any, factors: Any, token: Any, block: Any, first: Any, last: Any, total: Any) -> Any:
    total = _half_less_32(low, factors, token, block, U(0), first, total)
    return _half_less_32(high, factors, token, block, U(1), last, total)


_LARGEST = 15  # the largest weight that `_unpack` returns; copies of the code below use the format's own value


def _add_with_minimum(found: Any, codes: Any, factors: Any, t: Any, block: Any, total: Any) -> Any:  # compiled
    """Return total + scale * (weights . x) - minimum * (sum of x). 32 columns share one scale and one minimum."""
    q, r, s, u, a, b, c, d, scale, minimum = found
    (sums,) = sums_of_products((q, r, s, u, a, b, c, d), codes, t, block * U(BLOCK), 1, _LARGEST)
    return _with_minimum(sums, factors, t, block, scale, minimum, total)


def _add_with_minima(found: Any, codes: Any, factors: Any, t: Any, block: Any, total: Any) -> Any:  # compiled
    """Do the same as `_add_with_minimum`, but with a scale and a minimum for every 16 columns."""
    q, r, s, u, a, b, c, d, first, last, minimum, other_minimum = found
    column, own = block * U(BLOCK), (first, last, minimum, other_minimum)
    (low,) = sums_of_products((q, r, s, u), codes, t, column, 1, _LARGEST)
    (high,) = sums_of_products((a, b, c, d), codes, t, column + U(16), 1, _LARGEST)
    return _with_minima(low, high, factors, t, block, own, total)


def _add_four_with_minimum(panel: Any, at: Any, codes: Any, factors: Any, t: Any, block: Any, totals: Any) -> Any:
    """Do the same as `_add_with_minimum` for four tokens, with the weights that `_spread` stored."""  # compiled
    scale = load_floats(panel, U(0), at + U(SCALES))
    minimum = load_floats(panel, U(0), at + U(SCALES + LINE))
    sums = sums_of_loaded(8, panel, at, codes, t, block * U(BLOCK), 4, _LARGEST)
    return (
        _with_minimum(sums[0], factors, t, block, scale, minimum, totals[0]),
        _with_minimum(sums[1], factors, t + U(1), block, scale, minimum, totals[1]),
        _with_minimum(sums[2], factors, t + U(2), block, scale, minimum, totals[2]),
        _with_minimum(sums[3], factors, t + U(3), block, scale, minimum, totals[3]),
    )


def _add_four_less_32(panel: Any, at: Any, codes: Any, factors: Any, t: Any, block: Any, totals: Any) -> Any:
    """Add the products of four tokens and (weights - 32). Every group of 16 columns has its own scale."""  # compiled
    column = block * U(BLOCK)
    first, last = load_floats(panel, U(0), at + U(SCALES)), load_floats(panel, U(0), at + U(SCALES + LINE))
    low = sums_of_loaded(4, panel, at, codes, t, column, 4, _LARGEST)
    high = sums_of_loaded(4, panel, at + U(4 * LINE), codes, t, column + U(16), 4, _LARGEST)
    return (
        _less_32(low[0], high[0], factors, t, block, first, last, totals[0]),
        _less_32(low[1], high[1], factors, t + U(1), block, first, last, totals[1]),
        _less_32(low[2], high[2], factors, t + U(2), block, first, last, totals[2]),
        _less_32(low[3], high[3], factors, t + U(3), block, first, last, totals[3]),
    )


def _add_four_with_minima(panel: Any, at: Any, codes: Any, factors: Any, t: Any, block: Any, totals: Any) -> Any:
    """Do the same as `_add_four_with_minimum`, but with a scale and a minimum for every 16 columns."""  # compiled
    column = block * U(BLOCK)
    first, last = load_floats(panel, U(0), at + U(SCALES)), load_floats(panel, U(0), at + U(SCALES + LINE))
    minimum = load_floats(panel, U(0), at + U(SCALES + 2 * LINE))
    own = first, last, minimum, load_floats(panel, U(0), at + U(SCALES + 3 * LINE))
    low = sums_of_loaded(4, panel, at, codes, t, column, 4, _LARGEST)
    high = sums_of_loaded(4, panel, at + U(4 * LINE), codes, t, column + U(16), 4, _LARGEST)
    return (
        _with_minima(low[0], high[0], factors, t, block, own, totals[0]),
        _with_minima(low[1], high[1], factors, t + U(1), block, own, totals[1]),
        _with_minima(low[2], high[2], factors, t + U(2), block, own, totals[2]),
        _with_minima(low[3], high[3], factors, t + U(3), block, own, totals[3]),
    )


@jit_inlined
def _store_factors(panel: Any, at: Any, first: Any, second: Any) -> None:
    store_floats(panel, U(0), at + U(SCALES), first)
    store_floats(panel, U(0), at + U(SCALES + LINE), second)


@jit_inlined
def _store_four_factors(panel: Any, at: Any, first: Any, last: Any, minimum: Any, other_minimum: Any) -> None:
    _store_factors(panel, at, first, last)
    _store_factors(panel, at + U(2 * LINE), minimum, other_minimum)


@jit_inlined
def _store_weights(weights: Any, panel: Any, at: Any) -> None:
    q, r, s, u, a, b, c, d = weights
    store_64(panel, U(0), at, q)
    store_64(panel, U(0), at + U(LINE), r)
    store_64(panel, U(0), at + U(2 * LINE), s)
    store_64(panel, U(0), at + U(3 * LINE), u)
    store_64(panel, U(0), at + U(4 * LINE), a)
    store_64(panel, U(0), at + U(5 * LINE), b)
    store_64(panel, U(0), at + U(6 * LINE), c)
    store_64(panel, U(0), at + U(7 * LINE), d)


@jit_inlined
def _spread(found: Any, panel: Any, at: Any) -> None:
    """Store 32 columns of sixteen rows in panel[0, at:].

    One byte per weight comes first, then two factors for each row.
    """
    q, r, s, u, a, b, c, d, first, second = found
    _store_weights((q, r, s, u, a, b, c, d), panel, at)
    _store_factors(panel, at, first, second)


@jit_inlined
def _spread_with_minima(found: Any, panel: Any, at: Any) -> None:
    """Do the same as `_spread` with four factors for each row."""
    q, r, s, u, a, b, c, d, first, last, minimum, other_minimum = found
    _store_weights((q, r, s, u, a, b, c, d), panel, at)
    _store_four_factors(panel, at, first, last, minimum, other_minimum)


# Each format has a copy of the code below. In the copy, the format's own functions replace the following ones.
_unpack: Any = None
_add, _add_four = _add_with_minimum, _add_four_with_minimum


def _spread_32(w: Any, row: Any, step: Any, panel: Any, at: Any) -> None:  # compiled
    _spread(_unpack(w, row, step, U(0)), panel, at)


def _spread_64(w: Any, row: Any, step: Any, panel: Any, at: Any) -> None:  # compiled
    _spread(_unpack(w, row, step, U(0)), panel, at)
    _spread(_unpack(w, row, step, U(1)), panel, at + U(SPREAD))


def _spread_128(w: Any, row: Any, step: Any, panel: Any, at: Any) -> None:  # compiled
    # The calls are written out and not in a loop, because the shifts and positions of each part must be constants.
    _spread(_unpack(w, row, step, U(0)), panel, at)
    _spread(_unpack(w, row, step, U(1)), panel, at + U(SPREAD))
    _spread(_unpack(w, row, step, U(2)), panel, at + U(2 * SPREAD))
    _spread(_unpack(w, row, step, U(3)), panel, at + U(3 * SPREAD))


def _one_token_32(w: Any, row: Any, step: Any, codes: Any, factors: Any, t: Any, total: Any) -> Any:  # compiled
    return _add(_unpack(w, row, step, U(0)), codes, factors, t, step, total)


def _one_token_64(w: Any, row: Any, step: Any, codes: Any, factors: Any, t: Any, total: Any) -> Any:  # compiled
    total = _add(_unpack(w, row, step, U(0)), codes, factors, t, step * U(2), total)
    return _add(_unpack(w, row, step, U(1)), codes, factors, t, step * U(2) + U(1), total)


def _one_token_128(w: Any, row: Any, step: Any, codes: Any, factors: Any, t: Any, total: Any) -> Any:  # compiled
    block = step * U(4)
    total = _add(_unpack(w, row, step, U(0)), codes, factors, t, block, total)
    total = _add(_unpack(w, row, step, U(1)), codes, factors, t, block + U(1), total)
    total = _add(_unpack(w, row, step, U(2)), codes, factors, t, block + U(2), total)
    return _add(_unpack(w, row, step, U(3)), codes, factors, t, block + U(3), total)


# In the functions below, a step is a block. A loop reads the block once, in memory order, with few loads. On a Zen 4,
# a loop with two to five loads reads memory at 30 GB/s, and a loop with sixteen to 48 loads only at 15 to 22 GB/s.
# The processor treats each load instruction as a separate stream. With many loads, the lines of one stream are far
# apart, because each pass of the loop reads many bytes.
_four_columns: Any = None
_factors: Any = None
_factors_of_16: Any = None
_four: Any = None
_TURN_BYTES, _BLOCK_BYTES = 5 * LINE, 176


def _spread_256(w: Any, row: Any, step: Any, panel: Any, at: Any) -> None:  # compiled
    base = step * U(ROWS * _BLOCK_BYTES)
    for i in range(U(8)):
        ask_out_of_order(w, row, base + i * U(2 * _BLOCK_BYTES), _BLOCK_BYTES // 32 + 1)
        a, b, c, d, e, f, g, h = _four_columns(w, row, base + i * U(_TURN_BYTES))
        place = at + i * U(LINE)
        store_64(panel, U(0), place, a)
        store_64(panel, U(0), place + U(SPREAD), b)
        store_64(panel, U(0), place + U(2 * SPREAD), c)
        store_64(panel, U(0), place + U(3 * SPREAD), d)
        store_64(panel, U(0), place + U(4 * SPREAD), e)
        store_64(panel, U(0), place + U(5 * SPREAD), f)
        store_64(panel, U(0), place + U(6 * SPREAD), g)
        store_64(panel, U(0), place + U(7 * SPREAD), h)
    _store_factors(panel, at, *_factors(w, row, base, U(0)))
    _store_factors(panel, at + U(SPREAD), *_factors(w, row, base, U(1)))
    _store_factors(panel, at + U(2 * SPREAD), *_factors(w, row, base, U(2)))
    _store_factors(panel, at + U(3 * SPREAD), *_factors(w, row, base, U(3)))
    _store_factors(panel, at + U(4 * SPREAD), *_factors(w, row, base, U(4)))
    _store_factors(panel, at + U(5 * SPREAD), *_factors(w, row, base, U(5)))
    _store_factors(panel, at + U(6 * SPREAD), *_factors(w, row, base, U(6)))
    _store_factors(panel, at + U(7 * SPREAD), *_factors(w, row, base, U(7)))


def _add_part(
    products: Any, w: Any, row: Any, base: Any, part: Any, factors: Any, t: Any, block: Any, total: Any
) -> Any:  # compiled
    scale, minimum = _factors(w, row, base, part)
    return _with_minimum(products, factors, t, block + part, scale, minimum, total)


def _one_token_256(w: Any, row: Any, step: Any, codes: Any, factors: Any, t: Any, total: Any) -> Any:  # compiled
    base, block, zero = step * U(_BLOCK_BYTES * ROWS), step * U(8), no_ints()
    sums = zero, zero, zero, zero, zero, zero, zero, zero
    for i in range(U(8)):
        ask_ahead(w, row, base + i * U(_TURN_BYTES), _TURN_BYTES // LINE)
        found = _four_columns(w, row, base + i * U(_TURN_BYTES))
        sums = add_products_apart(sums, found, codes, t, block * U(BLOCK) + i * U(4), BLOCK, _LARGEST)
    a, b, c, d, e, f, g, h = sums
    total = _add_part(a, w, row, base, U(0), factors, t, block, total)
    total = _add_part(b, w, row, base, U(1), factors, t, block, total)
    total = _add_part(c, w, row, base, U(2), factors, t, block, total)
    total = _add_part(d, w, row, base, U(3), factors, t, block, total)
    total = _add_part(e, w, row, base, U(4), factors, t, block, total)
    total = _add_part(f, w, row, base, U(5), factors, t, block, total)
    total = _add_part(g, w, row, base, U(6), factors, t, block, total)
    return _add_part(h, w, row, base, U(7), factors, t, block, total)


def _add_half_less_32(
    products: Any, w: Any, row: Any, base: Any, part: Any, half: Any, factors: Any, place: Any, total: Any
) -> Any:  # compiled
    t, block = place
    scale = _factors_of_16(w, row, base, part * U(2) + half)
    return _half_less_32(products, factors, t, block + part, half, scale, total)


def _one_token_less_32(w: Any, row: Any, step: Any, codes: Any, factors: Any, t: Any, total: Any) -> Any:  # compiled
    base, block, zero = step * U(_BLOCK_BYTES * ROWS), step * U(8), no_ints()
    for half in range(U(2)):  # the 32 columns have two halves with different scales
        sums = zero, zero, zero, zero, zero, zero, zero, zero
        for i in range(half * U(4), half * U(4) + U(4)):
            ask_ahead(w, row, base + i * U(_TURN_BYTES), _TURN_BYTES // LINE)
            found = _four_columns(w, row, base + i * U(_TURN_BYTES))
            sums = add_products_apart(sums, found, codes, t, block * U(BLOCK) + i * U(4), BLOCK, _LARGEST)
        a, b, c, d, e, f, g, h = sums
        total = _add_half_less_32(a, w, row, base, U(0), half, factors, (t, block), total)
        total = _add_half_less_32(b, w, row, base, U(1), half, factors, (t, block), total)
        total = _add_half_less_32(c, w, row, base, U(2), half, factors, (t, block), total)
        total = _add_half_less_32(d, w, row, base, U(3), half, factors, (t, block), total)
        total = _add_half_less_32(e, w, row, base, U(4), half, factors, (t, block), total)
        total = _add_half_less_32(f, w, row, base, U(5), half, factors, (t, block), total)
        total = _add_half_less_32(g, w, row, base, U(6), half, factors, (t, block), total)
        total = _add_half_less_32(h, w, row, base, U(7), half, factors, (t, block), total)
    return total


def _add_sixteen(
    w: Any, row: Any, base: Any, at: Any, columns: Any, codes: Any, factors: Any, place: Any, total: Any
) -> Any:  # compiled
    """Do the same as `_add_with_minimum` for 16 of 32 columns: the first 16, or the last 16 if `second` is true.

    The 32 columns begin 128 * half + 32 * part columns after the start of the block.
    """
    (half, part, second), (t, first) = columns, place
    found = (
        _four(w, row, at, half, part),
        _four(w, row, at + U(_TURN_BYTES), half, part),
        _four(w, row, at + U(2 * _TURN_BYTES), half, part),
        _four(w, row, at + U(3 * _TURN_BYTES), half, part),
    )
    part_of_8 = half * U(4) + U(part)
    block = first + part_of_8
    (sums,) = sums_of_products(found, codes, t, block * U(BLOCK) + second * U(16), 1, _LARGEST)
    scale, minimum = _factors_of_16(w, row, base, part_of_8 * U(2) + second)
    return _half_with_minimum(sums, factors, t, block, second, scale, minimum, total)


def _one_token_by_16(w: Any, row: Any, step: Any, codes: Any, factors: Any, t: Any, total: Any) -> Any:  # compiled
    base, block = step * U(_BLOCK_BYTES * ROWS), step * U(8)
    for turn in range(U(4)):
        second, half = turn >> U(1), turn & U(1)
        at = base + second * U(4 * _TURN_BYTES)
        ask_ahead(w, row, base + turn * U(4 * _BLOCK_BYTES), _BLOCK_BYTES // 16 + 1)
        total = _add_sixteen(w, row, base, at, (half, 0, second), codes, factors, (t, block), total)
        total = _add_sixteen(w, row, base, at, (half, 1, second), codes, factors, (t, block), total)
        total = _add_sixteen(w, row, base, at, (half, 2, second), codes, factors, (t, block), total)
        total = _add_sixteen(w, row, base, at, (half, 3, second), codes, factors, (t, block), total)
    return total


_spread_step, _one_token = _spread_128, _one_token_128
# Bytes of a row in a step, and number of parts of 32 columns in a step.
_STEP_BYTES, _PARTS = 72, 4


@jit_inlined
def _store(out: Any, token: Any, row: Any, total: Any, is_first: Any) -> None:
    """Store the sum `total` in `out` for the first range of columns.

    For later ranges, add `total` to the value in `out`.
    """
    store_floats(out, token, row, total if is_first else add(total, load_floats(out, token, row)))


def _four_by_four(w: Any, row: Any, codes: Any, factors: Any, out: Any, panel: Any, begin: Any) -> Any:  # compiled
    """Multiply all groups of four tokens by a group of rows. Returns the number of tokens that were processed."""
    tokens, steps, most = U(out.shape[0]) // U(4) * U(4), U(w.shape[1] // _STEP_BYTES), U(STRETCH // _PARTS)
    for first in range(U(0), steps, most):
        count = min(steps - first, most)
        for step in range(count):
            _spread_step(w, row, first + step, panel, begin + step * U(_PARTS * SPREAD))
        for t in range(U(0), tokens, U(4)):
            zero = splat(np.float32(0))
            totals = (zero, zero, zero, zero)
            for block in range(count * U(_PARTS)):
                at = begin + block * U(SPREAD)
                totals = _add_four(panel, at, codes, factors, t, first * U(_PARTS) + block, totals)
            a, b, c, d = totals
            is_first = first == U(0)
            _store(out, t, row, a, is_first)
            _store(out, t + U(1), row, b, is_first)
            _store(out, t + U(2), row, c, is_first)
            _store(out, t + U(3), row, d, is_first)
    return tokens


def _groups(w: Any, bias: Any, codes: Any, factors: Any, out: Any, chunk: Any, chunks: Any) -> None:  # compiled
    """Compute the groups of rows in chunk number `chunk` of `chunks`.

    Four tokens are processed at a time, the rest one by one.
    """
    tokens, groups, steps = U(out.shape[0]), w.shape[0] // ROWS, w.shape[1] // _STEP_BYTES
    panel = np.empty((1, LINE + STRETCH * SPREAD if tokens > U(3) else 0), np.uint8)
    begin = U(-panel.ctypes.data % LINE)
    for group in range(U(chunk * groups // chunks), U((chunk + 1) * groups // chunks)):
        row: Any = group * U(ROWS)
        t: Any = U(0)
        if tokens > U(3):
            t = _four_by_four(w, row, codes, factors, out, panel, begin)
        while t < tokens:
            total = splat(np.float32(0))
            for step in range(U(steps)):
                total = _one_token(w, row, step, codes, factors, t, total)
            store_floats(out, t, row, total)
            t += U(1)
        if bias.shape[0]:
            for t in range(tokens):
                for i in range(U(ROWS)):
                    out[t, row + i] += bias[row + i]


def _compiled(
    block_format: BlockFormat, parts: int, spread: Any, one_token: Any, add_four: Any, largest: int, **more: Any
) -> CompiledRows:
    """Return `_groups` for one format, with `parts` times 32 columns per step. The first call compiles it."""
    name = block_format.name
    own: dict[str, Any] = {
        **more,
        "_PARTS": parts,
        "_STEP_BYTES": block_format.block_bytes * parts * BLOCK // block_format.block_elements,
        "_spread_step": jit_inlined(spread),
        "_one_token": jit_inlined(one_token),
        "_add_four": jit_inlined(copy_of(add_four, f"{add_four.__name__}_{name}", **_sums_of(largest))),
    }
    own["_four_by_four"] = jit_inlined(copy_of(_four_by_four, f"_four_by_four_{name}", **own))
    if TIER == "AVX2" and block_format.code in ONE_TOKEN:
        one_token = ONE_TOKEN[block_format.code]
        own |= {"_one_token": jit_inlined(one_token), "_STEP_BYTES": block_format.block_bytes}
    return CompiledRows(jit(copy_of(_groups, f"_groups_{name}", **own)), ROWS)


def _sums_of(largest: int) -> dict[str, Any]:
    """Return the globals for a format's copies of the functions in this file.

    They replace the globals that have the same names here. `largest` is the largest weight of the format.
    """
    return {"_LARGEST": largest, "_with_minimum": _without_minimum if largest > 127 and LESS_128 else _with_minimum}


# A panel with two minima per row has more room.
_WITH_MINIMA = {"SPREAD": SPREAD + 2 * LINE}
# Number of columns in a step -> the functions for four tokens and for one.
_OF_STEPS = {32: (_spread_32, _one_token_32), 64: (_spread_64, _one_token_64), 128: (_spread_128, _one_token_128)}


def _of_32_columns(block_format: BlockFormat, layout: InterleavedLayout) -> CompiledRows:
    """Return the compiled rows of a format that is unpacked 32 columns at a time."""
    name, columns = block_format.name, min(block_format.block_elements, 128)
    spread, one_token = _OF_STEPS[columns]
    own, add, add_four = _sums_of(layout.largest), _add_with_minimum, _add_four_with_minimum
    spread_own: dict[str, Any] = {"_unpack": layout.unpack}
    more: dict[str, Any] = {}
    if layout.factors is Factors.OF_16:
        more, add, add_four = _WITH_MINIMA, _add_with_minima, _add_four_with_minima
        spread_own |= {**more, "_spread": _spread_with_minima}
    add = jit_inlined(copy_of(add, f"{add.__name__}_{name}", **own))
    return _compiled(
        block_format,
        columns // BLOCK,
        copy_of(spread, f"_spread_{name}", **spread_own),
        copy_of(one_token, f"_one_token_{name}", _unpack=layout.unpack, _add=add),
        add_four,
        layout.largest,
        **more,
    )


# Kind of factors -> the functions for one token, for a part of one token's block, and for four tokens.
_OF_BLOCKS = {
    Factors.OF_32: (_one_token_256, _add_part, _add_four_with_minimum),
    Factors.LESS_32: (_one_token_less_32, _add_half_less_32, _add_four_less_32),
    Factors.OF_16: (_one_token_by_16, _add_sixteen, _add_four_with_minima),
}


def _of_blocks(block_format: BlockFormat, layout: InterleavedLayout, block: BlockColumns) -> CompiledRows:
    """Return the compiled rows of a format that is unpacked a whole block at a time."""
    name, largest = block_format.name, layout.largest
    one_token, add_part, add_four = _OF_BLOCKS[layout.factors]
    own: dict[str, Any] = {
        "_four_columns": block.four_columns,
        "_factors": block.factors,
        "_factors_of_16": block.factors_of_16,
        "_four": block.four,
        "_TURN_BYTES": block.turn_bytes,
        "_BLOCK_BYTES": block_format.block_bytes,
        "_LARGEST": largest,
    }
    more: dict[str, Any] = {}
    if layout.factors is Factors.OF_16:
        more = _WITH_MINIMA
        own |= {"_store_factors": _store_four_factors, **more}
    own[add_part.__name__] = jit_inlined(copy_of(add_part, f"{add_part.__name__}_{name}", **own))
    return _compiled(
        block_format,
        8,
        copy_of(_spread_256, f"_spread_{name}", **own),
        copy_of(one_token, f"_one_token_{name}", **own),
        add_four,
        largest,
        **more,
    )


def _rows(block_format: BlockFormat, layout: InterleavedLayout) -> CompiledRows:
    if layout.block is None:
        return _of_32_columns(block_format, layout)
    return _of_blocks(block_format, layout, layout.block)


ROWS_OF: dict[int, CompiledRows] = {code: _rows(FORMATS[code], layout) for code, layout in INTERLEAVABLE.items()}
