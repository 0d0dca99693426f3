"""Stamps around work, on a device that is played."""

from __future__ import annotations

import pytest

from cbtop.profiler.device import pairs as module
from cbtop.profiler.device.device import Device
from cbtop.profiler.device.pairs import Pairs
from tests.profiler.device.fake_driver import KERNEL_NS, FakeDriver

STREAM = 7


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(way_ns=0)


def test_the_time_between_them_is_that_of_the_work_however_far_the_device_is_behind(driver: FakeDriver) -> None:
    pairs = Pairs(Device(driver, driver.now_ns))
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
    device = Device(driver, driver.now_ns)
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
