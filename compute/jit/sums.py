"""Sums that stay in registers.

Several rows are summed together, so that a number that all rows use is read only once.

Sums are a tuple of Floats16: the vectors of the first row, then the vectors of the second row, and so on. Their
number is a constant, so that LLVM can keep them in registers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from cbtop.compute.jit.vectors import (
    _FAST,
    _FLOATS,
    _HALVES,
    LANES,
    Codegen,
    _address,
    _floats,
    _load,
    _splat,
    _widened,
    cgutils,
    constant_intrinsic,
)

tuple_of: Any = types.UniTuple


@constant_intrinsic
def zero_sums(typing: Any, rows: Any, vectors: Any) -> tuple[Any, Codegen]:
    """Return zeros as the sums for `rows` rows, with `vectors` vectors per row."""
    result = tuple_of(_floats, rows.literal_value * vectors.literal_value)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return context.make_tuple(builder, result, [ir.Constant(_FLOATS, [0.0] * LANES)] * len(result))

    return result(rows, vectors), generate


@constant_intrinsic
def load_sums(typing: Any, array: Any, row: Any, column: Any, rows: Any, vectors: Any) -> tuple[Any, Codegen]:
    """Return array[row : row + rows, column : column + 16 * vectors] of a float32 matrix, as sums."""
    result = tuple_of(_floats, rows.literal_value * vectors.literal_value)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointers = _pointers(context, builder, signature.args[0], values[:3], rows, vectors)
        return context.make_tuple(builder, result, [_load(builder, one, _FLOATS) for one in pointers])

    return result(array, types.uint64, types.uint64, rows, vectors), generate


@constant_intrinsic
def store_sums(
    typing: Any, array: Any, row: Any, column: Any, sums: Any, rows: Any, vectors: Any
) -> tuple[Any, Codegen]:
    """Set array[row : row + rows, column : column + 16 * vectors] = sums, in a float32 matrix."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointers = _pointers(context, builder, signature.args[0], values[:3], rows, vectors)
        for pointer, total in zip(pointers, cgutils.unpack_tuple(builder, values[3], len(sums)), strict=True):
            builder.store(total, builder.bitcast(pointer, _FLOATS.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.uint64, types.uint64, sums, rows, vectors), generate


def _pointers(context: Any, builder: Any, kind: Any, place: Any, rows: Any, vectors: Any) -> list[Any]:
    array, row, column = place
    return [
        _address(context, builder, kind, array, _plus(builder, row, r), _plus(builder, column, LANES * vector))
        for r in range(rows.literal_value)
        for vector in range(vectors.literal_value)
    ]


def _plus(builder: Any, value: Any, constant: int) -> Any:
    return builder.add(value, value.type(constant))


@constant_intrinsic
def add_products(
    typing: Any, sums: Any, shared: Any, at: Any, on: Any, factors: Any, place: Any, rows: Any, vectors: Any
) -> tuple[Any, Codegen]:
    """Add one product to each of `sums`, and return the sums.

    The sum of row r and vector v gets the product factors[first + r, factor] * shared[row + v * rows_on, column + v *
    columns_on : + 16]. `at` is (row, column), `on` is (rows_on, columns_on), and `place` is (first, factor).
    `factors` is a float32 matrix. `shared` is float32, or uint16 with the bits of binary16.
    """
    kind = _HALVES if shared.dtype == types.uint16 else _FLOATS

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        totals = cgutils.unpack_tuple(builder, values[0], len(sums))
        array, matrix = values[1], values[4]
        (row, column), (rows_on, columns_on), (first, factor) = (
            cgutils.unpack_tuple(builder, values[each], 2) for each in (2, 3, 5)
        )
        loaded = []
        for _ in range(vectors.literal_value):
            vector = _load(builder, _address(context, builder, signature.args[1], array, row, column), kind)
            loaded.append(_widened(builder, vector) if kind is _HALVES else vector)
            row, column = builder.add(row, rows_on), builder.add(column, columns_on)
        made: list[Any] = []
        for r in range(rows.literal_value):
            pointer = _address(context, builder, signature.args[4], matrix, _plus(builder, first, r), factor)
            number = builder.load(builder.bitcast(pointer, ir.FloatType().as_pointer()), align=4, typ=ir.FloatType())
            times = _splat(builder, number, _FLOATS)
            for vector in loaded:
                product = builder.fmul(vector, times, flags=_FAST)
                made.append(builder.fadd(product, totals[len(made)], flags=_FAST))
        return context.make_tuple(builder, sums, made)

    two = tuple_of(types.uint64, 2)
    return sums(sums, shared, two, two, factors, two, rows, vectors), generate
