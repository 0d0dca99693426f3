"""How far the clocks of a daemon's host are from ours, from exchanged clock readings.

Cristian's algorithm (Distributed Computing 3, 1989): the daemon read its clocks between our question and its answer,
so at half of the round trip, give or take that half. The best of several exchanges counts, and an old one for less.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from cbtop.protocol.messages import ClockReading

EXCHANGES = 8  # remembered
FIRST_EXCHANGES = 4  # one after the other; then one every REFRESH_S
REFRESH_S = 5.0  # and so long an answer is awaited
DRIFT = 100e-6  # twice what a quartz may be off: two hosts may drift apart by so much
_DRIFT_NS_PER_S = DRIFT * 1e9


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Their clocks less ours, each right to within `uncertainty_ns`."""

    monotonic_ns: int
    realtime_ns: int
    uncertainty_ns: int


SAME_CLOCK = ClockOffset(0, 0, 0)  # two processes of one boot read the same clocks


@dataclass(frozen=True, slots=True)
class _Exchange:
    at_ns: int  # on our monotonic clock
    offset: ClockOffset


class ClockExchange:
    """Says when to ask, and what the answers come to. Times are our monotonic clock's, in ns."""

    def __init__(self) -> None:
        self._found: deque[_Exchange] = deque(maxlen=EXCHANGES)
        self._count = 0
        self._number = 0
        self._asked_ns: int | None = None  # None: nothing is asked
        self._due_ns = 0

    @property
    def is_open(self) -> bool:
        """Whether an answer is awaited."""
        return self._asked_ns is not None

    def is_due(self, now_ns: int) -> bool:
        """Whether it is time to ask (again)."""
        return now_ns >= self._due_ns

    def ask(self, now_ns: int) -> int:
        """Begin an exchange; gives its number."""
        self._number += 1
        self._asked_ns = now_ns
        self._due_ns = now_ns + round(REFRESH_S * 1e9)
        return self._number

    def answer(self, reading: ClockReading, now_ns: int, realtime_ns: int) -> None:
        """Take the answer in, which came at `now_ns` (and on our other clock at `realtime_ns`)."""
        if reading.asked != self._number or self._asked_ns is None:
            return  # late: the question is given up
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
        """The offset known best by now; None before the first answer."""
        aged = [
            ClockOffset(
                found.offset.monotonic_ns,
                found.offset.realtime_ns,
                found.offset.uncertainty_ns + round((now_ns - found.at_ns) / 1e9 * _DRIFT_NS_PER_S),
            )
            for found in self._found
        ]
        return min(aged, key=lambda offset: offset.uncertainty_ns, default=None)
