"""Tests of the conversion from float32 to the bits of binary16 and back.

The conversion uses no processor instruction for binary16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.compute.jit.compile import half_to_float, jit
from cbtop.compute.jit.halves import float_to_half, from_bits, rounded_to

ALL = np.arange(1 << 16, dtype=np.uint16)


def rounded(values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> list[int]:
    return [int(float_to_half(value)) for value in values]


def by_numpy(values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> list[int]:
    with np.errstate(over="ignore"):
        return [int(bits) for bits in values.astype(np.float16).view(np.uint16)]


def test_every_binary16_is_itself() -> None:
    finite = ALL[np.isfinite(ALL.view(np.float16))]
    values = finite.view(np.float16).astype(np.float32)
    assert rounded(values) == finite.tolist()
    assert [float(half_to_float(np.int32(bits))) for bits in finite[::97]] == values[::97].tolist()


def test_between_two_the_nearest_is_taken_and_in_the_middle_the_even_one() -> None:
    low = ALL[:0x7C00].view(np.float16).astype(np.float64)  # positive, finite numbers
    high = np.append(low[1:], 65536.0)
    middle = ((low + high) / 2).astype(np.float32)
    for values in (middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9)), -middle):
        assert rounded(values[:-1]) == by_numpy(values[:-1])
    largest = middle[-1]
    assert rounded(np.array([np.nextafter(largest, np.float32(0)), largest])) == [0x7BFF, 0x7E00]


@given(st.floats(width=32))
def test_any_float32_is_rounded_as_by_numpy_except_that_infinity_is_nan(value: float) -> None:
    one = np.array([value], np.float32)
    (bits,) = rounded(one)
    found = np.array([bits], np.uint16).view(np.float16)
    with np.errstate(over="ignore"):
        expected = one.astype(np.float16)
    expected[np.isinf(expected)] = np.nan
    np.testing.assert_array_equal(found, expected)  # all NaNs count as equal


@jit
def _compiled(array: Any, value: Any) -> Any:
    return rounded_to(array, value)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize("value", [0.1, -3.14159, 6e-8, 65503.9])
def test_compiled_or_not_a_number_becomes_the_same_element(dtype: type[np.generic], value: float) -> None:
    array = np.zeros(1, dtype)
    assert _compiled(array, np.float32(value)) == rounded_to(array, np.float32(value))


@pytest.mark.parametrize(("dtype", "value"), [(np.uint16, 65520), (np.uint16, -np.inf), (np.float32, np.inf)])
def test_compiled_or_not_what_an_array_cannot_hold_is_nan_there(dtype: type[np.generic], value: float) -> None:
    array = np.zeros(1, dtype)
    for found in (_compiled(array, np.float32(value)), rounded_to(array, np.float32(value))):
        assert np.isnan(from_bits(np.array([found], dtype)))
