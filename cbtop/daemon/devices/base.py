"""What a sampler is, figures that are asked for one by one, and counters made into rates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

from cbtop.protocol.messages import DeviceSample, Unknown

MAX_APART_NS = 10_000_000_000  # samples further apart than this say nothing of now
MAX_RATES = 4_096
NO_ANSWER_YET = "it has not answered yet"
TWO_SAMPLES = "a mean needs two samples"


class Sampler(Protocol):
    """Asks devices how they are. One thread owns it; a call may take long, or never come back."""

    def __init__(self) -> None:
        """Nothing is asked, and nothing heavy loaded, before the first sample."""

    @property
    def name(self) -> str:
        """A word for it."""

    def sample(self, pids: Collection[int]) -> DeviceSample:
        """How its devices are, and the processes on them; those in `pids` are asked for by name."""

    def close(self) -> None:
        """Let go of whatever was opened; another sample opens it again."""


class NotKnownError(Exception):
    """A figure is n/a; the text says why."""


class Rates:
    """Counters that only grow, made into means per second between two samples.

    The first sample of a counter has no rate, nor has one where it went back (it wrapped, or its driver began anew).
    """

    def __init__(self) -> None:
        self._read: dict[tuple[object, ...], deque[tuple[int, float]]] = {}

    def per_second(self, counter: tuple[object, ...], now_ns: int, value: float, over_ns: int = 0) -> float:
        """The mean, since the sample before, of the counter that reads `value` at `now_ns`. Raises NotKnownError.

        With `over_ns` it is since the newest sample that is so long ago, or the oldest there is.
        """
        read = self._read.pop(counter, None) or deque()
        self._read[counter] = read
        while len(self._read) > MAX_RATES:
            del self._read[next(iter(self._read))]  # the one that was read the longest ago
        went_back = bool(read) and value < read[-1][1]
        if went_back or (read and not 0 < now_ns - read[-1][0] <= MAX_APART_NS):
            read.clear()
        read.append((now_ns, value))
        while len(read) > 2 and now_ns - read[1][0] >= over_ns:
            read.popleft()
        if len(read) < 2:
            raise NotKnownError("its counter went back" if went_back else TWO_SAMPLES)
        then_ns, before = read[0]
        return (value - before) * 1e9 / (now_ns - then_ns)


class Figures:
    """The figures of one device, each asked for by itself: one that fails is n/a, with the reason, and no other is.

    `reason` gives it, or raises where the whole device does not answer.
    """

    def __init__(self, reason: Callable[[Exception], str]) -> None:
        self.known: dict[str, Any] = {}
        self._reason = reason
        self._unknown: dict[str, str] = {}

    def ask(self, names: str, query: Callable[[], object]) -> None:
        """Take what `query` gives for `names`; for several, separated by blanks, it gives as many in a tuple.

        A NotKnownError, raised or given in place of a value, says why one is n/a.
        """
        each = names.split()
        try:
            found = query()
        except Exception as error:  # noqa: BLE001 - whatever a driver does with one query, the others are asked
            found = (error,) * len(each)
        for name, value in zip(each, found if isinstance(found, tuple) else (found,), strict=True):
            match value:
                case NotKnownError():
                    self.is_unknown(name, str(value))
                case Exception():
                    self.is_unknown(name, self._reason(value))
                case int():
                    self.known[name] = float(value)
                case _:
                    self.known[name] = value

    def is_unknown(self, name: str, why: str) -> None:
        """The figure `name` is n/a."""
        self._unknown[name] = why

    @property
    def unknown(self) -> tuple[Unknown, ...]:
        """Those that are n/a."""
        return tuple(Unknown(name, why) for name, why in self._unknown.items())
