"""Two stamps around work on a stream: how long the device took for it, however many of them it is behind."""

from __future__ import annotations

from collections import deque

from cbtop.profiler.device.device import Device
from cbtop.profiler.device.driver import Arguments, Launch

PAIRS = 1024
MAX_STREAMS = 64


class Pairs:
    """`pair = pairs.begin(stream)`, the work, `pairs.end(pair, stream)`; then `read` gives both times."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._words = device.map_words(2 * PAIRS)
        self._words.clear(2 * PAIRS)
        self._arguments = Arguments([(self._words.address + 8 * at,) for at in range(2 * PAIRS)])
        self._free = deque(range(0, 2 * PAIRS, 2))
        self._launches: dict[int, Launch] = {}

    def begin(self, stream: int) -> int | None:
        """Stamp `stream`; None where all pairs wait to be read."""
        try:
            pair = self._free.popleft()
        except IndexError:
            return None
        self._launcher(stream)(self._arguments.at(pair))
        return pair

    def end(self, pair: int, stream: int) -> None:
        """Stamp `stream`, where `pair` began, again."""
        self._launcher(stream)(self._arguments.at(pair + 1))

    def read(self, pair: int) -> tuple[int, int] | None:
        """The device's time at both, once, which frees the pair; None while the device has not got there."""
        begun_ns, ended_ns = self._words[pair], self._words[pair + 1]
        if not (begun_ns and ended_ns):
            return None
        self._words[pair] = self._words[pair + 1] = 0
        self._free.append(pair)
        return begun_ns, ended_ns

    def _launcher(self, stream: int) -> Launch:
        found = self._launches.get(stream)
        if found is None:
            if len(self._launches) >= MAX_STREAMS:  # streams come and go
                self._launches.clear()
            found = self._launches[stream] = self._device.driver.launcher(self._device.stamp, stream)
        return found

    @property
    def waiting(self) -> int:
        """How many were not read."""
        return PAIRS - len(self._free)

    def close(self) -> None:
        """Give back what it took; only once all were read."""
        self._device.spare_words(self._words)
