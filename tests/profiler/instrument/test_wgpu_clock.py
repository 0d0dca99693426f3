"""Tests of the clock for wgpu on a real adapter: of a GPU, or Mesa's lavapipe, which computes on the CPU."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from cbtop.profiler.clocks import NoTimeError
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import NO_NODE
from cbtop.protocol.vocabulary import NodeKind
from tests.profiler.memory import Memory

wgpu: Any = pytest.importorskip("wgpu", reason="wgpu is not installed: pip install 'cbtop[wgpu]'")
try:
    ADAPTER = wgpu.gpu.request_adapter_sync()
except RuntimeError as error:
    pytest.skip(f"wgpu finds no adapter ({error}); Mesa's lavapipe is one", allow_module_level=True)
if "timestamp-query" not in ADAPTER.features:
    pytest.skip(f"{ADAPTER.summary} has no timestamp-query", allow_module_level=True)

from cbtop.profiler.instrument import wgpu_clock  # noqa: E402 - it imports wgpu
from cbtop.profiler.instrument.wgpu_clock import WgpuClock, WgpuClockError  # noqa: E402

IS_LAVAPIPE = "llvmpipe" in ADAPTER.info.device
SHADER = """
@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) at: vec3<u32>) {
    var value = x[at.x];
    for (var turn = 0u; turn < 20000u; turn++) { value = value * 0.999 + 0.5; }
    x[at.x] = value;
}
"""


class Work:
    """A kernel on `device` that takes as long as its number of groups."""

    def __init__(self, device: Any) -> None:
        self.device = device
        module = device.create_shader_module(code=SHADER)
        self._pipeline = device.create_compute_pipeline(
            layout="auto", compute={"module": module, "entry_point": "main"}
        )
        buffer = device.create_buffer(size=4 * 64 * 1024, usage="STORAGE|COPY_SRC")
        self._group = device.create_bind_group(
            layout=self._pipeline.get_bind_group_layout(0),
            entries=[{"binding": 0, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}}],
        )
        self._awaited = device.create_buffer(size=8, usage="MAP_READ|COPY_DST")

    def encode(self, encoder: Any, groups: int) -> None:
        a_pass = encoder.begin_compute_pass()
        a_pass.set_pipeline(self._pipeline)
        a_pass.set_bind_group(0, self._group)
        a_pass.dispatch_workgroups(groups)
        a_pass.end()

    def submit(self, groups: int) -> None:
        encoder = self.device.create_command_encoder()
        self.encode(encoder, groups)
        self.device.queue.submit([encoder.finish()])

    def wait(self) -> None:
        self._awaited.map_sync("READ")
        self._awaited.unmap()

    def took_ns(self, groups: int) -> int:
        """Return how long submitting the kernel and waiting for it takes."""
        self.wait()
        begun_ns = time.perf_counter_ns()
        self.submit(groups)
        self.wait()
        return time.perf_counter_ns() - begun_ns


def a_device(*, in_encoders: bool) -> Any:
    features = ["timestamp-query"]
    if in_encoders:
        if wgpu_clock.IN_ENCODERS not in ADAPTER.features:
            pytest.skip(f"{ADAPTER.summary} has no {wgpu_clock.IN_ENCODERS}")
        features.append(wgpu_clock.IN_ENCODERS)
    return ADAPTER.request_device_sync(required_features=features)


@pytest.fixture(scope="module", params=[False, True], ids=["passes", "encoders"])
def work(request: pytest.FixtureRequest) -> Work:
    made = Work(a_device(in_encoders=request.param))
    made.took_ns(1)  # compiles
    return made


@pytest.fixture
def wgpu_clock_of(work: Work) -> Any:
    clock = WgpuClock(work.device)
    yield clock
    clock.close()


def bricks_of(memory: Memory) -> dict[str, list[int]]:
    """Return the durations of bricks in ns, by their names without marks such as `, launch-bound`."""
    nodes = {said.id: said for said in memory.said if isinstance(said, Node)}
    found: dict[str, list[int]] = {}
    for tag, start_ns, end_ns, _ in memory.records:
        node = nodes[tag & 0xFFFFFF]
        if node.kind is NodeKind.BRICK:
            found.setdefault(node.name.partition(",")[0], []).append(end_ns - start_ns)
    return found


def within(measure: Callable[[], tuple[float, float]], share: float) -> None:
    """Compare two measurements. Another program can disturb one, so there are five attempts."""
    for _ in range(5):
        ours, theirs = measure()
        if ours == pytest.approx(theirs, rel=share):
            return
    pytest.fail(f"{ours} ns, but {theirs} ns by submitting and waiting")


def test_a_brick_takes_as_long_as_submitting_and_waiting(work: Work, wgpu_clock_of: WgpuClock) -> None:
    def measure() -> tuple[float, float]:
        memory = Memory()
        profiler = BrickProfiler(recorder=memory, device_clock=wgpu_clock_of)
        theirs = []
        for _ in range(5):
            with profiler.step("mine", tokens=1), profiler.brick("kernel"):
                work.submit(64)
            work.wait()
            theirs.append(work.took_ns(64))
        profiler.finalize()
        ours = bricks_of(memory)["kernel"]
        assert len(ours) == 5
        return median(ours), median(theirs)

    within(measure, 0.1)


def test_bricks_in_one_encoder_are_timed_apart(work: Work, wgpu_clock_of: WgpuClock) -> None:
    def measure() -> tuple[float, float]:
        memory = Memory()
        profiler = BrickProfiler(recorder=memory, device_clock=wgpu_clock_of)
        theirs = []
        for _ in range(5):
            with profiler.step("mine", tokens=1), wgpu_clock_of.encode() as encoder:
                with profiler.brick("short"):
                    work.encode(encoder, 16)
                with profiler.brick("long"):
                    work.encode(encoder, 128)
            work.wait()
            theirs.append(work.took_ns(128))
        profiler.finalize()
        ours = bricks_of(memory)
        assert (len(ours["short"]), len(ours["long"])) == (5, 5)
        assert median(ours["long"]) > 4 * median(ours["short"])
        return median(ours["long"]), median(theirs)

    within(measure, 0.1)


def test_a_time_of_the_device_lies_between_those_of_the_host(work: Work, wgpu_clock_of: WgpuClock) -> None:
    work.wait()
    before_ns = time.perf_counter_ns()
    mark = wgpu_clock_of.mark()
    wgpu_clock_of.synchronize()
    after_ns = time.perf_counter_ns()
    error_ns = wgpu_clock_of.error_ns
    assert before_ns - error_ns <= wgpu_clock_of.time_ns(mark) <= after_ns + error_ns


@pytest.mark.skipif(not IS_LAVAPIPE, reason="only lavapipe's timestamps are readings of the host's clock")
def test_the_error_of_the_clock_is_as_large_as_it_says(wgpu_clock_of: WgpuClock) -> None:
    mark = wgpu_clock_of.mark()
    wgpu_clock_of.synchronize()
    host_ns, error_ns = wgpu_clock_of.host_ns(mark.device_ns)
    assert abs(host_ns - mark.device_ns) <= error_ns < 50_000_000


def test_marks_of_many_batches_have_times_in_order(wgpu_clock_of: WgpuClock) -> None:
    marks = [wgpu_clock_of.mark() for _ in range(2 * wgpu_clock.SLOTS + 10)]
    wgpu_clock_of.synchronize()
    times = [wgpu_clock_of.time_ns(mark) for mark in marks]
    assert times == sorted(times)
    assert len(wgpu_clock_of._free) <= 4  # the batches are used again


def test_an_encoder_takes_more_marks_than_a_batch_has(work: Work, wgpu_clock_of: WgpuClock) -> None:
    with wgpu_clock_of.encode() as encoder:
        marks = [wgpu_clock_of.mark() for _ in range(wgpu_clock.SLOTS + 3)]
        work.encode(encoder, 1)
        assert not any(wgpu_clock_of.is_reached(mark) for mark in marks)
    wgpu_clock_of.synchronize()
    times = [wgpu_clock_of.time_ns(mark) for mark in marks]
    assert times == sorted(times)


def test_marks_of_an_encoder_that_failed_have_no_time(wgpu_clock_of: WgpuClock) -> None:
    marks = []

    def fail() -> None:
        with wgpu_clock_of.encode():
            marks.append(wgpu_clock_of.mark())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert wgpu_clock_of.is_reached(marks[0])
    with pytest.raises(NoTimeError):
        wgpu_clock_of.time_ns(marks[0])


def test_a_mark_without_a_batch_left_is_lost(monkeypatch: pytest.MonkeyPatch, wgpu_clock_of: WgpuClock) -> None:
    monkeypatch.setattr(wgpu_clock, "MAX_BATCHES", 0)
    monkeypatch.setattr(wgpu_clock_of, "_free", [])
    memory = Memory()
    profiler = BrickProfiler(recorder=memory, device_clock=wgpu_clock_of)
    with profiler.step("mine", tokens=1), profiler.brick("kernel"):
        pass
    profiler.finalize()
    assert memory.records
    assert {tag for tag, *_ in memory.records} == {NO_NODE}


def test_asking_for_a_mark_does_not_wait_for_the_device(work: Work, wgpu_clock_of: WgpuClock) -> None:
    work.wait()
    with wgpu_clock_of.encode() as encoder:
        mark = wgpu_clock_of.mark()
        work.encode(encoder, 1024)
    begun_ns = time.perf_counter_ns()
    is_reached = wgpu_clock_of.is_reached(mark)
    asked_ns = time.perf_counter_ns() - begun_ns
    work.wait()
    took_ns = time.perf_counter_ns() - begun_ns
    assert is_reached or asked_ns < took_ns / 2
    wgpu_clock_of.wait(mark, 10**9)
    assert wgpu_clock_of.time_ns(mark)


def test_threads_make_marks_at_the_same_time(wgpu_clock_of: WgpuClock) -> None:
    marks: list[wgpu_clock.WgpuMark] = []
    threads = [
        threading.Thread(target=lambda: marks.extend(wgpu_clock_of.mark() for _ in range(50))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wgpu_clock_of.synchronize()
    assert len({wgpu_clock_of.time_ns(mark) for mark in marks}) > 100
    assert len({mark.number for mark in marks}) == 200


def test_a_forked_child_asks_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch, wgpu_clock_of: WgpuClock) -> None:
    mark = wgpu_clock_of.mark()
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert wgpu_clock_of.is_reached(mark)
    assert wgpu_clock_of.stamp(wgpu_clock_of.mark()) is None
    wgpu_clock_of.synchronize()
    wgpu_clock_of.look()
    wgpu_clock_of.close()
    monkeypatch.undo()
    wgpu_clock_of.synchronize()
    assert wgpu_clock_of.time_ns(mark)


@pytest.mark.parametrize("bits", [32, 36, 48])
def test_a_counter_that_wraps_goes_on(wgpu_clock_of: WgpuClock, bits: int) -> None:
    before = wgpu_clock_of.counter.ns((1 << bits) - 1000)
    after = wgpu_clock_of.counter.ns(500)
    assert after - before == 1500 * wgpu_clock_of.counter.tick_ns
    assert wgpu_clock_of.counter.ns(400) < after  # marks of two batches in flight may arrive in another order


def test_timestamps_that_cannot_be_times_are_lost(monkeypatch: pytest.MonkeyPatch, wgpu_clock_of: WgpuClock) -> None:
    read = wgpu_clock._Batch.ticks
    for wrong in (lambda tick: 0, lambda tick: tick // 2, lambda tick: tick + 10**12):
        mark = wgpu_clock_of.mark()

        def ticks(batch: Any, wrong: Callable[[int], int] = wrong) -> dict[int, int]:
            return {slot: wrong(tick) for slot, tick in read(batch).items()}

        with monkeypatch.context() as patched:
            patched.setattr(wgpu_clock._Batch, "ticks", ticks)
            wgpu_clock_of.synchronize()
        with pytest.raises(NoTimeError):
            wgpu_clock_of.time_ns(mark)


def test_the_clocks_are_compared_again(monkeypatch: pytest.MonkeyPatch, wgpu_clock_of: WgpuClock) -> None:
    monkeypatch.setattr(wgpu_clock, "LOOK_NS", 0)
    compared: list[tuple[int, int, int]] = []
    monkeypatch.setattr(wgpu_clock_of, "_compare", lambda *readings: compared.append(readings))
    wgpu_clock_of.look()
    wgpu_clock_of.look()
    assert not compared  # it does not wait
    wgpu_clock_of.wait(wgpu_clock_of.mark(), 10**9)
    assert len(compared) == 1


def test_a_device_without_timestamps_says_what_to_do() -> None:
    with pytest.raises(WgpuClockError, match=r"required_features=\['timestamp-query'\]"):
        WgpuClock(ADAPTER.request_device_sync())


def test_zeros_as_timestamps_are_an_error(monkeypatch: pytest.MonkeyPatch, work: Work) -> None:
    read = wgpu_clock._Batch.ticks
    monkeypatch.setattr(wgpu_clock._Batch, "ticks", lambda batch: dict.fromkeys(read(batch), 0))
    with pytest.raises(WgpuClockError, match="stores zeros"):
        WgpuClock(work.device)


def test_a_lost_device_ends_recording_but_not_the_host(caplog: pytest.LogCaptureFixture) -> None:
    device = ADAPTER.request_device_sync(required_features=["timestamp-query"])
    clock = WgpuClock(device)
    profiler = BrickProfiler(recorder=Memory(), device_clock=clock)
    for turn in range(3):
        with profiler.step("mine", tokens=1), profiler.brick("kernel"):
            if turn == 1:
                device.destroy()
    profiler.finalize()
    assert [line for line in caplog.messages if "nothing is recorded from here on" in line]
    clock.close()


def test_a_batch_that_was_filled_before_the_device_was_lost_is_read() -> None:
    work = Work(ADAPTER.request_device_sync(required_features=["timestamp-query"]))
    clock = WgpuClock(work.device)
    mark = clock.mark()
    clock._close_open()  # starts reading
    work.wait()  # wgpu fills the batch
    work.device.destroy()  # from here on, wgpu ends the process if a mapped buffer is read
    assert clock.is_reached(mark)
    assert clock.time_ns(mark)
    clock.close()
