"""The clock for deferred bricks counts from its restart, and refuses times of other clocks."""

from __future__ import annotations

import pytest

from cbtop.profiler.elapsed import ElapsedClock
from cbtop.profiler.graph_recorder import UsageError


def test_it_counts_from_its_restart_or_its_first_reading() -> None:
    times = iter((700, 750, 800, 860, 900, 930))
    elapsed = ElapsedClock(times.__next__, lambda error: None)
    assert [elapsed.now_ns(), elapsed.now_ns()] == [0, 50]
    elapsed.restart()
    assert elapsed.now_ns() == 60
    elapsed.forget()
    assert [elapsed.now_ns(), elapsed.now_ns()] == [0, 30]


def test_a_time_of_it_is_one_of_the_host() -> None:
    now_ns = 1000
    elapsed = ElapsedClock(lambda: now_ns, lambda error: None)
    elapsed.restart()
    now_ns = 1500
    assert [elapsed.on_host("a start", ns, lambda: False) for ns in (0, 500)] == [1000, 1500]
    for wrong in (-1, 501, 1200):
        with pytest.raises(UsageError, match=r"a start of -?\d+ ns"):
            elapsed.on_host("a start", wrong, lambda: False)
    assert elapsed.on_host("a start", 501, lambda: True) == 1501


def test_a_clock_that_fails_stands_still() -> None:
    failed: list[Exception] = []

    def gone() -> int:
        raise OSError("the clock is gone")

    elapsed = ElapsedClock(gone, failed.append)
    assert (elapsed.now_ns(), elapsed.now_ns()) == (0, 0)
    assert [type(error) for error in failed] == [OSError, OSError]
