"""Tests of time stamps in pairs, before and after a piece of work, on a fake device."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

import pytest

from cbtop.profiler.device import pairs as module
from cbtop.profiler.device.cuda_calls import DriverError
from cbtop.profiler.device.device import CudaDevice
from cbtop.profiler.device.pairs import NOT_HERE, Pairs
from tests.integration.hosts import DEADLINE_S
from tests.profiler.device.fake_driver import KERNEL_NS, FakeDriver

STREAM = 7
pytestmark = pytest.mark.usefixtures("stamping")


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(way_ns=0)


def test_a_pair_measures_the_work_however_far_the_device_is_behind(driver: FakeDriver) -> None:
    pairs = Pairs(CudaDevice(driver, driver.now_ns))
    began = []
    for duration_ns in (50_000, 70_000, 90_000):
        pair = pairs.begin(STREAM)
        assert pair is not None
        driver.work(STREAM, duration_ns)
        pairs.end(pair, STREAM)
        began.append(pair)
    assert [pairs.read(pair) for pair in began] == [None] * 3
    driver.pass_time(1_000_000)
    times = [pairs.read(pair) for pair in began]
    assert [None if pair is None else pair[1] - pair[0] for pair in times] == pytest.approx(
        [KERNEL_NS + 50_000, KERNEL_NS + 70_000, KERNEL_NS + 90_000], abs=10
    )


def test_each_is_read_once_and_used_again(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAIRS", 2)
    device = CudaDevice(driver, driver.now_ns)
    pairs = Pairs(device)
    for _ in range(10):
        found = [pairs.begin(STREAM) for _ in range(3)]
        assert found[2] is None
        for pair in found[:2]:
            assert pair is not None
            pairs.end(pair, STREAM)
        assert pairs.waiting == 2
        driver.pass_time(100_000)
        for pair in found[:2]:
            assert pair is not None
            assert pairs.read(pair) is not None
            assert pairs.read(pair) is None
    pairs.close()
    device.close()
    assert driver.left == []


def test_nothing_is_stamped_during_a_capture_or_in_another_context(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = Pairs(CudaDevice(driver, driver.now_ns))
    launched, context = driver.launched, driver.current
    monkeypatch.setattr(driver, "is_capturing", lambda stream: stream == STREAM)
    assert pairs.begin(STREAM) == NOT_HERE
    assert pairs.begin(STREAM + 1) != NOT_HERE
    assert driver.launched == launched + 1
    monkeypatch.undo()
    for other in (0, context + 1):
        driver.current = other
        assert pairs.begin(STREAM) == NOT_HERE
    driver.current = context
    assert pairs.waiting == 1
    assert driver.launched == launched + 1


def test_the_device_is_through_where_it_has_reached_the_last_end(driver: FakeDriver) -> None:
    pairs = Pairs(CudaDevice(driver, driver.now_ns))
    assert pairs.is_through()
    first, second = pairs.begin(STREAM), pairs.begin(STREAM)
    assert first is not None
    assert second is not None
    assert pairs.is_through()
    pairs.end(first, STREAM)
    driver.work(STREAM, 10_000)
    pairs.end(second, STREAM)
    for passed_ns, is_through in ((5_000, False), (20_000, True)):
        driver.pass_time(passed_ns)
        assert pairs.read(first) is None or not is_through
        assert pairs.is_through() is is_through
    assert pairs.read(second) is not None
    assert pairs.is_through()


def test_a_driver_error_is_raised_unchanged_and_frees_its_pair(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise DriverError("cuLaunchKernelEx: CUDA_ERROR_ILLEGAL_ADDRESS")

    pairs = Pairs(CudaDevice(driver, driver.now_ns))
    for name in ("launch", "is_capturing", "context"):
        monkeypatch.setattr(driver, name, refuses)
        with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            pairs.begin(STREAM)
        assert pairs.waiting == 0
        monkeypatch.undo()
    pair = pairs.begin(STREAM)
    assert pair is not None
    monkeypatch.setattr(driver, "launch", refuses)
    with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        pairs.end(pair, STREAM)
    assert pairs.is_through()


def test_pairs_of_several_threads_are_each_ones_own(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAIRS", 8)
    pairs, taken = Pairs(CudaDevice(driver, driver.now_ns)), list[list[int]]()
    barrier = threading.Barrier(4)

    def take() -> None:
        barrier.wait()
        found: list[int] = []
        for _ in range(2):
            pair = pairs.begin(STREAM)
            assert pair is not None
            pairs.end(pair, STREAM)
            found.append(pair)
        taken.append(found)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(pair for found in taken for pair in found) == list(range(0, 16, 2))
    assert pairs.begin(STREAM) is None
    driver.pass_time(1_000_000)
    for found in taken:
        assert all(pairs.read(pair) for pair in found)
    assert pairs.waiting == 0


def test_a_launch_that_blocks_holds_up_no_other_thread(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch blocks if the driver's queue is full. In this test, the launch blocks until the process ends."""
    device, functions, libc = CudaDevice(driver, driver.now_ns), driver.functions(), ctypes.CDLL(None)
    waits = functions._replace(launch=ctypes.cast(libc.pause, ctypes.c_void_p).value or 0)
    monkeypatch.setattr(driver, "functions", lambda: waits)
    monkeypatch.setattr(driver, "launcher", lambda kernel, stream: lambda arguments: libc.pause())
    pairs, child = Pairs(device), os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(DEADLINE_S))
        threading.Thread(target=pairs.begin, args=(STREAM,), daemon=True).start()
        while not pairs.waiting:
            time.sleep(0.001)
        for _ in range(20):  # In these 20 ms, the other thread can reach its launch.
            time.sleep(0.001)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
