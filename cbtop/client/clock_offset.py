"""Measure the difference between the clocks of a daemon's host and of this host.

We ask the daemon for its clocks, and it answers with a reading (Cristian, Distributed Computing 3, 1989). The clocks
were read at some time between our question and its answer. We assume the middle, so the error is at most half of the
time in between (the uncertainty). It grows with the answer's age, because clocks drift. The answer with the smallest
uncertainty is used.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from cbtop.protocol.messages import ClockReading

EXCHANGES = 8  # A viewer stores at most this many of a daemon's answers.
# This many questions follow each other without a pause at first. Later ones are REFRESH_S apart.
FIRST_EXCHANGES = 4
REFRESH_S = 5.0  # Seconds between two questions. A later answer is ignored.
# Drift between two clocks in seconds per second. Quartz clocks may be off by 50e-6, in opposite directions.
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
    """Decides when to ask a daemon for its clocks, and estimates the clock offset from its answers. `now_ns` is
    always the time on our monotonic clock.
    """

    def __init__(self) -> None:
        self._found: deque[_Exchange] = deque(maxlen=EXCHANGES)
        self._count = 0
        self._number = 0
        # when the unanswered question was sent, on our monotonic clock; None if all are answered
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
        """Store that a question is sent now. Returns its number, which the answer repeats."""
        self._number += 1
        self._asked_ns = now_ns
        self._due_ns = now_ns + round(REFRESH_S * 1e9)
        return self._number

    def answer(self, reading: ClockReading, now_ns: int, realtime_ns: int) -> None:
        """Store the daemon's answer. `now_ns` and `realtime_ns` are the times on our clocks when the answer
        arrived.
        """
        if reading.asked != self._number or self._asked_ns is None:
            return  # too late: this answers an earlier question
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
        """Return the clock offset with the smallest uncertainty at `now_ns`. None before the first answer."""
        aged = [
            ClockOffset(
                found.offset.monotonic_ns,
                found.offset.realtime_ns,
                found.offset.uncertainty_ns + round((now_ns - found.at_ns) / 1e9 * _DRIFT_NS_PER_S),
            )
            for found in self._found
        ]
        return min(aged, key=lambda offset: offset.uncertainty_ns, default=None)
