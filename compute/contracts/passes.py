"""Compiled passes over arrays, for conditions: whether all is finite, the largest magnitude, a comparison of each."""

# A call of one costs some 0.3 us whatever the size, of NumPy 4, and reads what it is given once. Arrays of uint16 are
# the bits of float16, as everywhere here. Without fastmath: what is no number has to be met.
# What is overloaded says in Python what each of its overloads does for one type, and tests hold these to it.

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import cache
from numbers import Number
from types import CodeType, FunctionType
from typing import Any, cast

import numpy as np
from numba.core import types
from numba.extending import overload

from cbtop.compute.jit.compile import half_to_float, jit, jit_as_written

_MAGNITUDE, _INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_HALF_MAGNITUDE, _INFINITE_HALF = np.int32(0x7FFF), np.int32(0x7C00)
_COMPARED = ("float32", "float64", "int32", "int64")


def _magnitude(number: Any) -> Any:
    """Bits as int32, whose order is that of magnitudes, with what is no number above all."""
    return np.int32(number.view(np.int32) & _MAGNITUDE if number.dtype == np.float32 else number & _HALF_MAGNITUDE)


@overload(_magnitude)
def _magnitude_of(number: Any) -> Any:
    def of_float(number: Any) -> Any:
        return np.int32(np.float32(number).view(np.int32) & _MAGNITUDE)

    def of_half(number: Any) -> Any:
        return np.int32(np.int32(number) & _HALF_MAGNITUDE)

    return of_float if number == types.float32 else of_half


def _largest_bits(a: Any) -> Any:
    if a.dtype not in (np.float32, np.uint16):
        raise ValueError("numbers that are not met here")
    return max([_magnitude(one) for one in a.flat], default=np.int32(0))


@overload(_largest_bits)
def _largest_bits_of(a: Any) -> Any:
    def of_whole(a: Any) -> Any:
        return _largest_bits(a.reshape(a.size))

    def of_parts(a: Any) -> Any:
        found = np.int32(0)
        for part in range(a.shape[0]):
            found = max(found, _largest_bits(a[part]))
        return found

    def of_row(a: Any) -> Any:
        found = np.int32(0)
        for i in range(np.uint64(a.shape[0])):
            found = max(found, np.int32(_magnitude(a[i])))
        return found

    def of_other(a: Any) -> Any:
        if a is not None:
            raise ValueError("numbers that are not met here")
        return np.int32(0)

    if not isinstance(a, types.Array) or a.dtype not in (types.float32, types.uint16):
        return of_other
    if a.ndim == 1:
        return of_row
    return of_whole if a.layout == "C" else of_parts


def _infinity(a: Any) -> Any:
    return _INFINITE_HALF if a.dtype == np.uint16 else _INFINITE


@overload(_infinity)
def _infinity_of(a: Any) -> Any:
    def of_floats(a: Any) -> Any:
        return _INFINITE

    def of_halves(a: Any) -> Any:
        return _INFINITE_HALF

    return of_halves if _holds_halves(a) else of_floats


def _as_float(a: Any, bits: Any) -> Any:
    return np.float64(np.uint16(bits).view(np.float16) if a.dtype == np.uint16 else np.int32(bits).view(np.float32))


@overload(_as_float)
def _as_float_of(a: Any, bits: Any) -> Any:
    def of_floats(a: Any, bits: Any) -> Any:
        return np.float64(np.int32(bits).view(np.float32))

    def of_halves(a: Any, bits: Any) -> Any:
        return np.float64(half_to_float(bits))

    return of_halves if _holds_halves(a) else of_floats


def _holds_halves(a: Any) -> bool:
    return isinstance(a, types.Array) and a.dtype == types.uint16


@jit_as_written
def finite(a: Any) -> Any:
    """Whether there is neither NaN nor infinity in float32 or the bits of float16, of any shape."""
    return _largest_bits(a) < _infinity(a)


@jit_as_written
def finite_between(a: Any, first: Any, end: Any) -> Any:
    """As `finite`, of a[:, first:end]."""
    found = np.int32(0)
    for part in range(a.shape[0]):
        found = max(found, _largest_bits(a[part, first:end]))
    return found < _infinity(a)


@jit_as_written
def largest(a: Any) -> Any:
    """max |a| as float64; NaN where there is one. ValueError of nothing, as NumPy."""
    if a.size == 0:
        raise ValueError("the largest of nothing")
    return _as_float(a, _largest_bits(a))


@jit_as_written
def largest_between(a: Any, first: Any, end: Any) -> Any:
    """As `largest`, of a[:, first:end]."""
    found, count = np.int32(0), 0
    for part in range(a.shape[0]):
        between = a[part, first:end]
        count += between.size
        found = max(found, _largest_bits(between))
    if count == 0:
        raise ValueError("the largest of nothing")
    return _as_float(a, found)


