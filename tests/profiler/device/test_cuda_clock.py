"""Tests on a real device: time stamps of its work agree with CUDA events and with the host's clock."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from cbtop.profiler.device.device import CudaDevice  # noqa: E402
from cbtop.profiler.device.driver import CudaDriver  # noqa: E402
from cbtop.profiler.device.stamp_clock import SLOTS, StampClock  # noqa: E402
from cbtop.profiler.instrument.torch_clock import torch_clock  # noqa: E402
from cbtop.profiler.profiler import BrickProfiler  # noqa: E402
from tests.profiler.memory import Memory  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture
def clock() -> Iterator[StampClock]:
    yield torch_clock()
    torch.cuda.synchronize()


def test_stamps_time_a_kernel_as_events_do(clock: StampClock) -> None:
    matrix = torch.randn(4096, 4096, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        matrix @ matrix
    torch.cuda.synchronize()
    begin.record()
    first = clock.mark()
    for _ in range(10):
        matrix @ matrix
    last = clock.mark()
    end.record()
    torch.cuda.synchronize()
    clock.synchronize()
    took_ns, events_ns = clock.time_ns(last) - clock.time_ns(first), begin.elapsed_time(end) * 1e6
    assert took_ns == pytest.approx(events_ns, rel=0.02, abs=20_000)


def test_device_times_lie_where_the_host_saw_them(clock: StampClock) -> None:
    for _ in range(50):
        before_ns = time.perf_counter_ns()
        mark = clock.mark()
        clock.synchronize()
        after_ns = time.perf_counter_ns()
        error_ns = clock.error_ns
        assert error_ns is not None
        assert before_ns - error_ns <= clock.time_ns(mark) <= after_ns + error_ns
        time.sleep(0.05)
    assert error_ns < 20_000


def test_a_hundred_thousand_marks_take_no_more_memory(clock: StampClock) -> None:
    for _ in range(100_000 // 1000):
        marks = [clock.mark() for _ in range(1000)]
        clock.synchronize()
    times = [clock.time_ns(mark) for mark in marks]
    assert times == sorted(times)
    assert len(clock._marks) == SLOTS


def test_a_profiler_times_bricks_on_the_device_and_leaves_captures_alone(clock: StampClock) -> None:
    memory = Memory()
    profiler = BrickProfiler(recorder=memory, device_clock=clock)
    weights = torch.randn(2048, 2048, device="cuda")
    rows = torch.randn(2048, 2048, device="cuda")
    rows @ weights
    with profiler.step("decode", tokens=1), profiler.brick("product"):
        product = rows @ weights
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), profiler.brick("captured"):
        product.copy_(rows @ weights)
    profiler.finalize()
    kept = [record for record in memory.records if record[0] & 0xFFFFFF]
    assert len(kept) == 2
    assert all(end > start for _, start, end, _ in kept)
    product.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(product, rows @ weights)


def test_a_device_gives_back_what_it_took() -> None:
    torch.cuda.synchronize()
    device = CudaDevice(CudaDriver())
    assert device.time.last is not None
    device.close()
