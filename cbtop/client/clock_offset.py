"""Measure the offset between the clocks of a daemon's host and the clocks of this host.

We ask the daemon for its clocks, and it answers with a reading (Cristian, Distributed Computing 3, 1989). The daemon
read its clocks at some time between our question and its answer. We assume the middle of this interval. So the error
is at most half of the interval, and this limit is called the uncertainty of the answer. The uncertainty grows with
the age of the answer, because two clocks drift apart. We use the answer with the smallest uncertainty.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from cbtop.protocol.messages import ClockReading

EXCHANGES = 8  # A viewer stores at most this many of a daemon's answers about its clocks.
# A viewer first asks for the clocks this many times without a pause. Later questions are REFRESH_S apart.
FIRST_EXCHANGES = 4
REFRESH_S = 5.0  # Seconds between two questions for the clocks. An answer that takes longer is ignored.
# Drift of two clocks against each other, in seconds per second. A quartz clock may be off by 50e-6, and another clock
# may be off by as much in the opposite direction.
DRIFT = 100e-6
_DRIFT_NS_PER_S = DRIFT * 1e9


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The monotonic and the real-time clock of the daemon's host, each minus the same clock of this host.

    The error is at most `uncertainty_ns`.
    """

    monotonic_ns: int
    realtime_ns: int
    uncertainty_ns: int


SAME_CLOCK = ClockOffset(0, 0, 0)  # Two processes on one host read the same clocks, so their offset is zero.


@dataclass(frozen=True, slots=True)
class _Exchange:
    at_ns: int  # our monotonic clock in ns when the daemon's answer arrived
    offset: ClockOffset


class ClockExchange:
    """Decides when a daemon is requested to report its clocks, and estimates the clock offset from the daemon's
    answers. In all methods, `now_ns` is the time on our monotonic clock.
    """

    def __init__(self) -> None:
        self._found: deque[_Exchange] = deque(maxlen=EXCHANGES)
        self._count = 0
        self._number = 0
        # time on our monotonic clock when the unanswered question was sent; None if no question is unanswered
        self._asked_ns: int | None = None
        self._due_ns = 0

    @property
    def is_open(self) -> bool:
        """Whether a question for the daemon's clocks is still unanswered."""
        return self._asked_ns is not None

    def is_due(self, now_ns: int) -> bool:
        """Whether it is time to ask for the daemon's clocks again."""
        return now_ns >= self._due_ns

    def ask(self, now_ns: int) -> int:
        """Record that a question for the clocks is sent now.

        Returns the question's number. The daemon repeats this number in its answer.
        """
        self._number += 1
        self._asked_ns = now_ns
        self._due_ns = now_ns + round(REFRESH_S * 1e9)
        return self._number

    def answer(self, reading: ClockReading, now_ns: int, realtime_ns: int) -> None:
        """Store the daemon's answer. `now_ns` and `realtime_ns` are the times on our clocks when the answer
        arrived.
        """
        if reading.asked != self._number or self._asked_ns is None:
            return  # This answer belongs to an earlier question and came too late.
        half_ns = (now_ns - self._asked_ns) // 2 + 1
        offset = ClockOffset(
            monotonic_ns=reading.monotonic_ns - (now_ns - half_ns),
            realtime_ns=reading.realtime_ns - (realtime_ns - half_ns),
            uncertainty_ns=half_ns,
        )
        self._asked_ns = None
        self._found.append(_Exchange(now_ns, offset))
        self._count += 1
        if self._count < FIRST_EXCHANGES:
            self._due_ns = now_ns

    def estimate(self, now_ns: int) -> ClockOffset | None:
        """Return the clock offset that has the smallest uncertainty at the time `now_ns`. Returns None before the
        first answer.
        """
        aged = [
            ClockOffset(
                found.offset.monotonic_ns,
                found.offset.realtime_ns,
                found.offset.uncertainty_ns + round((now_ns - found.at_ns) / 1e9 * _DRIFT_NS_PER_S),
            )
            for found in self._found
        ]
        return min(aged, key=lambda offset: offset.uncertainty_ns, default=None)
