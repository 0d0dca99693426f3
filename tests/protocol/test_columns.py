"""Tests of packed columns of numbers: the numbers are unchanged after transfer.

Each column is only as wide as needed.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.protocol.columns import pack_columns, unpack_columns
from cbtop.protocol.errors import DecodeError

i64 = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-200, 200)


@given(st.lists(st.tuples(i64, i64, i64), max_size=30))
def test_any_columns_come_back(rows: list[tuple[int, int, int]]) -> None:
    columns = list(np.array(rows, np.int64).reshape(-1, 3).T)
    found = unpack_columns(pack_columns(columns), 3, max_length=len(rows))
    assert [column.tolist() for column in found] == [column.tolist() for column in columns]


def test_a_column_is_as_wide_as_its_widest_value() -> None:
    small, wide = np.arange(100), np.arange(100) << 40
    assert len(pack_columns((small, small))) == 2 + 200
    assert len(pack_columns((small, wide))) == 2 + 900


@pytest.mark.parametrize("data", [b"\x01", b"\x03\x01\x00\x00\x00\x00", b"\x01\x02\x00\x00", b"\x01\x01" + bytes(8)])
def test_what_are_no_columns_or_too_long_ones_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        unpack_columns(data, 2, max_length=3)
