"""Reads the clocks of device and host together. The host writes a number into a word, and the device answers with its
time.

Rules
- The kernel that answers has its own stream, so it does not wait for the host's work. The device does not start it
  while all multiprocessors are in use. So the host waits at most START_LIMIT_NS, and tries again later.
- The device's time is between the host's request and the moment when the host sees the answer. The quickest of ROUNDS
  answers is used. Its error is half of the round trip plus the resolution of the device's timer.
"""

from __future__ import annotations

from collections.abc import Callable

from cbtop.profiler.device.device_time import ClockPair
from cbtop.profiler.device.driver import Arguments, Driver
from cbtop.profiler.device.kernels import ENDED, FIRST_PONG, PING, RESOLUTION

ROUNDS = 12
START_LIMIT_NS = 300_000
ROUND_LIMIT_NS = 100_000
KERNEL_LIMIT_NS = 2_000_000  # the kernel ends after this time, even without a request


class PingPong:
    """Reads the host's clock and the device's clock at almost the same time for the current context's device."""

    def __init__(self, driver: Driver, kernel: int, now_ns: Callable[[], int]) -> None:
        self._driver = driver
        self._now_ns = now_ns
        self._words = driver.map_words(FIRST_PONG + ROUNDS)
        self._arguments = Arguments([(self._words.address, ROUNDS, KERNEL_LIMIT_NS)])
        self._stream = driver.new_stream()
        self._launch = driver.launcher(kernel, self._stream)
        self._words[ENDED] = 1

    def pair(self) -> ClockPair | None:
        """Return one reading of both clocks, or None if the device did not answer in time."""
        words, now_ns = self._words, self._now_ns
        if not words[ENDED]:  # the kernel of an earlier call was started late and is still running
            return None
        words.clear(len(words))
        self._launch(self._arguments.at(0))
        try:
            if self._heard(RESOLUTION, now_ns() + START_LIMIT_NS) is None:
                return None
            best: ClockPair | None = None
            for at in range(ROUNDS):
                asked_ns = now_ns()
                words[PING] = at + 1
                heard_ns = self._heard(FIRST_PONG + at, asked_ns + ROUND_LIMIT_NS)
                if heard_ns is None:
                    break
                wrong_ns = (heard_ns - asked_ns + 1) // 2 + words[RESOLUTION]
                if best is None or wrong_ns < best.error_ns:
                    best = ClockPair(words[FIRST_PONG + at], (asked_ns + heard_ns) // 2, wrong_ns)
            return best
        finally:
            words[PING] = ROUNDS  # with this request, the kernel ends

    def _heard(self, index: int, deadline_ns: int) -> int | None:
        """Wait until the word at `index` is not 0, and return the host's time in ns. None at `deadline_ns`."""
        words, now_ns = self._words, self._now_ns
        while not words[index]:
            if now_ns() > deadline_ns:
                return None
        return now_ns()

    @property
    def is_over(self) -> bool:
        """Whether the last kernel has ended. After this, nothing writes to the memory words."""
        return bool(self._words[ENDED])

    def close(self) -> None:
        """Release the memory and the stream. `is_over` must be True."""
        self._driver.end_stream(self._stream)
        self._driver.free_words(self._words)
