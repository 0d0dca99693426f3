"""Vectors of pairs of bfloat16 for kernels. A vector has sixteen words with two bfloat16 numbers each.

The products of these numbers are added up in float32.

With AVX512-BF16, one instruction adds two products to each of sixteen sums. Without AVX512-BF16, the numbers are
multiplied one by one.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from cbtop.compute.jit.cpu import HAS_BF16
from cbtop.compute.jit.sums import tuple_of
from cbtop.compute.jit.vectors import (
    _FAST,
    _FLOATS,
    _HALVES,
    _INT,
    _INTS,
    LANES,
    Codegen,
    _address,
    _called,
    _floats,
    _intrinsic,
    _ints,
    _load,
    _splat,
    _widened,
    cgutils,
    constant_intrinsic,
)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's type bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)


def _all(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


def _low(builder: Any, words: Any) -> Any:
    return builder.shl(words, _all(16))


def _high(builder: Any, words: Any) -> Any:
    return builder.and_(words, _all(-(1 << 16)))


def _rounded(builder: Any, vector: Any) -> Any:
    """Round sixteen float32 to bfloat16 with integer operations. Returns their bits. NaN stays NaN."""
    bits = builder.bitcast(vector, _INTS)
    odd = builder.and_(builder.lshr(bits, _all(16)), _all(1))
    nearest = builder.lshr(builder.add(bits, builder.add(odd, _all(0x7FFF))), _all(16))
    is_number = builder.icmp_unsigned("<=", builder.and_(bits, _all(0x7FFFFFFF)), _all(0x7F800000))
    return builder.trunc(builder.select(is_number, nearest, _all(0x7FC0)), ir.VectorType(ir.IntType(16), LANES))


@_intrinsic
def bfloats(typing: Any, low: Any, high: Any) -> tuple[Any, Codegen]:
    """Round two Floats16 to bfloat16, ties to even.

    Returns Ints16 with two numbers in each word. The numbers of `low` come first, then the numbers of `high`.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        low, high = values
        if HAS_BF16:
            name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
            return builder.bitcast(_called(builder, name, _BFLOATS, [high, low]), _INTS)
        both = ir.Constant(ir.VectorType(_INT, 2 * LANES), list(range(2 * LANES)))
        halves = _rounded(builder, low), _rounded(builder, high)
        return builder.bitcast(builder.shuffle_vector(*halves, both), _INTS)

    return _ints(_floats, _floats), generate


@_intrinsic
def low_floats(typing: Any, words: Any) -> tuple[Any, Codegen]:
    """Return the first number of each word, as Floats16."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(_low(builder, values[0]), _FLOATS)

    return _floats(_ints), generate


@_intrinsic
def high_floats(typing: Any, words: Any) -> tuple[Any, Codegen]:
    """Return the second number of each word, as Floats16."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(_high(builder, values[0]), _FLOATS)

    return _floats(_ints), generate


@_intrinsic
def store_ints(typing: Any, array: Any, row: Any, column: Any, vector: Any) -> tuple[Any, Codegen]:
    """Set array[row, column : column + 16] = vector, in a matrix of any 32-bit numbers."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = _address(context, builder, signature.args[0], *values[:3])
        builder.store(values[3], builder.bitcast(pointer, _INTS.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.uint64, types.uint64, _ints), generate


def _pairs(builder: Any, low: Any, high: Any) -> Any:
    """Convert two vectors of sixteen float32 to bfloat16 by dropping the low bits, without rounding.

    Each word gets one number from each vector.
    """
    words = builder.bitcast(low, _INTS), builder.bitcast(high, _INTS)
    return builder.or_(builder.lshr(words[0], _all(16)), _high(builder, words[1]))


def _add_pairs(builder: Any, total: Any, pairs: Any, others: Any) -> Any:
    """Return total + the two products of the numbers in each word."""
    if HAS_BF16:
        numbers = [builder.bitcast(one, _BFLOATS) for one in (pairs, others)]
        return _called(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, [total, *numbers])
    for part in (_low, _high):
        factors = [builder.bitcast(part(builder, one), _FLOATS) for one in (pairs, others)]
        total = builder.fadd(builder.fmul(*factors, flags=_FAST), total, flags=_FAST)
    return total


@constant_intrinsic
def add_products_of_pairs(
    typing: Any, sums: Any, shared: Any, at: Any, on: Any, factors: Any, place: Any, rows: Any, vectors: Any
) -> tuple[Any, Codegen]:
    """Do the same as `sums.add_products`, but for two rows of `shared` at once.

    The numbers of both rows are converted to bfloat16 by dropping low bits. `at` is (low, high, column): both rows
    and the first column. Each word of `factors` contains one number for the low row and one for the high row.
    `shared` is uint16 with the bits of binary16.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        totals = cgutils.unpack_tuple(builder, values[0], len(sums))
        array, matrix = values[1], values[4]
        low, high, column = cgutils.unpack_tuple(builder, values[2], 3)
        (rows_on, columns_on), (first, factor) = (cgutils.unpack_tuple(builder, values[each], 2) for each in (3, 5))
        loaded = []
        for _ in range(vectors.literal_value):
            both = []
            for row in (low, high):
                pointer = _address(context, builder, signature.args[1], array, row, column)
                both.append(_widened(builder, _load(builder, pointer, _HALVES)))
            loaded.append(_pairs(builder, *both))
            low, high = builder.add(low, rows_on), builder.add(high, rows_on)
            column = builder.add(column, columns_on)
        made: list[Any] = []
        for r in range(rows.literal_value):
            place = builder.add(first, first.type(r)), factor
            pointer = _address(context, builder, signature.args[4], matrix, *place)
            word = builder.load(builder.bitcast(pointer, _INT.as_pointer()), align=4, typ=_INT)
            times = _splat(builder, word, _INTS)
            for pairs in loaded:
                made.append(_add_pairs(builder, totals[len(made)], pairs, times))
        return context.make_tuple(builder, sums, made)

    three, two = tuple_of(types.uint64, 3), tuple_of(types.uint64, 2)
    return sums(sums, shared, three, two, factors, two, rows, vectors), generate


@_intrinsic
def add_pairs_again(typing: Any, totals: Any, words: Any) -> tuple[Any, Codegen]:
    """Add the squares of the two numbers in each word to each Floats16 of the tuple `totals`.

    The sums do not depend on each other.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        sums = cgutils.unpack_tuple(builder, values[0], totals.count)
        return context.make_tuple(builder, totals, [_add_pairs(builder, one, values[1], values[1]) for one in sums])

    return totals(totals, _ints), generate
