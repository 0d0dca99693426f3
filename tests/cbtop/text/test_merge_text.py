"""Tests of the short names of merged processes and ranks."""

from __future__ import annotations

import pytest

from cbtop.text import merge_text
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.merged import MergedView


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
    assert merge_text.merged(MergedView(MergeMode.SUM, members, (), left_out=0)) == text
    assert merge_text.merged(MergedView(MergeMode.SUM, members, (), left_out=2)) == f"{text} (2 left out)"
