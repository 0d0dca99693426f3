"""The interface of samplers, figures that are queried one by one, and rates from counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

from cbtop.protocol.device_messages import DeviceSample, Unknown

MAX_APART_NS = 10_000_000_000  # samples further apart do not describe the present
MAX_RATES = 4_096
NO_ANSWER_YET = "it has not answered yet"
TWO_SAMPLES = "a mean needs two samples"


class Sampler(Protocol):
    """Queries devices. It is owned by one thread; a call may take long or never return."""

    def __init__(self) -> None:
        """Query nothing and load nothing heavy before the first sample."""

    @property
    def name(self) -> str:
        """A short name."""

    def sample(self, pids: Collection[int]) -> DeviceSample:
        """Return the state of its devices and their processes, including those in `pids`."""

    def close(self) -> None:
        """Close everything opened; the next sample opens it again."""


class NotKnownError(Exception):
    """A figure is n/a; the text says why."""


class Rates:
    """Converts increasing counters to mean rates between two samples.

    There is no rate for the first sample, nor after a counter went back (it wrapped, or its driver restarted).
    """

    def __init__(self) -> None:
        self._read: dict[tuple[object, ...], deque[tuple[int, float]]] = {}

    def per_second(self, counter: tuple[object, ...], now_ns: int, value: float, over_ns: int = 0) -> float:
        """Return the mean rate of a counter since the previous sample; it is `value` now. Raises NotKnownError.

        With `over_ns`, it is the mean since the newest sample at least that old, or the oldest one.
        """
        read = self._read.pop(counter, None) or deque()
        self._read[counter] = read
        while len(self._read) > MAX_RATES:
            del self._read[next(iter(self._read))]  # the one read longest ago
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
    """The figures of one device, each queried separately, so that one failure makes only that figure n/a.

    `reason` converts an error to text, or raises if the whole device does not answer.
    """

    def __init__(self, reason: Callable[[Exception], str]) -> None:
        self.known: dict[str, Any] = {}
        self._reason = reason
        self._unknown: dict[str, str] = {}

    def ask(self, names: str, query: Callable[[], object]) -> None:
        """Store the result of `query` under `names`. Several names, separated by blanks, take a tuple.

        A NotKnownError, raised or in place of a value, says why a figure is n/a.
        """
        each = names.split()
        try:
            found = query()
        except Exception as error:  # noqa: BLE001 - whatever error a driver raises, query the other figures
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
        """Mark the figure `name` as n/a."""
        self._unknown[name] = why

    @property
    def unknown(self) -> tuple[Unknown, ...]:
        """The figures that are n/a."""
        return tuple(Unknown(name, why) for name, why in self._unknown.items())
