"""A device clock that marks points of the device's work by stamps: kernels of one thread that store the device's
time.

Rules
- Making a mark never waits. It takes the next of SLOTS words, and enqueues a stamp after the caller's work.
  MarkStamps does this in Python, and profiler/_stamps.c in C, if it was built.
- The words are used in turns. Before a word is used again, its value is copied into its old mark.
- A mark has no time if its work is captured instead of run, if a forked child makes it, or if the device is SLOTS
  marks behind.
- A clock reads one device: the device of the context that is current when the clock is made.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from cbtop.profiler.clocks import Mark, NoTimeError, Stamp
from cbtop.profiler.device.compiled import chosen
from cbtop.profiler.device.cuda_calls import DriverError
from cbtop.profiler.device.device import CudaDevice
from cbtop.profiler.device.driver import Arguments, CudaDriver, Driver, Launch, Words
from cbtop.profiler.device.in_line_cost import InLineCost
from cbtop.protocol import clock

# Number of memory words for marks. Enough for two steps with MAX_PENDING timings, each with two marks.
SLOTS = 1 << 15
MAX_STREAMS = 64
# A wait spins this long before it sleeps. If the device keeps up with the host, the wait ends in this time.
SPIN_NS = 200_000
NAP_S = 50e-6
LOOK_NAPS = 200  # a long wait checks after this many naps whether the device is lost


class StampMark:
    """A point in the device's work, marked by this clock. `device_ns` is 0 until it is known."""

    __slots__ = ("device_ns", "host_ns", "number", "slot", "stream")

    def __init__(self, slot: int | None, number: int = 0, stream: int = 0, host_ns: int = 0) -> None:
        self.slot = slot  # index of the mark's memory word; None if it has none
        self.device_ns = 0
        self.number = number
        self.stream = stream
        self.host_ns = host_ns  # the host's time when the mark was made, or 0 if no stamp could be enqueued


class MarkStamps:
    """Makes marks by stamps that store the device's time in `words`. `marks` has the mark of each word, `last` the
    last mark on each stream.
    """

    def __init__(
        self,
        device: CudaDevice,
        words: Words,
        stream: Callable[[], int | None],
        now_ns: Callable[[], int],
        marks: list[StampMark | None],
        last: dict[int, StampMark],
    ) -> None:
        self._device = device
        self._words = words
        self._stream = stream
        self._now_ns = now_ns
        self._marks = marks
        self._last = last
        self._arguments = Arguments([(words.address + 8 * slot,) for slot in range(len(marks))])
        self._numbers = itertools.count()
        self._launches: dict[int, Launch] = {}

    def mark(self) -> StampMark:
        """Enqueue a mark after the caller's work on its stream, and return it."""
        stream = None if self._device.is_of_parent else self._stream()
        if stream is None:
            return StampMark(None)
        host_ns = self._now_ns()
        number = next(self._numbers)
        slot = number % len(self._marks)
        before = self._marks[slot]
        if before is not None:
            before.device_ns = self._words[slot]
            before.slot = None
            if not before.device_ns:
                return StampMark(None, number, stream, host_ns)
        launch = self._launches.get(stream) or self._launcher(stream)
        self._words[slot] = 0
        mark = self._marks[slot] = StampMark(slot, number, stream, host_ns)
        try:
            launch(self._arguments.at(slot))
        except BaseException:
            self._marks[slot] = None  # the launch failed, so this mark never gets a time
            mark.slot, mark.host_ns = None, 0
            raise
        self._last[stream] = mark
        return mark

    def _launcher(self, stream: int) -> Launch:
        # A host may make new streams again and again, so keep only a few launchers.
        if len(self._launches) >= MAX_STREAMS:
            self._launches.clear()
        launch = self._launches[stream] = self._device.driver.launcher(self._device.stamp, stream)
        return launch


