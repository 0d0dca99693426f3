"""Numbers are written the same way everywhere, and never wider than the columns made for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.text import formatting
from cbtop.viewmodels.model import MergedView, MergeMode


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
    assert formatting.number(value) == text


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
    assert formatting.duration(us) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "n/a"), (0, "0.0 %"), (0.01, "<0.1 %"), (42.13, "42.1 %"), (1234.5, "1,234.5 %")],
)
def test_a_small_share_is_not_nothing(value: float | None, text: str) -> None:
    assert formatting.percent(value) == text


def test_a_thing_has_the_article_that_its_name_asks_for() -> None:
    assert formatting.with_article("decode step") == "a decode step"
    assert formatting.with_article("encode step") == "an encode step"
    assert formatting.with_article("Eval step") == "an Eval step"


def test_counts_and_sizes_carry_separators_and_prefixes() -> None:
    assert formatting.count(12_345) == "12,345"
    assert formatting.count(12_345_678) == "12.3M"
    assert formatting.size_bytes(78_200_000) == "78.2 MB"
    assert formatting.si(999.6, "FLOP") == "1.00 kFLOP"
    assert formatting.scientific(1.23e-6) == "1.2e-06"
    assert formatting.milliseconds(8_450) == "8.45"
    assert formatting.seconds(0.25) == "0.25 s"


@given(st.floats(min_value=0, max_value=1e15))
def test_no_number_is_wider_than_nine_cells(value: float) -> None:
    assert len(formatting.number(value)) <= 9
    assert len(formatting.count(value)) <= 9


@pytest.mark.parametrize(
    ("members", "text"),
    [
        (("rank 0",), "sum of 1: rank 0"),
        (("rank 0", "rank 1", "rank 2", "rank 5"), "sum of 4: rank 0–2, rank 5"),
        (("pid 8", "pid 9", "box:1:2:3"), "sum of 3: pid 8, pid 9, box:1:2:3"),
        (tuple(f"rank {at}" for at in range(0, 14, 2)), "sum of 7: rank 0, rank 2, rank 4, …, rank 12"),
    ],
)
def test_what_was_merged_is_named_in_few_words(members: tuple[str, ...], text: str) -> None:
    assert formatting.merged(MergedView(MergeMode.SUM, members, (), left_out=0)) == text
    assert formatting.merged(MergedView(MergeMode.SUM, members, (), left_out=2)) == f"{text} (2 left out)"


def test_what_is_not_on_the_roofline_is_told_by_why() -> None:
    names = ["Norm", "Attention (fused), launch-bound", "Head, launch-bound", "Copy"]
    assert formatting.without_work(names) == (
        "no FLOP or no bytes declared: Norm, Copy; launch-bound, so without a rate: Attention (fused), Head"
    )
    assert formatting.without_work(names[:1]) == "no FLOP or no bytes declared: Norm"