@jit  # the sum may be reordered, in which a NaN stays one
def lengths(a: Any) -> Any:
    """Of each row the square root of the sum of its squares, in float64."""
    found = np.empty(a.shape[0], np.float64)
    for t in range(np.uint64(a.shape[0])):
        squares = np.float64(0)
        for i in range(np.uint64(a.shape[1])):
            value = np.float64(a[t, i])
            squares += value * value
        found[t] = math.sqrt(squares)
    return found


def rows_of(a: Any) -> Any:
    """How many rows a matrix has; -1 of a row or a number, which stand for each; -2 of what is not compared here."""
    if isinstance(a, Number):
        return -1
    if not _is_compared(a):
        return -2
    return a.shape[0] if a.ndim == 2 else -1


@overload(rows_of)
def _rows_of(a: Any) -> Any:
    def of_matrix(a: Any) -> Any:
        return a.shape[0]

    def of_row(a: Any) -> Any:
        return -1

    def of_other(a: Any) -> Any:
        return -2

    if isinstance(a, types.Number | types.Boolean):
        return of_row
    if not _is_compared(a):
        return of_other
    return of_matrix if a.ndim == 2 else of_row


def columns_of(a: Any) -> Any:
    """The extent of the last dimension; -1 of a number."""
    return a.shape[-1] if _is_compared(a) else -1


@overload(columns_of)
def _columns_of(a: Any) -> Any:
    def of_array(a: Any) -> Any:
        return a.shape[a.ndim - 1]

    def of_number(a: Any) -> Any:
        return -1

    return of_array if _is_compared(a) else of_number


def row_of(a: Any, t: Any) -> Any:
    """Row t of a matrix; a row or a number as it is."""
    if isinstance(a, np.ndarray) and not _is_compared(a):
        return np.float32(0)
    return a[t] if _is_compared(a) and a.ndim == 2 else a


@overload(row_of)
def _row_of(a: Any, t: Any) -> Any:
    def of_matrix(a: Any, t: Any) -> Any:
        return a[t]

    def of_row(a: Any, t: Any) -> Any:
        return a

    def of_other(a: Any, t: Any) -> Any:
        return np.float32(0)  # never read: `rows_of` is -2

    if isinstance(a, types.Array) and not _is_compared(a):
        return of_other
    return of_matrix if _is_compared(a) and a.ndim == 2 else of_row


def element(first: Any, row: Any, i: Any) -> Any:
    """row[i]; of a number itself, as NumPy takes it beside the array `first`: to float32 a float32."""
    if _is_compared(row):
        return row[i]
    return np.float32(row) if _is_compared(first) and first.dtype == np.float32 else row


@overload(element)
def _element(first: Any, row: Any, i: Any) -> Any:
    def of_row(first: Any, row: Any, i: Any) -> Any:
        return row[i]

    def of_number(first: Any, row: Any, i: Any) -> Any:
        return row

    def of_number_beside_floats(first: Any, row: Any, i: Any) -> Any:
        return np.float32(row)

    if _is_compared(row):
        return of_row
    return of_number_beside_floats if _is_compared(first) and first.dtype == types.float32 else of_number


def _is_compared(a: Any) -> bool:
    """Of an array, and of Numba's type of one."""
    return getattr(a, "ndim", 0) in (1, 2) and str(a.dtype) in _COMPARED


# What compares element by element is made of this: of {condition} in elements of the operands p0, p1, …
_TEMPLATE = """
def {name}({operands}):
    rows, columns = max(-1, {rows}), max(-1, {columns})
    if {misfit}:
        raise ValueError("shapes that are not met here")
    wrong = np.int32(0)
    for t in range(np.uint64(1 if rows == -1 else rows)):
        {taken}
        for i in range(np.uint64(columns)):
            wrong |= np.int32(0) if {condition} else np.int32(1)
    return wrong == np.int32(0)
"""


@cache
def comparison(condition: str, operands: int) -> Callable[..., bool]:
    """Whether `condition` holds of all elements of so many operands, compiled: arrays, and numbers.

    In `condition` `element(p0, r1, i)` is an element of the second operand; the first is an array. The text comes
    from `conditions`, which writes it from an expression that was read: no text of a file gets here. Matrices have
    the same shape, and rows stand for each of theirs; of other shapes ValueError, and NumPy is asked.
    """
    names = [f"p{place}" for place in range(operands)]
    text = _TEMPLATE.format(
        name="{name}",
        operands=", ".join(names),
        rows=", ".join([f"rows_of({one})" for one in names]),
        columns=", ".join([f"columns_of({one})" for one in names]),
        misfit=" or ".join(
            [f"(rows_of({one}) != -1 and rows_of({one}) != rows)" for one in names]
            + [f"(columns_of({one}) != -1 and columns_of({one}) != columns)" for one in names]
        ),
        taken="; ".join([f"r{place} = row_of(p{place}, t)" for place in range(operands)]),
        condition=condition,
    )
    # The name is in the key of the cache, where it stands for the text; the file is this one's.
    name = f"comparison_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    code = compile(text.replace("{name}", name), __file__, "exec")
    (body,) = [one for one in code.co_consts if isinstance(one, CodeType)]
    return cast(Callable[..., bool], jit_as_written(FunctionType(body, globals(), name)))
