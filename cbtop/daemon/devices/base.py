"""The interface of samplers, a class that queries figures one by one, and rates from counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

from cbtop.protocol.device_messages import DeviceSample, Unknown

MAX_APART_NS = 10_000_000_000  # a rate over a longer time does not describe the present
MAX_RATES = 4_096
NO_ANSWER_YET = "it has not answered yet"
TWO_SAMPLES = "a mean needs two samples"


class Sampler(Protocol):
    """Queries devices. It is used by one thread only. A call may take long or never return."""

    def __init__(self) -> None:
        """Query nothing and load nothing heavy before the first sample."""

    @property
    def name(self) -> str:
        """A short name."""

    def sample(self, pids: Collection[int]) -> DeviceSample:
        """Return the state of the devices, of the processes that use them, and of the processes in `pids`."""

    def close(self) -> None:
        """Close everything opened; the next sample opens it again."""


class NotKnownError(Exception):
    """A figure is not available. The text says why."""


class Rates:
    """Converts growing counters to mean rates between two samples.

    There is no rate for the first sample, or if the counter decreased because it wrapped or its driver restarted.
    """

    def __init__(self) -> None:
        self._read: dict[tuple[object, ...], deque[tuple[int, float]]] = {}

    def per_second(self, counter: tuple[object, ...], now_ns: int, value: float, over_ns: int = 0) -> float:
        """Return the mean rate of a counter since its previous sample. At `now_ns`, the counter is `value`.

        With `over_ns`, the rate covers at least `over_ns`, or the time since the oldest sample if no sample is that
        old. Raises NotKnownError if there is no rate.
        """
        read = self._read.pop(counter, None) or deque()
        self._read[counter] = read
        while len(self._read) > MAX_RATES:
            del self._read[next(iter(self._read))]  # drop the counter that was read longest ago
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
    """The figures of one device. Each is queried separately, so that a failure affects only its own figure.

    `reason` converts an error to text. It raises if the whole device does not answer.
    """

    def __init__(self, reason: Callable[[Exception], str]) -> None:
        self.known: dict[str, Any] = {}
        self._reason = reason
        self._unknown: dict[str, str] = {}

    def ask(self, names: str, query: Callable[[], object]) -> None:
        """Store the result of `query` under `names`. If `names` are several, separated by blanks, the result is a
        tuple.

        A figure is not available if `query` raises, or gives a NotKnownError in place of the figure.
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
        """Mark the figure `name` as not available, with the reason."""
        self._unknown[name] = why

    @property
    def unknown(self) -> tuple[Unknown, ...]:
        """The figures that are not available, with the reasons."""
        return tuple(Unknown(name, why) for name, why in self._unknown.items())
