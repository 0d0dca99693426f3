"""Tests of steps: facts that are known late, cancelled and sampled steps, several models, and interleaved work."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbtop.profiler import scopes
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import Function
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.profiler.step_parts import AlikeParts
from cbtop.profiler.steps import ActiveStep
from cbtop.protocol.attributes import Work
from cbtop.protocol.ring import FLAG_FAILED, LANE_SHIFT
from cbtop.protocol.vocabulary import BrickCategory, BrickId, NodeKind
from cbtop.viewmodels.source import source_view
from tests.cbtop.recorded import record_of, source_of
from tests.profiler.conftest import of_either
from tests.profiler.memory import Memory, is_plain

MAKE = type[BrickProfiler]
SPAN = st.tuples(st.integers(0, 300), st.integers(0, 60))  # start, length


@pytest.fixture
def make(profiler_module: ModuleType) -> MAKE:
    made: MAKE = profiler_module.BrickProfiler
    return made


def paths(memory: Memory) -> list[tuple[str, int, int, int]]:
    """Return (path, duration, elements, failed) of every record in order."""
    named = {0: ""}
    for node, parent, _, name in memory.nodes:
        named[node] = f"{named[parent or 0]}/{name}"
    return [
        (named[tag & 0xFFFFFF], end - start, elements, int(bool(tag & FLAG_FAILED)))
        for tag, start, end, elements in memory.records
    ]


class Device:
    """A device that uses a counter as its clock.

    The device reaches its time stamps when the profiler waits for it.
    """

    def __init__(self) -> None:
        self.mark = count(0, 10).__next__

    def synchronize(self) -> None: ...

    def time_ns(self, mark: object, /) -> int:
        assert isinstance(mark, int)
        return mark


@pytest.fixture(params=["host", "device"])
def profiler(request: pytest.FixtureRequest, make: MAKE) -> BrickProfiler:
    clock = count(0, 10).__next__
    if request.param == "host":
        return make(recorder=Memory(), clock_ns=clock)
    return make(recorder=Memory(), clock_ns=clock, device_clock=Device())


def recorded(profiler: BrickProfiler) -> list[tuple[str, int, int, int]]:
    assert isinstance(profiler.parts.recorder, Memory)
    profiler.finalize()
    return paths(profiler.parts.recorder)


def test_a_name_and_tokens_set_inside_hold_for_all_that_ran_in_the_step(profiler: BrickProfiler) -> None:
    for name, tokens in (("decode", 3), ("prefill", 7), ("decode", 2)):
        with profiler.step() as step:
            with profiler.layer(0), profiler.brick("a", 5):
                pass
            profiler.stop_brick(profiler.start_brick("b"), 6, failed=True)
            step.name, step.tokens = name, tokens
    found = [(path, elements, failed) for path, _, elements, failed in recorded(profiler)]
    assert found == [
        one
        for name, tokens in (("decode", 3), ("prefill", 7), ("decode", 2))
        for one in (
            (f"/{name}/0/a", 5, 0),
            (f"/{name}/0", 1, 0),
            (f"/{name}/b", 6, 1),
            (f"/{name}", tokens, 0),
        )
    ]
    assert all(duration > 0 for _, duration, _, _ in recorded(profiler))


def test_a_step_that_never_got_a_name_is_called_step(profiler: BrickProfiler) -> None:
    with profiler.step(), profiler.brick("a"):
        pass
    assert [path for path, *_ in recorded(profiler)] == ["/step/a", "/step"]


def test_bricks_recorded_by_other_means_in_an_unnamed_step_are_held_too(profiler: BrickProfiler) -> None:
    with profiler.step() as step:
        profiler.record_elapsed("elapsed", 7)
        profiler.record_deferred("deferred", 0, end_ns=4)
        profiler.graph_record_brick("recorded", 9)
        with profiler.step("inner", tokens=1), profiler.brick("a"):
            pass
        step.name = "outer"
    assert sorted(path for path, *_ in recorded(profiler)) == [
        "/inner",
        "/inner/a",
        "/outer",
        "/outer/deferred",
        "/outer/elapsed",
        "/outer/inner",
        "/outer/recorded",
    ]


def test_what_a_step_without_a_name_holds_is_bounded_and_the_rest_counted(
    make: MAKE, monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    if make(recorder=Memory()).implementation == "compiled":
        bound = 1 << 16
    else:
        bound = 4
        monkeypatch.setattr("cbtop.profiler.hot_path.MAX_HELD", bound)
    profiler = make(recorder=RingRecorder(runtime))
    with profiler.step() as step:
        for _ in range(bound + 3):
            profiler.stop_brick(profiler.start_brick("a"), 1)
        step.name = "decode"
    report = profiler.report()
    assert (report.bricks[0].calls.count, report.rejected) == (bound, 3)


def test_a_start_given_afterwards_is_the_start(profiler: BrickProfiler) -> None:
    before_ns = profiler.parts.now_ns()
    with profiler.step("decode", tokens=1) as step, profiler.brick("a"):
        pass
    with profiler.step("decode", tokens=1) as step:
        step.start_ns = before_ns
    profiler.finalize()
    assert isinstance(profiler.parts.recorder, Memory)
    assert profiler.parts.recorder.records[-1][1] == before_ns


@pytest.mark.parametrize("start_ns", [-1, 1 << 62])
def test_a_start_that_cannot_be_is_said_and_left_aside(
    make: MAKE, start_ns: int, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory()
    profiler = make(recorder=memory, clock_ns=count(0, 10).__next__)
    for _ in range(2):
        with profiler.step("decode", tokens=1) as step:
            step.start_ns = start_ns
    for _, start, end, _ in memory.records:
        assert 0 <= start < end < 200
    assert len(memory.records) == 2
    assert caplog.text.count("cannot begin") == 1


def _counted(runtime: Path) -> tuple[NodeTable, NodeStats]:
    source = source_of(runtime)
    source.poll()
    state = source.state_message()
    assert (state.received, state.rejected) == (source.stats.received, 0)
    return source.nodes, source.stats


def test_a_cancelled_step_does_not_count_and_its_bricks_are_not_in_the_books(make: MAKE, runtime: Path) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    for number in range(6):
        with profiler.step("decode", tokens=10) as step, profiler.brick("a"):
            if number % 2:
                step.cancel()
    nodes, stats = _counted(runtime)
    totals = PhaseTotals.of(nodes, stats, "decode")
    assert totals.step is not None
    (brick,) = totals.nodes
    assert (totals.count[totals.step.id], totals.tokens, totals.count[brick.id]) == (3, 30, 6)
    assert 0 < totals.closed_ns[brick.id] < totals.total_ns[brick.id]
    cancelled_ns = stats.rare("cancelled_ns", (brick.id,))
    assert totals.closed_ns[brick.id] + cancelled_ns == totals.total_ns[brick.id]
    assert totals.closed_ns[brick.id] <= totals.total_ns[totals.step.id]


def test_a_step_renamed_inside_counts_under_its_new_name_alone(make: MAKE, runtime: Path) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    with profiler.step("decode", tokens=1) as step:
        with profiler.brick("before"):
            pass
        step.name = "prefill"
        with profiler.brick("after"):
            pass
    nodes, stats = _counted(runtime)
    decode, prefill = (PhaseTotals.of(nodes, stats, name) for name in ("decode", "prefill"))
    assert (decode.tokens, prefill.tokens) == (0, 1)
    assert [(n.name, decode.closed_ns[n.id]) for n in decode.nodes] == [("before", 0)]
    assert [n.name for n in prefill.nodes] == ["after"]


def test_two_models_have_phases_of_their_own(make: MAKE) -> None:
    memory = Memory()
    profiler = make(recorder=memory)
    for model in ("draft", "target", "draft"):
        with profiler.step("decode", tokens=1, model=model):
            pass
    with profiler.step("decode", tokens=1):
        pass
    assert [tag & 0xFFFFFF for tag, *_ in memory.records] == [1, 2, 1, 3]


def test_layers_of_two_stacks_are_two_layers(profiler: BrickProfiler) -> None:
    for stack in ("encoder", "decoder", "", "encoder"):
        with profiler.layer(0, stack):
            pass
    assert isinstance(profiler.parts.recorder, Memory)
    profiler.finalize()
    assert [tag & 0xFFFFFF for tag, *_ in profiler.parts.recorder.records] == [1, 2, 3, 1]


def test_each_thread_samples_its_own_steps_of_each_name(make: MAKE) -> None:
    memory = Memory()
    profiler = make(recorder=memory, sample_every=3)
    turn = [threading.Semaphore(1), threading.Semaphore(0)]

    def run(me: int) -> None:
        # The threads take turns. If steps were counted for the whole process, one of the threads would never be
        # sampled.
        for _ in range(6):
            for name in ("prefill", "decode"):
                turn[me].acquire()
                with profiler.step(name, tokens=me), profiler.brick(f"{me}"):
                    pass
                turn[1 - me].release()

    threads = [threading.Thread(target=run, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [(path, elements) for path, _, elements, _ in paths(memory) if path.count("/") == 1]
    assert sorted(found) == sorted([("/prefill", 0), ("/decode", 0), ("/prefill", 1), ("/decode", 1)] * 6)
    assert sum(is_plain(tag) for tag, *_ in memory.records) == 16
    assert sum(path.count("/") == 2 for path, *_ in paths(memory)) == 8


def test_a_step_that_is_not_sampled_says_nothing_of_another_threads(make: MAKE) -> None:
    memory = Memory()
    profiler = make(recorder=memory, sample_every=2)
    for _ in range(2):
        with profiler.step("decode", tokens=1):
            sampled = profiler.recording
            thread = threading.Thread(target=lambda: profiler.record_elapsed("elsewhere", 5))
            thread.start()
            thread.join()
    assert (sampled, profiler.recording) == (False, True)
    assert [path for path, *_ in paths(memory)] == ["/elsewhere", "/decode", "/elsewhere", "/decode"]


def test_work_that_is_no_straight_line_is_given_by_a_function_of_the_call(make: MAKE, runtime: Path) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    quadratic = BrickDefinition.of(BrickId.ATTENTION_SCORE, work=lambda n: Work(2.0 * n * n, bytes_per_element=4.0))
    for elements in (3, 5):
        with profiler.step("decode", tokens=1), profiler.brick(quadratic, elements):
            pass
    with profiler.step() as step:
        profiler.stop_brick(profiler.start_brick(quadratic), 7)
        step.name = "decode"
    (stats,) = profiler.report().bricks
    assert (stats.calls.count, stats.flops, stats.bytes) == (3, 2 * (9 + 25 + 49), 4 * 15)


def test_work_whose_function_fails_is_unknown_and_the_host_goes_on(
    make: MAKE, runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = make(recorder=RingRecorder(runtime))

    def fails(elements: int) -> Work:
        raise ZeroDivisionError(elements)

    with profiler.brick(BrickDefinition.of(BrickId.ATTENTION_SCORE, work=fails), 3):
        pass
    (stats,) = profiler.report().bricks
    assert (stats.calls.count, stats.flops) == (1, None)
    assert "ZeroDivisionError" in caplog.text


def test_tokens_are_added_to_the_step_of_the_caller(make: MAKE) -> None:
    memory = Memory()
    profiler = make(recorder=memory)
    with profiler.step("decode", tokens=1), profiler.layer(0):
        profiler.add_tokens(2)
    with pytest.raises(RuntimeError, match="outside a step"):
        profiler.add_tokens(1)
    assert memory.records[-1][3] == 3


def test_tokens_in_a_type_of_eight_bits_are_counted_beyond_it(make: MAKE) -> None:
    import numpy as np

    memory = Memory()
    profiler = make(recorder=memory)
    with profiler.step("decode", tokens=np.uint8(200)):  # type: ignore[arg-type]
        for _ in range(3):
            profiler.add_tokens(np.uint8(100))  # type: ignore[arg-type]
    assert memory.records[-1][3] == 500


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spans=st.lists(SPAN, min_size=1, max_size=30), cut=st.integers(0, 30))
def test_the_union_of_steps_is_the_time_in_which_any_of_them_ran(spans: list[tuple[int, int]], cut: int) -> None:
    import numpy as np

    from cbtop.protocol.ring_reader import Batch

    stats = NodeStats()
    step_of, part_of = np.array([[-1, 1], [-1, -1]], np.int64)
    ended = sorted(((start, start + length) for start, length in spans), key=lambda span: span[1])
    for part in (ended[:cut], ended[cut:]):
        start, end = (np.array(column, np.int64) for column in zip(*part, strict=True)) if part else ([], [])
        if part:
            ones = np.ones(len(part), np.int64)
            stats.add(Batch(ones, 0 * ones, start, end, ones, 0), step_of, part_of)
    covered = {moment for start, end in ended for moment in range(start, end)}
    assert stats.rare("union_ns", (1,)) == len(covered)
    assert stats.rare("first_ns", (1,)) == min(start for start, _ in ended)
    assert stats.rare("last_ns", (1,)) == max(end for _, end in ended)


def test_steps_that_end_out_of_order_leave_nobody_inside(make: MAKE) -> None:
    memory = Memory()
    profiler = make(recorder=memory, sample_every=1)
    outer, inner = profiler.step("outer", 1), profiler.step("inner", 2)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert (profiler.parts.paths.own.position.step, profiler.parts.paths.own.position.scope.parent) == (None, None)
    with profiler.step("after", tokens=3), profiler.brick("a"):
        pass
    assert [(path, elements) for path, _, elements, _ in paths(memory)] == [
        ("/outer", 1),
        ("/inner", 2),
        ("/after/a", 1),
        ("/after", 3),
    ]
    assert len(profiler.parts.steps.lanes.free) == 15


def test_a_step_may_be_entered_again_also_where_it_is_not_sampled(make: MAKE) -> None:
    memory = Memory()
    profiler = make(recorder=memory, sample_every=2)
    step = profiler.step("decode", tokens=1)
    for _ in range(4):
        with step, profiler.brick("a"):
            pass
    assert [path for path, *_ in paths(memory)] == ["/decode/a", "/decode", "/decode"] * 2


def test_a_clock_that_fails_as_a_step_begins_leaves_nobody_inside(make: MAKE) -> None:
    good = iter(range(100))
    fails = False

    def clock_ns() -> int:
        if fails:
            raise OSError("no clock")
        return next(good)

    profiler = make(recorder=Memory(), clock_ns=clock_ns)
    for name in ("decode", None):
        fails = True
        with profiler.step(name):
            pass
        fails = False
        profiler.enable()
        position = profiler.parts.paths.own.position
        assert (position.step, position.scope.parent, position.held, position.lane) == (None, None, None, 0)
    assert len(profiler.parts.steps.lanes.free) == 15


def test_a_step_is_of_its_own_phase_whatever_runs_around_it(make: MAKE, runtime: Path) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    profiler.graph_push_scope(Function("generate"))
    for _ in range(3):
        with profiler.step("decode", tokens=1, model="target"):
            with profiler.brick("a"), profiler.step("decode", tokens=4, model="draft"), profiler.brick("b"):
                pass
            with profiler.brick("c"):
                pass
        with profiler.brick("between"):
            pass
    profiler.graph_pop_scope()
    nodes, stats = _counted(runtime)
    target, draft = (PhaseTotals.of(nodes, stats, name) for name in ("target decode", "draft decode"))
    assert (target.tokens, draft.tokens) == (3, 12)
    assert ([n.name for n in target.nodes], [n.name for n in draft.nodes]) == (["a", "decode", "c"], ["b"])
    assert all(t.closed_ns[n.id] == t.total_ns[n.id] for t in (target, draft) for n in t.nodes)
    (between,) = [n for n in nodes.nodes if n.name == "between"]
    assert nodes[between.parent or 0].name == "generate"


def test_steps_of_two_generators_in_turns_are_all_counted(make: MAKE) -> None:
    memory = Memory()
    profiler = make(recorder=memory)

    def stream(name: str) -> Iterator[None]:
        for _ in range(5):
            with profiler.step(name, tokens=1), profiler.brick("a"):
                yield

    for _ in zip(stream("one"), stream("two"), strict=True):
        pass
    ended = Counter(path for path, *_ in paths(memory) if path.count("/") == 1)
    assert (ended, profiler.parts.paths.own.position.step) == ({"/one": 5, "/two": 5}, None)
    with pytest.raises(RuntimeError, match="outside a step"):
        profiler.add_tokens(1)


def test_a_step_that_nobody_ended_gives_its_lane_back_when_it_goes(make: MAKE) -> None:
    profiler = make(recorder=Memory())

    def leave_it_open() -> None:
        profiler.step("decode").__enter__()

    for _ in range(20):
        thread = threading.Thread(target=leave_it_open)
        thread.start()
        thread.join()
    gc.collect()
    assert sorted(profiler.parts.steps.lanes.free) == [lane << LANE_SHIFT for lane in range(15)]


def test_timings_deferred_until_their_step_has_ended_lie_in_it(make: MAKE, runtime: Path) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    for number in range(4):
        with profiler.step("decode", tokens=1) as step:
            begun_ns = profiler.elapsed_ns()
            profiler.record_deferred("gpu", begun_ns, end_ns=begun_ns + 1)
            if number == 3:
                step.cancel()
        if number < 3:
            profiler.finalize()
    nodes, stats = _counted(runtime)
    totals = PhaseTotals.of(nodes, stats, "decode")
    assert [totals.closed_ns[n.id] for n in totals.nodes] == [3]


def test_a_cancelled_step_in_a_shared_lane_takes_no_time_from_other_steps(make: MAKE, runtime: Path) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    held = [profiler.step("other") for _ in range(15)]
    begun, go_on = threading.Barrier(16), threading.Event()

    def hold(step: ActiveStep) -> None:
        with step:
            begun.wait()
            go_on.wait()

    threads = [threading.Thread(target=hold, args=(step,)) for step in held]
    for thread in threads:
        thread.start()
    begun.wait()
    with profiler.step("decode", tokens=1):
        with profiler.brick("a"):
            pass
        cancelling = threading.Thread(target=lambda: _cancelled(profiler))
        cancelling.start()
        cancelling.join()
    go_on.set()
    for thread in threads:
        thread.join()
    nodes, stats = _counted(runtime)
    totals = PhaseTotals.of(nodes, stats, "decode")
    (brick,) = totals.nodes
    assert totals.closed_ns[brick.id] == totals.total_ns[brick.id] > 0
    assert totals.tokens == 1


def _cancelled(profiler: BrickProfiler) -> None:
    with profiler.step("decode", tokens=1) as step:
        step.cancel()


@pytest.mark.parametrize("wrong", [{"label": 0}, {"backend": None}, {"category": "FFN"}])
def test_what_cannot_be_said_of_a_brick_costs_that_brick_and_no_other(
    make: MAKE, runtime: Path, wrong: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    known: dict[str, object] = {"name": "wrong", "category": BrickCategory.FFN}
    odd = BrickDefinition(**(known | wrong))  # type: ignore[arg-type]
    for brick in ("a", odd, "b"):
        with profiler.brick(brick):
            pass
    report = profiler.report()
    assert ({stats.name for stats in report.bricks}, report.rejected) == ({"a", "b"}, 1)
    source = source_of(runtime)
    source.poll()
    assert (source.state, source.state_message().rejected) == ("live", 1)
    assert len(caplog.messages) == 1


def test_a_signal_handlers_own_step_does_not_take_over_a_step_that_begins(make: MAKE) -> None:
    at, left, profiler = 0, -1, make(recorder=Memory())

    def handler(*_: object) -> None:
        with profiler.step("of the handler"):
            pass

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal left  # number of opcodes left
        frame.f_trace_opcodes = frame.f_code is ActiveStep.__enter__.__code__
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)
        return trace

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        while left < 0:
            memory, left, at = Memory(), at, at + 1
            profiler = make(recorder=memory)
            sys.settrace(trace)
            with profiler.step("decode"):
                sys.settrace(None)
                profiler.add_tokens(7)
            assert memory.records[-1][3] == 7
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, before)
    assert at > 50


def test_what_runs_after_a_step_whose_end_a_signal_cut_short_lies_in_nothing(make: MAKE) -> None:
    class Interrupted(dict[Any, None]):
        def __iter__(self) -> Any:
            raise KeyboardInterrupt

    memory = Memory()
    profiler = make(recorder=memory)
    step = profiler.step("decode")
    step.__enter__()
    # The end of a step reads this attribute first. The attribute raises KeyboardInterrupt then.
    step.adopted = Interrupted({0: None})
    with pytest.raises(KeyboardInterrupt):
        step.__exit__(None, None, None)
    for _ in range(2):
        with profiler.step("decode"), profiler.brick("a"):
            pass
    assert [path for path, *_ in paths(memory)] == 2 * ["/decode/a", "/decode"]


def test_a_phase_whose_steps_were_all_cancelled_hides_nothing_from_a_viewer(make: MAKE, runtime: Path) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    with profiler.step("warm up") as step:
        step.cancel()
    with profiler.step("decode", tokens=1), profiler.brick("a"):
        pass
    view = source_view(record_of(source_of(runtime)))
    assert ([steps.phase for steps in view.phases], view.loss.dropped) == (["decode"], 0)


FORKS = """
import os, sys
from pathlib import Path
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
p = BrickProfiler(recorder=RingRecorder(Path(sys.argv[1])), sample_every=int(sys.argv[2]))
with p.step("decode", tokens=1):
    with p.layer(0), p.brick("around"):
        timer = p.start_brick("started")
        child = os.fork()
        if not child:
            with p.brick("of the child"): pass
            with p.step("of the child", 1), p.brick("inside"): pass
        p.stop_brick(timer, 1)
        p.add_tokens(1)
