"""Tests of the format of numbers: the format is the same everywhere, and numbers fit into their columns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop import units
from cbtop.text import time_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (float("nan"), "n/a"),
        (float("inf"), "∞"),
        (0, "0.00"),
        (0.005, "0.01"),
        (0.0042, "0.0042"),
        (-0.00231, "-0.0023"),
        (0.00005, "0.0001"),
        (0.00004, "<.0001"),
        (-1e-9, ">-.0001"),
        (0.417, "0.42"),
        (8.449, "8.45"),
        (99.999, "100.0"),
        (123.44, "123.4"),
        (999.96, "1,000"),
        (12_345.6, "12,346"),
        (9_999_998.4, "9,999,998"),
        (12_345_678, "12.3M"),
        (-8.449, "-8.45"),
    ],
)
def test_a_number_has_about_four_digits(value: float | None, text: str) -> None:
    assert units.number(value) == text


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (None, "n/a"),
        (0, "0.00 µs"),
        (0.84, "840 ns"),
        (0.9999, "1.00 µs"),
        (8.45, "8.45 µs"),
        (999.96, "1.00 ms"),
        (8_450, "8.45 ms"),
        (1_234_000, "1.23 s"),
    ],
)
def test_a_duration_is_in_the_unit_a_reader_would_choose(us: float | None, text: str) -> None:
    assert units.duration(us) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "n/a"), (0, "0.0 %"), (0.01, "<0.1 %"), (42.13, "42.1 %"), (1234.5, "1,234.5 %")],
)
def test_a_small_share_is_not_nothing(value: float | None, text: str) -> None:
    assert units.percent(value) == text


def test_a_thing_has_the_article_that_its_name_asks_for() -> None:
    assert units.with_article("decode step") == "a decode step"
    assert units.with_article("encode step") == "an encode step"
    assert units.with_article("Eval step") == "an Eval step"


def test_an_exact_count_has_all_of_its_digits() -> None:
    assert [units.exact_count(value) for value in (None, 0, 999, 1_000, 123_456_789)] == [
        "n/a", "0", "999", "1,000", "123,456,789",
    ]  # fmt: skip


def test_counts_and_sizes_carry_separators_and_prefixes() -> None:
    assert units.count(12_345) == "12,345"
    assert units.count(12_345_678) == "12.3M"
    assert units.size_bytes(78_200_000) == "78.2 MB"
    assert units.si(999.6, "FLOP") == "1.00 kFLOP"
    assert units.scientific(1.23e-6) == "1.2e-06"
    assert units.milliseconds(8_450) == "8.45"
    assert time_text.seconds(0.25) == "0.25 s"


@given(st.floats(min_value=0, max_value=1e15))
def test_no_number_is_wider_than_nine_cells(value: float) -> None:
    assert len(units.number(value)) <= 9
    assert len(units.count(value)) <= 9
