"""Tests of the text about bricks that are missing from the roofline: each is listed with the reason."""

from __future__ import annotations

from cbtop.text import roof_text


def test_what_is_not_on_the_roofline_is_told_by_why() -> None:
    names = ["Norm", "Attention (fused), launch-bound", "Head, launch-bound", "Copy"]
    assert roof_text.without_work(names) == (
        "no FLOP or no bytes declared: Norm, Copy; launch-bound, so without a rate: Attention (fused), Head"
    )
    assert roof_text.without_work(names[:1]) == "no FLOP or no bytes declared: Norm"
