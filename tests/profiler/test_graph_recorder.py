"""Tests of operations that were timed elsewhere.

Such operations are in the same graph and ring as operations that the profiler has timed.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler import graph_recorder
from cbtop.profiler.analysis.graph.nodes import (
    AsyncTask,
    Brick,
    Edge,
    EdgeKind,
    Function,
    KernelLaunch,
    Layer,
    Transfer,
)
from cbtop.profiler.analysis.graph.tree import to_ascii_tree
from cbtop.profiler.graph_recorder import UsageError
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.messages import Dependency
from cbtop.protocol.vocabulary import BrickId, SyncMode, TransferDirection
from tests.profiler.memory import Memory


class FakeDevice:
    """A device that works only while the host waits for it. Each wait advances the device to a given time."""

    def __init__(self) -> None:
        self.now_ns = self.waited_to_ns = 0

    def mark(self) -> int:
        return self.now_ns

    def synchronize(self) -> None:
        self.waited_to_ns = self.now_ns

    def time_ns(self, mark: object, /) -> int:
        assert isinstance(mark, int)
        assert mark <= self.waited_to_ns
        return mark


@pytest.fixture(autouse=True)
def both(profiler_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test twice: with the hot path of the profiler in C and in Python."""
    monkeypatch.setitem(globals(), "BrickProfiler", profiler_module.BrickProfiler)


def test_an_elapsed_time_ends_now_and_stands_where_the_thread_is() -> None:
    memory = Memory()
    profiler = BrickProfiler(clock_ns=count(1000, 100).__next__, recorder=memory)
    with profiler.layer(0):  # begins at 1000
        profiler.record_elapsed(BrickId.RMS_NORM, 70, elements=16)  # ends at 1100
    assert memory.records == [(2, 1030, 1100, 16), (1, 1000, 1200, 1)]


@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 10**6), st.booleans()), max_size=20
    )
)
def test_each_deferred_brick_keeps_its_own_end(bricks: list[tuple[int, int, int, bool]]) -> None:
    memory, device = Memory(), FakeDevice()
    profiler = BrickProfiler(recorder=memory, device_clock=device, clock_ns=lambda: device.now_ns)
    device.now_ns = 0
    profiler.reset_epoch()
    wanted = []
    for start_ns, duration_ns, elements, says_its_end in bricks:
        device.now_ns = max(device.now_ns, start_ns + duration_ns)
        end_ns = start_ns + duration_ns if says_its_end else None
        profiler.record_deferred(BrickId.RMS_NORM, start_ns, elements, end_ns)
        wanted.append((1, start_ns, device.now_ns if end_ns is None else end_ns, elements))
    assert (profiler.pending_count, memory.records) == (len(bricks), [])
    profiler.finalize()
    assert (profiler.pending_count, memory.records) == (0, wanted)


def test_without_a_device_a_deferred_brick_without_an_end_ends_now() -> None:
    memory = Memory()
    now_ns = 10_000
    profiler = BrickProfiler(clock_ns=lambda: now_ns, recorder=memory)
    profiler.reset_epoch()
    now_ns = 10_500
    profiler.record_deferred("a", 100)
    now_ns = 10_900
    profiler.record_deferred("b", 200)
    profiler.finalize()
    assert memory.records == [(1, 10_100, 10_500, 1), (2, 10_200, 10_900, 1)]


def test_a_time_of_another_clock_is_refused_and_recording_goes_on() -> None:
    memory = Memory()
    now_ns = 634 * 10**9  # the host's clock counts from the start of the machine
    profiler = BrickProfiler(clock_ns=lambda: now_ns, recorder=memory)
    profiler.reset_epoch()
    now_ns += 67_000_000
    for wrong in (now_ns, -1, 67_000_001):
        with pytest.raises(ValueError, match="elapsed_ns"):
            profiler.record_deferred("a", wrong)
        with pytest.raises(ValueError, match="elapsed_ns"):
            profiler.record_deferred("a", 0, end_ns=wrong)
        with pytest.raises(ValueError, match="elapsed_ns"):
            profiler.finalize(wrong)
    profiler.record_deferred("a", 0)
    profiler.finalize(profiler.elapsed_ns())
    assert [end - start for _, start, end, _ in memory.records] == [67_000_000]


def test_a_clock_that_fails_reaches_no_caller_as_an_error_of_its_time() -> None:
    def no_clock() -> int:
        raise OSError("the clock is gone")

    profiler = BrickProfiler(clock_ns=no_clock, recorder=Memory())
    profiler.record_deferred("a", 5)
    profiler.finalize(7)
    assert not profiler.recording


def test_what_was_put_off_is_recorded_at_the_latest_when_the_profiler_closes() -> None:
    memory = Memory()
    profiler = BrickProfiler(recorder=memory)
    start_ns = profiler.elapsed_ns()
    end_ns = profiler.elapsed_ns()
    profiler.record_deferred("a", start_ns, end_ns=end_ns)
    profiler.close()
    assert [end - start for _, start, end, _ in memory.records] == [end_ns - start_ns]


