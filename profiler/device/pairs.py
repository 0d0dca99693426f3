"""Measures the device's time for work on a stream, by a stamp (a kernel that stores the device's time) before it and
one after it.

PairStamps makes the stamps in Python. If profiler/_stamps.c was built, it does the same in C.
"""

from __future__ import annotations

from collections import deque

from cbtop.profiler.device.compiled import chosen
from cbtop.profiler.device.cuda_calls import DriverError
from cbtop.profiler.device.device import CudaDevice
from cbtop.profiler.device.driver import Arguments, Launch, Words

PAIRS = 1024
MAX_STREAMS = 64
NOT_HERE = -1


class Pairs:
    """Times work on a stream: `pair = pairs.begin(stream)`, the work, `pairs.end(pair, stream)`. Later, `read`
    returns both times.

    `is_through()` returns whether the device has reached the last `end`, and so has finished all of this work.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._words = device.map_words(2 * PAIRS)
        self._words.clear(2 * PAIRS)
        self._stamps = chosen(PairStamps)(device, self._words, PAIRS)
        self.begin, self.end, self.read = self._stamps.begin, self._stamps.end, self._stamps.read
        self.is_through = self._stamps.is_through

    @property
    def waiting(self) -> int:
        """Number of pairs of stamps that were not read yet."""
        return self._stamps.waiting

    def close(self) -> None:
        """Release the memory of the stamps. All pairs must have been read."""
        self._device.spare_words(self._words)


class PairStamps:
    """Makes up to `pairs` pairs of stamps, which store times in `words`. All words must be 0 at first."""

    def __init__(self, device: CudaDevice, words: Words, pairs: int) -> None:
        self._driver, self._stamp, self._context = device.driver, device.stamp, device.context
        self._words = words
        self._pairs = pairs
        self._arguments = Arguments([(words.address + 8 * at,) for at in range(2 * pairs)])
        self._free = deque(range(0, 2 * pairs, 2))
        self._launches: dict[int, Launch] = {}
        self._last: int | None = None  # index in `words` of the last end stamp; None after its pair was read

    def begin(self, stream: int, /) -> int | None:
        """Enqueue the first stamp of a pair on `stream`, and return the number of the pair.

        Returns None if all pairs wait to be read. Returns NOT_HERE if the stream is being captured, or if a different
        context is current.
        """
        try:
            pair = self._free.popleft()
        except IndexError:
            return None
        try:
            if self._driver.context() != self._context or self._driver.is_capturing(stream):
                self._free.append(pair)
                return NOT_HERE
            self._launcher(stream)(self._arguments.at(pair))
        except DriverError:
            self._free.append(pair)
            raise
        return pair

    def end(self, pair: int, stream: int, /) -> None:
        """Enqueue the second stamp of `pair` on the same stream."""
        self._launcher(stream)(self._arguments.at(pair + 1))
        self._last = pair + 1

    def read(self, pair: int, /) -> tuple[int, int] | None:
        """Return the device's times of both stamps, and free the pair. Returns None if the device has not reached
        both.
        """
        begun_ns, ended_ns = self._words[pair], self._words[pair + 1]
        if not (begun_ns and ended_ns):
            return None
        self._words[pair] = self._words[pair + 1] = 0
        if self._last == pair + 1:
            self._last = None
        self._free.append(pair)
        return begun_ns, ended_ns

    def is_through(self) -> bool:
        """Return whether the device has reached the stamp of the last `end`."""
        last = self._last
        return last is None or bool(self._words[last])

    @property
    def waiting(self) -> int:
        """Number of pairs of stamps that were not read yet."""
        return self._pairs - len(self._free)

    def _launcher(self, stream: int) -> Launch:
        found = self._launches.get(stream)
        if found is None:
            # A host may make new streams again and again, so keep only a few launchers.
            if len(self._launches) >= MAX_STREAMS:
                self._launches.clear()
            found = self._launches[stream] = self._driver.launcher(self._stamp, stream)
        return found
