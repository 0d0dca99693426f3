"""Tests of the texts about the cost of recording."""

from __future__ import annotations

import pytest

from cbtop.protocol.messages import Sampling
from cbtop.text.recording_text import limit_of_overhead, overhead, short_overhead


@pytest.mark.parametrize(
    ("sampling", "texts"),
    [
        (
            Sampling(20, 0.62, 0.41, 0.8, 1.0),
            (
                "recording costs 0.62% of its steps' time (95 %: 0.41 to 0.80; at most 1 is allowed)",
                "≥0.62 % (0.41–0.80)",
                "up to 0.8%",
            ),
        ),
        (
            Sampling(20, 8.34, None, None, 3.0),
            (
                "recording costs 8.34% of its steps' time (too few recorded steps for an interval; "
                "at most 3 is allowed)",
                "≥8.34 %",
                "at least 8.3%",
            ),
        ),
        (
            Sampling(20, None, None, None, 3.0),
            (
                "what recording costs its steps is n/a: too few were compared yet (at most 3 is allowed)",
                "n/a",
                "n/a",
            ),
        ),
    ],
)
def test_the_cost_of_recording_has_an_interval_only_if_it_is_known(
    sampling: Sampling, texts: tuple[str, str, str]
) -> None:
    assert (overhead(sampling), short_overhead(sampling), limit_of_overhead(sampling)) == texts
