"""Tests of bugs that reviewers have found. Each test failed when it was written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cbtop.daemon.post_mortem import post_mortem
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.pending import HostTime, Pending
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.attributes import Work
from cbtop.protocol.ring_reader import Batch, RingReader
from cbtop.protocol.vocabulary import BrickCategory
from cbtop.telemetry.steps import whole_step
from tests.cbtop.recorded import source_of
from tests.profiler.conftest import of_either
from tests.profiler.memory import Memory, is_plain

MAKE = type[BrickProfiler]
OF_CALL = BrickDefinition("of call", BrickCategory.OTHER, work=lambda n: Work(2.0 * n, bytes_per_call=n))


@pytest.fixture
def make(profiler_module: ModuleType) -> MAKE:
    made: MAKE = profiler_module.BrickProfiler
    return made


class Failing(Memory):
    def record(self, tag: int, start_ns: int, end_ns: int, elements: int) -> None:
        raise OSError("no record")


def test_a_call_with_work_of_its_own_is_recorded_where_no_ring_is_attached(make: MAKE) -> None:
    memory = Memory()
    profiler = make(recorder=memory)
    for _ in range(3):
        with profiler.brick(OF_CALL, 4):
            pass
    assert len(memory.records) == 6


def test_a_failing_recorder_does_not_reach_a_host_whose_brick_knows_its_work(make: MAKE) -> None:
    with make(recorder=Failing()).brick(OF_CALL, 4):
        pass


def test_work_of_a_call_may_leave_out_its_bytes(make: MAKE, runtime: Path) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    with profiler.brick(BrickDefinition("half", BrickCategory.OTHER, work=lambda n: Work(2.0 * n)), 4):
        pass
    (brick,) = profiler.report().bricks
    assert (brick.flops, brick.bytes) == (8, None)


def test_more_flop_than_64_bits_hold_do_not_end_the_daemon(make: MAKE, runtime: Path) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    vast = BrickDefinition("vast", BrickCategory.OTHER, work=lambda n: Work(5e18, bytes_per_call=1))
    for _ in range(3):
        with profiler.brick(vast, 1):
            pass
    source = source_of(runtime)
    source.poll()
    assert source.delta()
    assert source.snapshot()


def test_more_flop_in_a_call_than_64_bits_hold_end_no_recording(make: MAKE, runtime: Path) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    with profiler.brick("a"):
        pass
    with profiler.brick(BrickDefinition("vast", BrickCategory.OTHER, work=lambda n: Work(1e19, bytes_per_call=1)), 1):
        pass
    assert profiler.recording


def test_elements_of_2_to_63_are_said(make: MAKE, runtime: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    for elements in (1, 1 << 63):
        with profiler.brick("a", elements):
            pass
    assert "9223372036854775808 (int)" in caplog.text


def test_a_step_that_is_entered_again_unsampled_is_plain(make: MAKE) -> None:
    memory = Memory()
    profiler = make(recorder=memory, sample_every=2)
    step = profiler.step("decode", tokens=1)
    for _ in range(4):
        with step:
            pass
    assert [is_plain(tag) for tag, *_ in memory.records] == [False, True, False, True]


def test_a_name_set_inside_a_brick_is_the_steps_name(make: MAKE) -> None:
    memory = Memory()
    profiler = make(recorder=memory)
    with profiler.step("decode", tokens=1) as step, profiler.brick("a"):
        step.name = "prefill"
    names = {node: name for node, _, _, name in memory.nodes}
    assert names[memory.records[-1][0] & 0xFFFFFF] == "prefill"


def test_steps_that_end_out_of_order_leave_nobody_inside_them(make: MAKE) -> None:
    profiler = make(recorder=Memory())
    one, other = profiler.step("one"), profiler.step("other")
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    other.__exit__(None, None, None)
    assert profiler.parts.paths.own.position.step is None


def test_a_step_whose_begin_failed_gives_its_lane_back(make: MAKE) -> None:
    fails = False

    def clock_ns() -> int:
        if fails:
            raise OSError("no clock")
        return time.perf_counter_ns()

    profiler = make(recorder=Memory(), clock_ns=clock_ns)
    for _ in range(3):
        fails = True
        with profiler.step("decode"):
            pass
        fails = False
        profiler.enable()
    assert (len(profiler.parts.steps.lanes.free), profiler.parts.paths.own.position.lane) == (15, 0)


def test_a_child_has_the_lanes_that_other_threads_of_its_parent_hold(make: MAKE) -> None:
    profiler = make(recorder=Memory())
    inside, go_on = threading.Event(), threading.Event()

    def run() -> None:
        with profiler.step("decode"):
            inside.set()
            go_on.wait()

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait()
    # Call this function as a forked child would. In the child, the other thread does not exist.
    profiler._after_fork()
    free = len(profiler.parts.steps.lanes.free)
    go_on.set()
    thread.join()
    assert free == 15


@of_either
def test_names_of_steps_without_end_do_not_grow_the_host(make: MAKE) -> None:
    profiler = make(recorder=Memory(), sample_every=10)
    for number in range(10_000):
        with profiler.step(f"request {number}"):
            pass
    assert len(profiler._turns.turns) < 5_000


def test_timings_deferred_while_others_are_recorded_lose_none() -> None:
    class Growing(deque):  # type: ignore[type-arg]  # Another timing arrives during each read.
        def __iter__(self):  # type: ignore[no-untyped-def]
            for one in super().__iter__():
                if len(self) < 5:
                    self.append((1, HostTime(1), HostTime(2), 1))
                yield one

    class Clock:
        def mark(self) -> int:
            return 0

        def synchronize(self) -> None: ...

        def time_ns(self, mark: object, /) -> int:
            return 0

    found: list[int] = []
    pending = Pending(Clock(), lambda tag, *_: found.append(tag))
    pending.timings = Growing([(1, HostTime(1), HostTime(2), 1)] * 2)
    pending.finalize()
    assert set(found) == {1}


def test_a_signal_handler_may_close_while_the_device_is_waited_for(implementation: str) -> None:
    script = (
        "import signal, time\n"
        "from cbtop.profiler.profiler import BrickProfiler\n"
        "class Device:\n"
        "    def mark(self): return time.perf_counter_ns()\n"
        "    def synchronize(self): signal.raise_signal(signal.SIGTERM)\n"
        "    def time_ns(self, mark): return mark\n"
        "p = BrickProfiler(device_clock=Device())\n"
        "signal.signal(signal.SIGTERM, lambda *_: p.close())\n"
        "with p.brick('a'): pass\n"
        "p.finalize()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_a_step_that_is_sampled_as_a_trace_holds_no_other_lanes_records() -> None:
    nodes = NodeTable()
    source = Memory()
    profiler = BrickProfiler(recorder=source)
    with profiler.step("decode"), profiler.brick("a"):
        pass
    for message in source.said:
        nodes.add(message)  # type: ignore[arg-type]
    lane = 1 << 28
    # Columns: node, flags, start, end. The third row is a brick in another lane that ran at the time of the step.
    columns = np.array(
        [(2, 0, 0, 1), (2, 0, 11, 12), (2, lane, 13, 14), (1, 0, 10, 20), (1, lane, 5, 30)], np.int64
    ).T
    found = whole_step(Batch(columns[0], columns[1], columns[2], columns[3], columns[0], 0), nodes)
    assert found is not None
    assert found.start_ns.tolist() == [11, 10]


@pytest.mark.slow
@of_either
def test_a_post_mortem_reads_a_long_catalog_to_its_end(make: MAKE, runtime: Path) -> None:
    script = (
        "import os; from cbtop import BrickProfiler\n"
        "p = BrickProfiler()\n"
        "for n in range(4000):\n"
        "    with p.brick('x' * 100 + str(n)): pass\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    (ring,) = runtime.glob("*.ring")
    found = post_mortem(ring)
    assert (found.state, found.produced) == ("gone", 4000)


def test_a_recorder_that_is_let_go_keeps_no_descriptor(make: MAKE, runtime: Path) -> None:
    import gc

    profiler = make()
    with profiler.brick("a"):
        pass
    (catalog,) = runtime.glob("*.catalog")
    del profiler
    gc.collect()
    held = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and path.exists()]
    assert str(catalog) not in held
    assert RingReader(catalog.with_suffix(".ring")).produced == 1


def test_a_host_at_the_end_of_its_stack_loses_a_brick_and_not_its_recording(make: MAKE) -> None:
    profiler = make(recorder=Memory())

    def deeper(level: int) -> None:
        profiler.stop_brick(profiler.start_brick(f"at {level}"), 1)
        deeper(level + 1)

    with pytest.raises(RecursionError):
        deeper(0)
    assert profiler.recording