def test_the_graph_of_a_forward_pass_is_recorded_by_scopes() -> None:
    profiler = BrickProfiler(clock_ns=count(10**9, 1000).__next__)
    profiler.graph_push_scope(Layer(0))
    profiler.graph_record_brick(BrickId.QKV_PROJECTION, 200_000, elements=4096)
    profiler.graph_record_kernel("batched_gemv", 7, (32, 1, 1), (256, 1, 1), 4096)
    profiler.graph_record_kernel("reduce", None, (1, 1, 1), (32, 1, 1), 0, duration_ns=9_000)
    profiler.graph_push_scope(Function("cache", file="kv.py", line=12))
    profiler.graph_record_kernel("copy", duration_ns=2_000)
    profiler.graph_pop_scope()
    profiler.graph_record_transfer("gpu0", "host", 8192, TransferDirection.D2H, 3_000)
    profiler.graph_record_transfer("host", "gpu0", 8192, TransferDirection.H2D)
    assert not profiler.graph_is_scope_balanced
    profiler.graph_pop_scope()
    assert profiler.graph_is_scope_balanced
    for is_done in (False, False, True):
        profiler.graph_record_poll("prefetch", 500, is_done=is_done)
    graph = profiler.execution_graph()
    assert graph.nodes == [
        Layer(0),
        Brick("QkvProjection", 200_000, 4096),
        KernelLaunch("batched_gemv", grid=(32, 1, 1), block=(256, 1, 1), shared_memory_bytes=4096, ptx_hash=7),
        KernelLaunch("reduce", grid=(1, 1, 1), block=(32, 1, 1), shared_memory_bytes=0, duration_ns=9_000),
        Function("cache", file="kv.py", line=12),
        KernelLaunch("copy", duration_ns=2_000),
        Transfer("gpu0", "host", 8192, TransferDirection.D2H, 3_000),
        Transfer("host", "gpu0", 8192, TransferDirection.H2D),
        AsyncTask("prefetch", polls=3, yields=2, total_poll_ns=1500),
    ]
    assert graph.slowest_kernel() == (3, graph.nodes[3])
    assert graph.detect_ping_pong() == [(6, 7)]
    assert to_ascii_tree(graph).splitlines()[2:5] == [
        "│   ├── QkvProjection  200.0µs (4096 elem)",
        "│   │   ├── batched_gemv  <<<32,256,1>>> smem=4096B",
        "│   │   └── reduce  <<<1,32,1>>> smem=0B",
    ]


def test_a_dependency_is_said_once_and_stands_in_the_graph(runtime: Path) -> None:
    profiler = BrickProfiler()
    for _ in range(3):
        first, then = (profiler.graph_record_brick(name, 1000) for name in "ab")
        profiler.graph_add_dependency(first, then)
    assert list(profiler.execution_graph().edges()) == [
        Edge(0, 1, EdgeKind.SEQUENCE),
        Edge(0, 1, EdgeKind.DEPENDS_ON),
    ]
    (catalog,) = runtime.glob("*.catalog")
    assert [m for m in CatalogReader(catalog).read() if isinstance(m, Dependency)] == [Dependency(1, 2)]


def test_dependencies_are_bounded_and_what_was_dropped_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_recorder, "MAX_DEPENDENCIES", 2)
    profiler = BrickProfiler()
    nodes = [profiler.graph_record_brick(f"brick {number}", 1000) for number in range(5)]
    for node in nodes[1:]:
        profiler.graph_add_dependency(nodes[0], node)
    graph = profiler.execution_graph()
    assert (len(graph.added_edges), graph.dropped) == (2, 2)


def test_leaving_a_scope_that_nobody_entered_is_an_error() -> None:
    with pytest.raises(ValueError, match="without a graph_push_scope"):
        BrickProfiler().graph_pop_scope()


@pytest.mark.parametrize("how", [{"enabled": False}, {"sync_mode": SyncMode.NONE}])
def test_what_is_switched_off_takes_nothing_in(how: dict[str, object]) -> None:
    def no_clock() -> int:
        raise AssertionError("the clock was read")

    memory = Memory()
    profiler = BrickProfiler(clock_ns=no_clock, recorder=memory, **how)  # type: ignore[arg-type]
    profiler.record_elapsed("a", 1)
    profiler.record_deferred("a", 1)
    profiler.graph_push_scope(Layer(0))
    ids = [
        profiler.graph_record_brick("a", 1),
        profiler.graph_record_kernel("k"),
        profiler.graph_record_transfer("a", "b", 1, TransferDirection.D2D),
        profiler.graph_record_poll("t", 1, is_done=True),
    ]
    profiler.graph_add_dependency(ids[0], ids[1])
    profiler.graph_pop_scope()
    assert (ids, profiler.pending_count, memory.records) == ([0] * 4, 0, [])


def test_an_impossible_duration_is_a_usage_error_and_recording_goes_on() -> None:
    memory = Memory()
    profiler = BrickProfiler(recorder=memory, clock_ns=count(0, 10).__next__)
    for duration_ns in (1 << 62, -(1 << 64)):
        with pytest.raises(UsageError, match="146 years"):
            profiler.record_elapsed("a", duration_ns)
    profiler.record_elapsed("a", 7)
    assert profiler.recording
    assert len(memory.records) == 1
