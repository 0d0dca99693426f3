"""Tests of the growth of a process's memory: its rate, its interval, and when it counts as steady."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from cbtop.client.store import Store
from cbtop.protocol.device_messages import MAX_MEMORY_POINTS, MEMORY_POINT_NS, DeviceProcess, packed_memory
from cbtop.viewmodels.memory_growth import LEAST_POINTS, growth_in, memory_growths
from tests.cbtop.made_machines import CPU, GPU, NVML, PID, START, source, store_of

MIB = 2**20


def noisy(rate_mib: float, noise_mib: float, seed: int, points: int = 30) -> list[int]:
    chance = random.Random(seed)
    return [round(MIB * (1_000 + rate_mib * at + chance.gauss(0, noise_mib))) for at in range(points)]


def test_the_interval_of_the_rate_contains_the_line_of_numpy() -> None:
    inside = 0
    for seed in range(40):
        history = noisy(10, 8, seed)
        found = growth_in(history)
        assert found is not None
        slope = np.polyfit(20.0 * np.arange(len(history)), history, 1)[0]
        assert found.rate == pytest.approx(slope, rel=0.15)
        inside += found.low_rate <= 10 * MIB / 20 <= found.high_rate
    assert inside >= 36


def test_memory_that_moves_without_growing_is_no_growth() -> None:
    found = [growth_in(noisy(0, 30, seed)) for seed in range(2_000)]
    assert sum(one is not None for one in found) <= 4


def test_growth_needs_minutes_and_an_amount_that_matters() -> None:
    history = noisy(10, 1, 0)
    assert growth_in(history[: LEAST_POINTS - 1]) is None
    assert growth_in(history[:LEAST_POINTS]) is not None
    assert growth_in([]) is None
    assert growth_in([round(MIB * (1_000 + 0.5 * at)) for at in range(30)]) is None
    assert growth_in([round(MIB * (100_000 + 10 * at)) for at in range(30)]) is None
    assert growth_in([round(MIB * (1_000 - 10 * at)) for at in range(30)]) is None


def made(history: list[int], ended_ns: int, *, is_on_gpu: bool = False) -> Store:
    """Return the store of a viewer. A process was sampled at `ended_ns`."""
    process = DeviceProcess(PID, START, "load.py", memory_history=packed_memory(history))
    device, sample = (GPU, NVML) if is_on_gpu else (CPU.devices[0], CPU)
    device = replace(device, processes=(process,), memory_used_bytes=10.0 * 2**30, memory_total_bytes=40.0 * 2**30)
    return store_of(source(), replace(sample, devices=(device,), monotonic_ns=ended_ns))


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_only_memory_since_the_warm_up_counts(is_on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    history = [*noisy(100, 1, 0, 10), *[round(MIB * (2_000 + 10 * at)) for at in range(20)]]
    ended_ns = 100 * MEMORY_POINT_NS
    store = made(history, ended_ns + 5_000_000_000, is_on_gpu=is_on_gpu)
    (record,) = store.sources.values()
    for since_ns, points in ((ended_ns - 20 * MEMORY_POINT_NS, 20), (ended_ns - 15 * MEMORY_POINT_NS, 15)):
        monkeypatch.setattr("cbtop.viewmodels.memory_growth.steady_since_ns", lambda _, at=since_ns: at)
        (found,) = memory_growths(store, record)
        assert found.gpu == ("GPU 0" if is_on_gpu else "")
        assert found.rate == pytest.approx(10 * MIB / 20)
        assert found.covers_s == 20 * (points - 1)
        assert found.fills_in_s == pytest.approx((30 * 2**30 / (10 * MIB / 20),) * 2)
    for since_ns in (0, ended_ns - 30 * MEMORY_POINT_NS, ended_ns, ended_ns + MEMORY_POINT_NS):
        monkeypatch.setattr("cbtop.viewmodels.memory_growth.steady_since_ns", lambda _, at=since_ns: at)
        assert memory_growths(store, record) == ()


def test_a_process_of_another_namespace_or_pid_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbtop.viewmodels.memory_growth.steady_since_ns", lambda _: 0)
    store = made(noisy(10, 1, 0), 100 * MEMORY_POINT_NS)
    (record,) = store.sources.values()
    assert len(memory_growths(store, record)) == 1
    assert record.hello is not None
    for hello in (replace(record.hello, pid=PID + 1), replace(record.hello, pid_namespace=1)):
        record.hello = hello
        assert memory_growths(store, record) == ()


def test_a_history_of_a_hostile_daemon_is_refused() -> None:
    for history in (packed_memory([-1]), packed_memory([1] * (MAX_MEMORY_POINTS + 1)), b"1234567"):
        with pytest.raises(ValueError, match="sizes of memory"):
            DeviceProcess(1, memory_history=history)
