"""Tests of the device clock on a fake device: a mark is a time stamp in the device's own work."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest

from cbtop.profiler.clocks import NoTimeError
from cbtop.profiler.device import stamp_clock
from cbtop.profiler.device.cuda_calls import DriverError
from cbtop.profiler.device.device import CudaDevice
from cbtop.profiler.device.stamp_clock import StampClock
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.ring import NO_NODE
from cbtop.protocol.vocabulary import SyncMode
from tests.profiler.device.fake_driver import READING_NS, FakeDriver
from tests.profiler.memory import Memory

STREAM = 7
pytestmark = pytest.mark.usefixtures("stamping")


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def clock(driver: FakeDriver) -> StampClock:
    return StampClock(lambda: STREAM, driver, driver.now_ns)


def test_a_mark_is_told_on_the_hosts_clock_within_the_error_said(driver: FakeDriver, clock: StampClock) -> None:
    begun_ns = driver.host_ns
    mark = clock.mark()
    clock.synchronize()
    error_ns = clock.error_ns
    assert error_ns is not None
    assert 0 < error_ns < 5_000
    assert begun_ns - error_ns <= clock.time_ns(mark) <= driver.host_ns + error_ns


def test_a_mark_does_not_wait(driver: FakeDriver, clock: StampClock) -> None:
    driver.stands_still = True
    before_ns = driver.host_ns
    marks = [clock.mark() for _ in range(10)]
    # Ten marks have read the host's clock ten times, so they did not wait.
    assert driver.host_ns == before_ns + 10 * READING_NS
    with pytest.raises(NoTimeError):
        clock.time_ns(marks[0])


def test_what_a_slot_held_stays_with_its_mark(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamp_clock, "SLOTS", 8)
    clock = StampClock(lambda: STREAM, driver, driver.now_ns)
    first = clock.mark()
    clock.synchronize()
    told_ns = clock.time_ns(first)
    for _ in range(20):
        clock.mark()
        clock.synchronize()
    assert abs(clock.time_ns(first) - told_ns) < 10


def test_marks_lack_a_time_and_overwrite_no_slot_if_the_device_is_behind(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stamp_clock, "SLOTS", 8)
    clock = StampClock(lambda: STREAM, driver, driver.now_ns)
    before = driver.launched
    marks = [clock.mark() for _ in range(12)]
    assert driver.launched - before == 8
    clock.synchronize()
    times = [clock.time_ns(mark) for mark in (*marks[4:8],)]
    assert times == sorted(times)
    for lost in marks[8:]:
        with pytest.raises(NoTimeError):
            clock.time_ns(lost)


def test_captured_work_contains_no_stamp_and_its_bricks_are_counted_as_lost(driver: FakeDriver) -> None:
    memory, capturing = Memory(), set[int]()
    clock = StampClock(lambda: None if STREAM in capturing else STREAM, driver, driver.now_ns)
    profiler = BrickProfiler(recorder=memory, device_clock=clock)
    with profiler.step("decode", tokens=1):
        with profiler.brick("before"):
            pass
        capturing.add(STREAM)
        launched = driver.launched
        with profiler.brick("captured"):
            pass
        assert driver.launched == launched
        capturing.clear()
        with profiler.brick("after"):
            pass
    profiler.finalize()
    names = {node: name for node, _, _, name in memory.nodes}
    recorded = [names.get(tag & 0xFFFFFF, NO_NODE) for tag, *_ in memory.records]
    assert recorded.count(NO_NODE) == 1
    assert {"before", "after", "decode"} <= set(recorded)


@pytest.mark.parametrize("mode", [SyncMode.DEFERRED, SyncMode.PER_LAYER, SyncMode.IMMEDIATE])
def test_bricks_of_a_step_lie_in_it_in_the_order_they_ran(driver: FakeDriver, mode: SyncMode) -> None:
    memory = Memory()
    clock = StampClock(lambda: STREAM, driver, driver.now_ns)
    profiler = BrickProfiler(recorder=memory, device_clock=clock, sync_mode=mode)
    with profiler.step("decode", tokens=1):
        for layer in range(3):
            with profiler.layer(layer), profiler.brick("a"), profiler.brick("b"):
                pass
    profiler.finalize()
    times = [(start, end) for _, start, end, _ in memory.records]
    step = times[-1]
    assert len(times) == 10
    assert all(step[0] <= start < end <= step[1] for start, end in times[:-1])


def test_a_lost_device_ends_the_wait_and_recording_not_the_host(driver: FakeDriver) -> None:
    memory = Memory()
    clock = StampClock(lambda: STREAM, driver, driver.now_ns)
    profiler = BrickProfiler(recorder=memory, device_clock=clock)
    driver.stands_still = True
    with profiler.step("decode", tokens=1), profiler.brick("a"):
        pass
    profiler.finalize()
    assert not profiler.recording
    clock.mark()
    with pytest.raises(DriverError):
        clock.synchronize()


def test_without_a_context_there_is_no_clock(driver: FakeDriver) -> None:
    driver.current = 0
    with pytest.raises(DriverError, match="context"):
        StampClock(lambda: STREAM, driver, driver.now_ns)


def test_a_forked_child_asks_nothing_of_the_device(driver: FakeDriver, clock: StampClock) -> None:
    mark = clock.mark()
    child = os.fork()
    if child == 0:
        launched = driver.launched
        clock.mark()
        clock.synchronize()
        try:
            clock.time_ns(mark)
        except NoTimeError:
            os._exit(0 if driver.launched == launched else 3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_mark_the_driver_refuses_raises_its_words_and_frees_its_slot(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stamp_clock, "SLOTS", 2)
    clock = StampClock(lambda: STREAM, driver, driver.now_ns)

    def refuses(*_: object) -> None:
        raise DriverError("cuLaunchKernelEx: CUDA_ERROR_LAUNCH_FAILED")

    with monkeypatch.context() as patch:
        patch.setattr(driver, "launch", refuses)
        for _ in range(3):
            with pytest.raises(DriverError, match="cuLaunchKernelEx: CUDA_ERROR_LAUNCH_FAILED"):
                clock.mark()
    mark = clock.mark()
    clock.synchronize()
    assert clock.time_ns(mark)


def test_stream_or_clock_errors_reach_the_caller_and_take_no_slot(driver: FakeDriver) -> None:
    class Interrupt(BaseException):
        pass

    def interrupted() -> int:
        raise Interrupt

    for stream, now_ns in ((interrupted, driver.now_ns), (lambda: STREAM, interrupted)):
        device, marks = CudaDevice(driver, driver.now_ns), [None] * 2
        stamps = stamp_clock.chosen(stamp_clock.MarkStamps)(device, device.map_words(2), stream, now_ns, marks, {})
        launched = driver.launched
        with pytest.raises(Interrupt):
            stamps.mark()
        assert marks == [None] * 2
        assert driver.launched == launched


def test_marks_know_their_stream_number_and_the_time_they_were_enqueued_at(driver: FakeDriver) -> None:
    streams = iter([3, (1 << 48) + 7])
    clock = StampClock(lambda: next(streams), driver, driver.now_ns)
    begun_ns = driver.host_ns
    marks = [clock.mark() for _ in range(2)]
    clock.synchronize()
    stamps = [clock.stamp(mark) for mark in marks]
    assert [(stamp.stream, stamp.number) for stamp in stamps if stamp] == [(3, 0), ((1 << 48) + 7, 1)]
    assert all(stamp and begun_ns < stamp.host_ns <= begun_ns + 200 and stamp.device_ns for stamp in stamps)


def test_marks_of_several_threads_have_slots_of_their_own(driver: FakeDriver, clock: StampClock) -> None:
    found: list[object] = []

    def run() -> None:
        for _ in range(50):
            found.append(clock.mark())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stamps = [clock.stamp(mark) for mark in found]
    assert sorted(stamp.number for stamp in stamps if stamp) == list(range(200))
    # Let the device finish all work. The last mark of one thread may be earlier than the last mark of another thread.
    driver.pass_time(1_000_000)
    clock.synchronize()
    assert all(clock.time_ns(mark) for mark in found)


def test_a_clock_that_nobody_holds_is_collected(driver: FakeDriver) -> None:
    class Owner:
        def __init__(self) -> None:
            self.clock = StampClock(self.stream, driver, driver.now_ns)
            self.clock.mark()

        def stream(self) -> int:
            return STREAM

    gone = weakref.ref(Owner())
    gc.collect()
    assert gone() is None
