"""How far the clocks of a daemon's host are from ours.

We ask the daemon for its clocks, and it answers with a reading (Cristian, Distributed Computing 3, 1989). It read
them some time between our question and its answer. We take the middle of that time, and are wrong by half of it at
most: that is the uncertainty. The answer with the smallest uncertainty counts. The uncertainty of an answer grows as
it gets older, because two clocks drift apart.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from cbtop.protocol.messages import ClockReading

EXCHANGES = 8  # that are remembered
FIRST_EXCHANGES = 4  # that follow each other at once; after them there is one every REFRESH_S
REFRESH_S = 5.0  # a question without an answer is given up after that time, too
DRIFT = 100e-6  # seconds a second: a quartz may be off by 50e-6, and two of them in opposite directions
_DRIFT_NS_PER_S = DRIFT * 1e9


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """What their two clocks show, less what ours show. Both are right to within `uncertainty_ns`."""

    monotonic_ns: int
    realtime_ns: int
    uncertainty_ns: int


SAME_CLOCK = ClockOffset(0, 0, 0)  # two processes of one boot read the same clocks


@dataclass(frozen=True, slots=True)
class _Exchange:
    at_ns: int  # on our monotonic clock
    offset: ClockOffset


class ClockExchange:
    """Says when to ask, and estimates the offset from the answers. `now_ns` is always our monotonic clock."""

    def __init__(self) -> None:
        self._found: deque[_Exchange] = deque(maxlen=EXCHANGES)
        self._count = 0
        self._number = 0
        self._asked_ns: int | None = None  # when the open question was asked; None when none is open
        self._due_ns = 0

    @property
    def is_open(self) -> bool:
        """Whether a question has no answer yet."""
        return self._asked_ns is not None

    def is_due(self, now_ns: int) -> bool:
        """Whether it is time to ask the next question."""
        return now_ns >= self._due_ns

    def ask(self, now_ns: int) -> int:
        """Note that a question is asked now; gives its number, which the answer will carry."""
        self._number += 1
        self._asked_ns = now_ns
        self._due_ns = now_ns + round(REFRESH_S * 1e9)
        return self._number

    def answer(self, reading: ClockReading, now_ns: int, realtime_ns: int) -> None:
        """Take in an answer that came when our clocks showed `now_ns` and `realtime_ns`."""
        if reading.asked != self._number or self._asked_ns is None:
            return  # the answer to a question that was given up
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
        """The offset with the smallest uncertainty at `now_ns`; None before the first answer."""
        aged = [
            ClockOffset(
                found.offset.monotonic_ns,
                found.offset.realtime_ns,
                found.offset.uncertainty_ns + round((now_ns - found.at_ns) / 1e9 * _DRIFT_NS_PER_S),
            )
            for found in self._found
        ]
        return min(aged, key=lambda offset: offset.uncertainty_ns, default=None)
