"""The common parts of all device samplers: their interface, a class for a device's figures, and a class that makes
rates from counters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

from cbtop.protocol.device_messages import DeviceSample, Unknown

# Most ns between the two readings of a rate. A longer rate would not describe the present.
MAX_APART_NS = 10_000_000_000
MAX_RATES = 4_096
NO_ANSWER_YET = "it has not answered yet"
TWO_SAMPLES = "a mean needs two samples"


class Sampler(Protocol):
    """A device sampler asks a driver for the figures of devices.

    Only one thread uses it. A call may take long or never return.
    """

    def __init__(self) -> None:
        """Create the sampler. Loads nothing heavy, and queries nothing before the first sample."""

    @property
    def name(self) -> str:
        """The name of the sampler, such as `nvml`."""

    def sample(self, pids: Collection[int]) -> DeviceSample:
        """Return a sample of the devices, the processes that use them, and the processes in `pids`."""

    def close(self) -> None:
        """Close everything that the sampler has opened. The next sample opens it again."""


class NotKnownError(Exception):
    """A figure of a device is not available. The message has the reason."""


class Rates:
    """Makes rates between two samples from a device's growing counters.

    The first sample has none. Neither has a counter that decreased (it wrapped, or the driver restarted).
    """

    def __init__(self) -> None:
        self._read: dict[tuple[object, ...], deque[tuple[int, float]]] = {}

    def per_second(self, counter: tuple[object, ...], now_ns: int, value: float, over_ns: int = 0) -> float:
        """Return how much a counter grows per second since its previous sample. `value` is the counter at `now_ns`.

        `over_ns` makes the rate cover at least this time, or all stored samples. Raises NotKnownError without a rate.
        """
        read = self._read.pop(counter, None) or deque()
        self._read[counter] = read
        while len(self._read) > MAX_RATES:
            # Too many counters: drop the one that was read longest ago.
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
    """The figures of one device. Each device is queried by itself, so that one failure does not affect the others.

    `reason` makes a text from an error. If the whole device does not answer, it raises an error.
    """

    def __init__(self, reason: Callable[[Exception], str]) -> None:
        self.known: dict[str, Any] = {}
        self._reason = reason
        self._unknown: dict[str, str] = {}

    def ask(self, names: str, query: Callable[[], object]) -> None:
        """Store the result of `query` as the figure `names`. For several words, the result is a tuple with a value
        for each.

        A figure is not available if `query` raises an error, or if its value is a NotKnownError.
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
        """Mark the device's figure `name` as not available, with the reason."""
        self._unknown[name] = why

    @property
    def unknown(self) -> tuple[Unknown, ...]:
        """The device's figures that are not available, with the reasons."""
        return tuple(Unknown(name, why) for name, why in self._unknown.items())
