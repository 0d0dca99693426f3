"""The common parts of all device samplers: their interface, a class that queries the figures of a device one by one,
and a class that converts counters to rates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

from cbtop.protocol.device_messages import DeviceSample, Unknown

# Maximum time in ns between the two readings of a rate. A rate over a longer time would not describe the present.
MAX_APART_NS = 10_000_000_000
MAX_RATES = 4_096
NO_ANSWER_YET = "it has not answered yet"
TWO_SAMPLES = "a mean needs two samples"


class Sampler(Protocol):
    """The interface of a device sampler, which asks a driver for the figures of devices.

    Only one thread uses a sampler. A call may take long or never return.
    """

    def __init__(self) -> None:
        """Create the sampler. It loads nothing heavy and queries nothing before the first sample."""

    @property
    def name(self) -> str:
        """The name of the sampler, such as `nvml`."""

    def sample(self, pids: Collection[int]) -> DeviceSample:
        """Return a sample: the state of the devices, of the processes that use the devices, and of the processes in
        `pids`.
        """

    def close(self) -> None:
        """Close everything that the sampler has opened. The next sample opens it again."""


class NotKnownError(Exception):
    """A figure of a device is not available. The message has the reason."""


class Rates:
    """Converts a device's growing counters to mean rates between two samples.

    The first sample has no rates. A rate is also missing if its counter decreased, because the counter wrapped or the
    driver restarted.
    """

    def __init__(self) -> None:
        self._read: dict[tuple[object, ...], deque[tuple[int, float]]] = {}

    def per_second(self, counter: tuple[object, ...], now_ns: int, value: float, over_ns: int = 0) -> float:
        """Return the mean growth of a counter per second since its previous sample. `value` is the counter at
        `now_ns`.

        With `over_ns`, the rate covers at least this time. If the stored samples cover less time, the rate covers all
        of them. Raises NotKnownError if no rate can be computed.
        """
        read = self._read.pop(counter, None) or deque()
        self._read[counter] = read
        while len(self._read) > MAX_RATES:
            # There are too many counters. Drop the counter that was read longest ago.
            del self._read[next(iter(self._read))]
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
    """The figures of one device. Each is queried separately, because a failed query must not affect other figures.

    `reason` converts an error to text. If the whole device does not answer, `reason` raises an error.
    """

    def __init__(self, reason: Callable[[Exception], str]) -> None:
        self.known: dict[str, Any] = {}
        self._reason = reason
        self._unknown: dict[str, str] = {}

    def ask(self, names: str, query: Callable[[], object]) -> None:
        """Store the result of `query` as the figure `names`.

        If `names` has several words, the result of `query` is a tuple with one value for each word. A figure is not
        available if `query` raises an error, or if its value is a NotKnownError.
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
        """Mark the figure `name` of the device as not available, with the reason."""
        self._unknown[name] = why

    @property
    def unknown(self) -> tuple[Unknown, ...]:
        """The figures of the device that are not available, with the reasons."""
        return tuple(Unknown(name, why) for name, why in self._unknown.items())
