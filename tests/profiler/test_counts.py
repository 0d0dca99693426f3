"""Numbers of a host are recorded as integers, and shown in a short form."""

from __future__ import annotations

import numpy as np
import pytest

from cbtop.profiler.counts import amount_of_call, shown, whole
from cbtop.protocol.ring import UNKNOWN_AMOUNT


def test_amounts_are_rounded_and_unknown_ones_are_marked() -> None:
    assert (amount_of_call(2.6), amount_of_call(0.0), amount_of_call(None)) == (3, 0, UNKNOWN_AMOUNT)
    for wrong in (-1.0, float(1 << 63), float("nan")):
        with pytest.raises(ValueError, match="of one call"):
            amount_of_call(wrong)


def test_whole_numbers_of_any_kind_become_integers() -> None:
    assert type(whole(np.uint8(200))) is int
    assert whole(2.5) == 2.5


def test_what_is_no_number_is_shown_by_its_type_alone() -> None:
    assert shown(2.5) == "2.5 (float)"
    assert shown([1]) == "a list"
    assert len(shown("x" * 500)) == 120
