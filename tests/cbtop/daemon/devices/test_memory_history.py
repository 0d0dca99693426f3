"""Tests of the memory of processes over minutes, as a sampler keeps it."""

from __future__ import annotations

from cbtop.daemon.devices.memory_history import MAX_PROCESSES, MemoryHistory
from cbtop.protocol.device_messages import MAX_MEMORY_POINTS, MEMORY_POINT_NS

S = 1_000_000_000


def test_a_point_is_the_least_memory_of_its_twenty_seconds() -> None:
    history = MemoryHistory()
    found = ()
    for second in range(61):
        found = history.take("a", MEMORY_POINT_NS + second * S, 100.0 + second + 1_000 * (second % 20 == 0))
    assert found == (101, 121, 141)


def test_a_gap_begins_the_history_again_and_its_length_is_limited() -> None:
    history = MemoryHistory()
    for point in range(2 * MAX_MEMORY_POINTS):
        found = history.take("a", point * MEMORY_POINT_NS, point)
    assert found == tuple(range(MAX_MEMORY_POINTS - 1, 2 * MAX_MEMORY_POINTS - 1))
    assert history.take("a", 2_000 * MEMORY_POINT_NS, 7.0) == ()
    assert history.take("a", 2_001 * MEMORY_POINT_NS, 8.0) == (7,)


def test_processes_are_apart_and_the_ones_unheard_for_longest_are_forgotten() -> None:
    history = MemoryHistory()
    for process in range(MAX_PROCESSES + 1):
        history.take(process, 0, process)
    assert history.take(MAX_PROCESSES, MEMORY_POINT_NS, 0.0) == (MAX_PROCESSES,)
    assert history.take(0, MEMORY_POINT_NS, 0.0) == ()
