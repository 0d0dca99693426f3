"""Messages of an engine with impossible numbers are refused."""

from __future__ import annotations

import pytest

from cbtop.protocol.serving_messages import EngineQueue, EngineSchedules

QUEUE = EngineQueue("KV cache", 2, 4, 6, 98.0)


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        (("KV cache", 0, 0, 0), "0 schedules"),
        (("KV cache", 3, 0, 2), "3 schedules"),  # at least one request waits in each
        (("KV cache", 1, -1, 1), "-1 requests ran"),
        (("KV cache", 1, 1, 1 << 90), "requests waited"),
        (("KV cache", 1, 1, 1, 101.0), "101.0 % of the cache"),
    ],
)
def test_a_queue_with_impossible_numbers_is_refused(numbers: tuple[str, int, int, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        EngineQueue(*numbers)


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ((0, 0, 0), "0 schedules"),
        ((257, 0, 0), "257 schedules"),
        ((1, -1, 0), "expected up to 256"),
        ((1, 1, 0, None, (QUEUE,)), "in 1 schedules"),
        ((9, 1, 0, None, (QUEUE, QUEUE)), "each reason once"),
    ],
)
def test_schedules_with_impossible_numbers_are_refused(numbers: tuple[int, int, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        EngineSchedules(*numbers)
