"""Strategies of hypothesis for the messages about sampled functions."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from cbtop.protocol import codec
from cbtop.protocol.sample_messages import CpuSamples, SampledFunction, SampledPlace

COUNTS = st.integers(0, 1 << 40)
NAMES = st.text(min_size=1, max_size=30).map(codec.sanitise)
FUNCTIONS = st.tuples(NAMES, NAMES, COUNTS, COUNTS, COUNTS, NAMES).map(
    lambda drawn: SampledFunction(*drawn[:3], drawn[3] + drawn[4], drawn[4], drawn[5])
)


def _place(name: str, counts: list[int], functions: list[SampledFunction]) -> SampledPlace:
    more, unread, own = counts
    samples = more + unread + own + sum(one.samples for one in functions)
    return SampledPlace("decode", "", name, samples, unread, own, tuple(functions))


PLACES = st.builds(_place, NAMES, st.lists(COUNTS, min_size=3, max_size=3), st.lists(FUNCTIONS, max_size=3))


def _samples(since_ns: int, length_ns: int, counts: list[int], places: list[SampledPlace]) -> CpuSamples:
    return CpuSamples(since_ns, since_ns + length_ns, *counts, tuple(places))


SAMPLED: dict[Any, st.SearchStrategy[Any]] = {
    SampledFunction: FUNCTIONS,
    SampledPlace: PLACES,
    CpuSamples: st.builds(
        _samples,
        COUNTS,
        COUNTS,
        st.lists(COUNTS, min_size=2, max_size=2),
        st.lists(PLACES, max_size=3, unique_by=lambda place: place.name),
    ),
}
