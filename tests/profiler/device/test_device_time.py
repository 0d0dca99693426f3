"""Tests of the conversion from the device's clock to the host's clock: the error stays below the stated limit."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.device.device_time import ClockPair, DeviceTime

SECOND = 1_000_000_000
EPOCH = 1_763_800_000_000_000_001  # start time of the device's clock in ns; too large for an exact float64


def test_without_a_pair_there_is_no_time_and_with_one_the_drift_is_bounded() -> None:
    time = DeviceTime()
    assert time.last is None
    time.add(ClockPair(EPOCH, 5 * SECOND, 900))
    assert time.host_ns(EPOCH) == 5 * SECOND
    assert time.host_ns(EPOCH + 1) == 5 * SECOND + 1
    assert time.error_ns(EPOCH) < 1_000
    assert time.error_ns(EPOCH + SECOND) >= 100_000


@given(
    drift_ppb=st.integers(-90_000, 90_000),
    wander_ppb=st.integers(-100, 100),
    start=st.integers(0, 1 << 62),
    gaps=st.lists(st.integers(1_000, 3 * SECOND), min_size=0, max_size=20),
    worst=st.integers(0, 5_000),
    seed=st.integers(0, 1 << 30),
    asked=st.floats(-0.2, 1.4),
)
def test_a_mapped_time_is_off_by_no_more_than_its_error(
    drift_ppb: int, wander_ppb: int, start: int, gaps: list[int], worst: int, seed: int, asked: float
) -> None:
    chance = random.Random(seed)
    drift = [drift_ppb + chance.randint(-1, 1) * wander_ppb for _ in range(len(gaps) + 2)]

    def host_of(device: int) -> int:
        """Return the true host time of a device time.

        In each interval, the two clocks drift apart at another rate.
        """
        left, host = device - start, SECOND
        if left < 0:
            return host + left + left * drift[0] // SECOND
        for at, gap in enumerate(gaps):
            part = min(left, gap)
            host += part + part * drift[at] // SECOND
            left -= part
        return host + left + left * drift[-1] // SECOND

    time, device = DeviceTime(), start
    for gap in [0, *gaps]:
        device += gap
        error = chance.randint(0, worst)
        time.add(ClockPair(device, host_of(device) + chance.randint(-error, error), error))
    moment = start + round((device - start) * asked)
    assert abs(time.host_ns(moment) - host_of(moment)) <= time.error_ns(moment) + len(gaps) + 2


@given(st.integers(-90_000, 90_000), st.integers(1, 60))
def test_times_on_one_line_keep_their_order_and_their_durations(drift_ppb: int, seconds: int) -> None:
    time = DeviceTime()
    for at in range(seconds):
        time.add(ClockPair(EPOCH + at * SECOND, at * SECOND + at * drift_ppb, 900))
    begun = EPOCH + (seconds - 1) * SECOND + 5
    moments = [begun + 1_000 * at for at in range(50)]
    hosts = [time.host_ns(moment) for moment in moments]
    assert all(900 <= after - before <= 1_100 for before, after in pairwise(hosts))


def test_a_clock_that_was_set_begins_anew() -> None:
    time = DeviceTime()
    time.add(ClockPair(EPOCH, SECOND, 900))
    time.add(ClockPair(EPOCH + SECOND, 2 * SECOND + 5_000_000, 900))
    assert time.host_ns(EPOCH + SECOND) == 2 * SECOND + 5_000_000
    time.add(ClockPair(EPOCH, 3 * SECOND, 900))
    assert time.host_ns(EPOCH) == 3 * SECOND