if child:
    assert os.waitpid(child, 0)[1] == 0
with p.step("after", 1): pass
report = p.report()
steps = sorted(name for name, books in report.books for _ in range(books.wall_ns > 0))
print("parent" if child else "child", report.steps, report.tokens, ",".join(steps),
      ",".join(sorted(b.name for b in report.bricks)), sum(books.unmatched_calls for _, books in report.books),
      report.rejected,
      flush=True)
"""


@of_either
@pytest.mark.parametrize("sample_every", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_a_step_that_runs_as_its_process_forks_is_counted_once_by_the_parent(
    implementation: str, runtime: Path, sample_every: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(runtime), sample_every], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert sorted(done.stdout.splitlines()) == [
        "child 2 2 after,of the child inside,of the child 0 0",
        "parent 2 3 after,decode around,started 0 0",
    ]


TOLD_IN_A_FORK = """
import os, sys
from pathlib import Path
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
p = BrickProfiler(recorder=RingRecorder(Path(sys.argv[1])))
with p.step("decode", tokens=1) as step:
    step.wait()
child = os.fork()
step.told([(("late",), 10, 20, 1)])
if child:
    assert os.waitpid(child, 0)[1] == 0
print("parent" if child else "child", p.report().steps, flush=True)
"""


@of_either
def test_a_step_that_waits_during_a_fork_is_recorded_by_the_parent_alone(implementation: str, runtime: Path) -> None:
    run = [sys.executable, "-c", TOLD_IN_A_FORK, str(runtime)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert sorted(done.stdout.splitlines()) == ["child 0", "parent 1"]


@pytest.mark.parametrize("meanwhile", ["disable", "close"])
def test_a_step_that_is_told_of_when_its_profiler_is_off_raises_nothing(
    make: MAKE, runtime: Path, meanwhile: str
) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    alike = AlikeParts([("late",)])
    for _ in range(2):
        with profiler.step("decode", tokens=1) as step:
            step.wait()
        getattr(profiler, meanwhile)()
        step.record_known_parts(alike, [10], [20], [1])
        with profiler.step("decode", tokens=1):
            pass
        profiler.enable()


def test_trouble_with_a_place_of_parts_that_are_alike_is_not_the_hosts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    profiler = BrickProfiler(recorder=Memory())
    with profiler.step("decode", tokens=1) as step:
        step.wait()
    step.record_known_parts(AlikeParts([(["no key"],)]), [10], [20], [1])  # type: ignore[list-item]
    assert "nothing is recorded from here on" in caplog.text


def test_a_process_in_its_first_step_is_live_even_if_the_step_has_no_name(make: MAKE, runtime: Path) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    with profiler.step(), profiler.brick("a"):
        source = source_of(runtime)
        source.poll()
        assert source.state == "live"
    profiler.close()


def test_alike_parts_are_recorded_as_if_told_one_by_one_and_looked_up_once() -> None:
    norm, product = BrickDefinition.of(BrickId.RMS_NORM), BrickDefinition.of(BrickId.LM_HEAD)
    alike = AlikeParts([((NodeKind.LAYER, 0), norm), ((NodeKind.LAYER, 0),), (product,)])
    found = []
    for _ in range(3):
        profiler = BrickProfiler(recorder=(recorder := Memory()), clock_ns=count(1_000, 1_000).__next__)
        for is_alike in (False, True, True):
            with profiler.step("decode", tokens=1) as step:
                step.wait()
            times, elements = ([10, 10, 50], [30, 40, 90]), [7, 1, 9]
            if is_alike:
                step.record_known_parts(alike, *times, elements)
            else:
                step.told(list(zip(alike.keys, *times, elements, strict=True)))
        found.append(paths(recorder))
    first, second, third = ([record[0] for record in found[0]][at : at + 4] for at in (0, 4, 8))
    assert first == second == third == ["/decode/0/RmsNorm", "/decode/0", "/decode/LmHead", "/decode"]
    # Each of the three profilers finds the same paths, so the records are equal.
    assert found[0] == found[1] == found[2]
    assert [record[1:3] for record in found[0][4:7]] == [(20, 7), (30, 1), (40, 9)]


def test_of_steps_past_the_bound_on_nodes_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "MAX_NODES", 1)
    profiler = BrickProfiler(recorder=(recorder := Memory()))
    alike = AlikeParts([("late",)])
    for name in ("prefill", "decode", "decode"):
        with profiler.step(name, tokens=1) as step:
            step.wait()
        step.record_known_parts(alike, [10], [20], [1])
    assert len(recorder.records) == 6
    assert len(alike._known) == 1  # Parts are stored only for the step that has a node.