class StampClock:
    """The clock for `BrickProfiler(device_clock=StampClock(stream))`.

    `stream` returns the driver's handle of the caller's stream, or None while it is being captured. `index` is the
    host's number of the device. Raises DriverError without a driver or a current context.
    """

    def __init__(
        self,
        stream: Callable[[], int | None],
        driver: Driver | None = None,
        now_ns: Callable[[], int] = clock.perf_counter_ns,
        *,
        measures_cost: bool = False,
        index: int | None = None,
    ) -> None:
        self.index = index
        self._driver = CudaDriver() if driver is None else driver
        self._now_ns = now_ns
        self._device = CudaDevice(self._driver, now_ns)
        self._words = self._device.map_words(SLOTS)
        self._marks: list[StampMark | None] = [None] * SLOTS
        self._last: dict[int, StampMark] = {}  # stream -> its last mark since the last wait for the device
        stamps = chosen(MarkStamps)(self._device, self._words, stream, now_ns, self._marks, self._last)
        #: Returns a mark after the work that was enqueued on the caller's stream.
        self.mark: Callable[[], Mark] = stamps.mark
        self._cost = InLineCost(self._device) if measures_cost else None

    def synchronize(self) -> None:
        """Wait until the device has reached the last mark on each stream.

        Raises DriverError if the device is lost.
        """
        if self._device.is_of_parent:
            return
        while self._last:
            try:
                stream, mark = self._last.popitem()
            except KeyError:  # another thread has taken this mark and waits for it
                break
            try:
                self._wait_for(stream, mark)
            except BaseException as error:
                # A signal handler has interrupted the wait, so put the mark back for the next call.
                if not isinstance(error, DriverError):
                    self._last.setdefault(stream, mark)
                raise
        self._device.look_at_clocks()

    def time_ns(self, mark: Mark, /) -> int:
        """Return when `mark` was reached, on the host's monotonic clock.

        Raises NoTimeError for a mark without a time.
        """
        assert isinstance(mark, StampMark)
        device_ns, known = self._read(mark), self._device.time
        if not device_ns or known.last is None:
            raise NoTimeError("a mark that the device has not reached, or a clock that could not be read")
        return known.host_ns(device_ns)

    @property
    def error_ns(self) -> int | None:
        """The possible error of `time_ns` in ns, in both directions, for a mark that is made now. None if unknown.

        The difference of two marks does not have this error.
        """
        last = self._device.time.last
        return None if last is None else self._device.time.error_ns(self._now_ns() - last.offset_ns)

    @property
    def stamp_cost_ns(self) -> int | None:
        """How many ns a mark costs in the device's own work. None if unknown."""
        return None if self._cost is None else self._cost.stamp_ns

    @property
    def idle_lag_ns(self) -> int | None:
        """The time in ns from enqueueing a mark until an idle device reaches it. None if unknown."""
        return None if self._cost is None else self._cost.idle_lag_ns

    def is_reached(self, mark: Mark, /) -> bool:
        """Return whether the device has reached `mark` or will never reach it."""
        assert isinstance(mark, StampMark)
        return mark.slot is None or self._device.is_of_parent or bool(self._words[mark.slot])

    def wait(self, mark: Mark, limit_ns: int, /) -> None:
        """Wait at most `limit_ns` for the device to reach `mark`. Raises DriverError if the device is lost."""
        assert isinstance(mark, StampMark)
        if not self._device.is_of_parent:
            self._wait_for(mark.stream, mark, limit_ns)

    def stamp(self, mark: Mark, /) -> Stamp | None:
        """Return the stamp of `mark`. None if it was made during a capture, in a forked child, or by a failed
        launch.
        """
        assert isinstance(mark, StampMark)
        return Stamp(mark.host_ns, self._read(mark), mark.stream, mark.number) if mark.host_ns else None

    def host_ns(self, device_ns: int, /) -> tuple[int, int]:
        """Return the host's time when the device's clock showed `device_ns`, and the possible error."""
        known = self._device.time
        return known.host_ns(device_ns), known.error_ns(device_ns)

    def look(self) -> None:
        """Compare the clocks of device and host, unless this was done a short while ago."""
        self._device.look_at_clocks()

    def close(self) -> None:
        """Release the memory on the device. Keep everything if a stamp may still write to it."""
        marks = [mark for mark in self._marks if mark is not None]
        if self._device.is_of_parent or not all([self.is_reached(mark) for mark in marks]):
            return
        if self._cost is None or self._cost.close():
            self._device.spare_words(self._words)
            self._device.close()

    def _read(self, mark: StampMark) -> int:
        if self._device.is_of_parent:  # a forked child gets no times from the device
            return mark.device_ns
        slot = mark.slot
        found = 0 if slot is None else self._words[slot]
        # Another thread may have given the memory word to a newer mark. If so, it has stored this mark's time in
        # `device_ns`.
        return found if mark.slot is not None else mark.device_ns

    def _wait_for(self, stream: int, mark: StampMark, limit_ns: int | None = None) -> None:
        begun_ns, naps = self._now_ns(), 0
        while not self._read(mark) and mark.slot is not None:
            waited_ns = self._now_ns() - begun_ns
            if waited_ns < SPIN_NS:
                continue
            if limit_ns is not None and waited_ns > limit_ns:
                return
            time.sleep(NAP_S)
            naps += 1
            if naps % LOOK_NAPS == 0 and self._driver.is_done(stream) and not self._read(mark):
                raise DriverError("a stamp was lost: its stream has nothing left to do")
