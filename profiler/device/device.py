"""One CUDA device in one context: cbtop's kernels, the memory words for stamps, and the comparison of its clock with
the host's.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from cbtop.profiler.device.cuda_calls import DriverError
from cbtop.profiler.device.device_time import DeviceTime
from cbtop.profiler.device.driver import Driver, Words
from cbtop.profiler.device.kernels import NOTHING, PONG, PTX, STAMP
from cbtop.profiler.device.ping_pong import PingPong
from cbtop.protocol import clock

PAIR_EVERY_NS = 1_000_000_000
FIRST_TRIES = 3
LEAST_WORDS = 512  # fills a page

_devices: weakref.WeakSet[CudaDevice] = weakref.WeakSet()


class CudaDevice:
    """The device of the current context. Raises DriverError without a context, or if the driver refuses a call."""

    def __init__(self, driver: Driver, now_ns: Callable[[], int] = clock.perf_counter_ns) -> None:
        self.driver = driver
        self.now_ns = now_ns
        self.is_of_parent = False  # True in a forked child, which cannot use its parent's device
        self.context = driver.context()
        if not self.context:
            raise DriverError("no CUDA context is current")
        with driver.relaxed():
            self._module, (self.stamp, self.nothing, self.pong) = driver.load(PTX, (STAMP, NOTHING, PONG))
            self._ping_pong = PingPong(driver, self.pong, now_ns)
        self._spare: list[Words] = []
        self.time = DeviceTime()
        self._looking = threading.Lock()
        for _ in range(FIRST_TRIES):
            self._next_pair_ns = 0
            self.look_at_clocks()
            # The first comparison of the clocks is enough. A second one so soon would not show their drift.
            if self.time.last is not None:
                break
        _devices.add(self)

    def look_at_clocks(self) -> None:
        """Read the clocks of device and host together, at most once in PAIR_EVERY_NS. Reading takes about 40 us."""
        now_ns = self.now_ns()
        if now_ns < self._next_pair_ns or self.is_of_parent:
            return
        if not self._looking.acquire(blocking=False):
            return
        try:
            self._next_pair_ns = now_ns + PAIR_EVERY_NS
            with self.driver.within(self.context), self.driver.relaxed():
                pair = self._ping_pong.pair()
            if pair is not None:
                self.time.add(pair)
        finally:
            self._looking.release()

    def map_words(self, count: int) -> Words:
        """Return at least `count` memory words for stamps. Uses spare words first."""
        fitting = [words for words in self._spare if len(words) >= count]
        if fitting:
            words = min(fitting, key=len)
            self._spare.remove(words)
            return words
        with self.driver.within(self.context), self.driver.relaxed():
            return self.driver.map_words(max(count, LEAST_WORDS))

    def spare_words(self, words: Words) -> None:
        """Keep `words` for later, because freeing them would make the host wait. No stamp may still write to them."""
        self._spare.append(words)

    def close(self) -> None:
        """Release everything that cbtop has on the device. None of its kernels may still run."""
        if not self.is_of_parent and self._ping_pong.is_over:
            with self.driver.within(self.context), self.driver.relaxed():
                self._ping_pong.close()
                while self._spare:
                    self.driver.free_words(self._spare.pop())
                self.driver.unload(self._module)


def _after_fork() -> None:
    for device in list(_devices):
        device.is_of_parent = True


os.register_at_fork(after_in_child=_after_fork)
