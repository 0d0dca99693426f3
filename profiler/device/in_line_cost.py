"""Measures the cost of a stamp (a kernel that stores the device's time) between kernels of a stream, and how soon an
idle device reaches a stamp.

All work runs on cbtop's own stream. First, FIRST stamps are enqueued on the idle stream. Then a kernel blocks the
stream until all other work is enqueued, so that this work runs without gaps. A round has two sections of KERNELS
empty kernels: one with stamps only at its ends, one with a stamp after each kernel. The difference of their times is
the cost of the stamps.
"""

from __future__ import annotations

import functools
from statistics import median

from cbtop.profiler.device.device import CudaDevice
from cbtop.profiler.device.driver import Arguments
from cbtop.profiler.device.kernels import ENDED, FIRST_PONG, PING

FIRST = 4
KERNELS = 16
ROUNDS = 3
HELD_BACK_NS = 5_000_000  # the kernel that blocks the stream ends at the latest after this time
MOST_NS = 10_000  # discard a higher cost, because other work has disturbed the measurement
_ROUND = 2 + 1 + KERNELS  # stamps per round


class InLineCost:
    """Measures the cost of a stamp once. The constructor launches everything, and no method waits for the device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        driver = device.driver
        count = FIRST + _ROUND * ROUNDS
        first = FIRST_PONG + 1
        self._words = device.map_words(first + count)
        self._first = first
        for at in range(first + count):
            self._words[at] = 0
        self._arguments = Arguments([(self._words.address + 8 * (first + at),) for at in range(count)])
        self._holding = Arguments([(self._words.address, 1, HELD_BACK_NS)])
        with driver.relaxed():
            self._stream = driver.new_stream()
            stamp, nothing = (
                driver.launcher(device.stamp, self._stream),
                driver.launcher(device.nothing, self._stream),
            )
            self._launched_ns: list[int] = []
            for at in range(FIRST):
                self._launched_ns.append(device.now_ns())
                stamp(self._arguments.at(at))
            driver.launcher(device.pong, self._stream)(self._holding.at(0))
            stamps = iter(range(FIRST, count))
            for _ in range(ROUNDS):
                for is_stamped in (False, True):
                    stamp(self._arguments.at(next(stamps)))
                    for _ in range(KERNELS):
                        nothing(0)
                        if is_stamped:
                            stamp(self._arguments.at(next(stamps)))
                    if not is_stamped:
                        stamp(self._arguments.at(next(stamps)))
        self._words[PING] = 1
        self._last = first + count - 1

    @functools.cached_property
    def _idle_lag_ns(self) -> int:
        known = self._device.time
        reached = [known.host_ns(self._words[self._first + at]) for at in range(FIRST)]
        return min([at - launched for at, launched in zip(reached, self._launched_ns, strict=True)])

    @property
    def idle_lag_ns(self) -> int | None:
        """The shortest time in ns from enqueueing a stamp until an idle device reached it. None if not known yet."""
        return self._idle_lag_ns if self._words[self._last] and self._device.time.last is not None else None

    @property
    def stamp_ns(self) -> int | None:
        """How many ns a stamp delays the device's work. None if not known yet."""
        return self._stamp_ns if self._words[self._last] else None

    @functools.cached_property
    def _stamp_ns(self) -> int:
        found = []
        for at in range(self._first + FIRST, self._last, _ROUND):
            plain_ns = self._words[at + 1] - self._words[at]
            stamped_ns = self._words[at + _ROUND - 1] - self._words[at + 2]
            found.append((stamped_ns - plain_ns) / (KERNELS - 1))
        cost_ns = round(median(found))
        return cost_ns if 0 < cost_ns < MOST_NS else 0

    def close(self) -> bool:
        """Release the stream and the memory if the measurement has finished. Returns whether it has."""
        if not (self._words[ENDED] and self._words[self._last]):
            return False
        driver = self._device.driver
        with driver.within(self._device.context), driver.relaxed():
            driver.end_stream(self._stream)
        self._device.spare_words(self._words)
        return True
