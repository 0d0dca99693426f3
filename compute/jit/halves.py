"""Convert float32 to the bits of IEEE binary16, or to the element type of an array.

Convert bits of binary16 to numbers.

Infinities and values beyond the range of the array become NaN. An infinite key could lead to a weight of 0, which
looks valid.
"""

# The conversion uses integers, as compile.half_to_float does. A processor without F16C has no instruction for the
# conversion.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba.core import types
from numba.extending import overload

from cbtop.compute.jit.compile import jit

_SIGN, MAGNITUDE = np.int32(0x8000), np.int32(0x7FFFFFFF)
_SMALLEST_NORMAL = np.int32(0x38800000)  # 2^-14
# 65,520 is halfway between the largest binary16 and 2^16, and is rounded up to infinity.
_BEYOND = np.int32(0x477FF000)
INFINITE, NOT_A_NUMBER = np.int32(0x7F800000), np.int32(0x7FC00000)
_BIAS = np.int32((127 - 15) << 23)
# The bits of 0.5. Adding 0.5 rounds a float32 to multiples of 2^-24, the smallest binary16.
_HALF_BITS = np.int32(0x3F000000)


@jit
def float_to_half(value: Any) -> Any:
    """Return the bits (uint16) of the binary16 nearest to a float32, ties to even.

    Returns NaN if the value is too large.
    """
    bits = np.float32(value).view(np.int32)
    magnitude = np.int32(bits & MAGNITUDE)
    if magnitude >= _BEYOND:
        found = np.int32(0x7E00)
    elif magnitude < _SMALLEST_NORMAL:
        found = np.int32(np.float32(magnitude.view(np.float32) + np.float32(0.5)).view(np.int32) - _HALF_BITS)
    else:
        odd = np.int32(np.int32(magnitude >> np.int32(13)) & np.int32(1))
        found = np.int32(np.int32(np.int32(magnitude - _BIAS) + np.int32(np.int32(0xFFF) + odd)) >> np.int32(13))
    return np.uint16(found | np.int32(np.int32(bits >> np.int32(16)) & _SIGN))


def rounded_to(array: Any, value: Any) -> Any:
    """Return a float32 as an element of `array`.

    For uint16 this is the bits of its binary16, otherwise the float32 itself.
    """
    return held_by(array, np.float32(value)).view(array.dtype)


def held_by(array: Any, values: Any) -> Any:
    """Return float32 values with the precision of `array`: float16 if `array` is uint16, otherwise float32."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16 if array.dtype == np.uint16 else np.float32)
    return np.where(np.isfinite(rounded), rounded, rounded.dtype.type(np.nan))


@overload(rounded_to)
def _rounded_to(array: Any, value: Any) -> Any:
    def narrowed(array: Any, value: Any) -> Any:
        return float_to_half(value)

    def unchanged(array: Any, value: Any) -> Any:
        bits = np.float32(value).view(np.int32)
        is_finite = np.int32(bits & MAGNITUDE) < INFINITE
        return np.int32(bits if is_finite else NOT_A_NUMBER).view(np.float32)

    return narrowed if array.dtype == types.uint16 else unchanged


def from_bits(array: Any) -> Any:
    """Return the numbers in `array`.

    Elements of uint16 are the bits of float16, because Numba has no type for float16.
    """
    return array.view(np.float16) if array.dtype == np.uint16 else array


def numbers(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of a call. Arrays of bits (of float16) are replaced by arrays of numbers."""
    return tuple([from_bits(one) if isinstance(one, np.ndarray) else one for one in arguments])


def bits(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of a call. Arrays of float16 are replaced by arrays of their bits, the reverse of
    `numbers`.
    """
    return tuple([
        one.view(np.uint16) if isinstance(one, np.ndarray) and one.dtype == np.float16 else one for one in arguments
    ])  # fmt: skip
