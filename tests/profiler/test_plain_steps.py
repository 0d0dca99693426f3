"""Tests of plain steps, which are only timed as a whole: every step is counted.

The bricks in a step are known only for sampled steps.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, cycle, repeat
from math import ceil
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbtop.client.busy import SLICE_S, BusySlices, Slice
from cbtop.client.source_record import SourceRecord
from cbtop.client.store import Store
from cbtop.daemon.post_mortem import post_mortem
from cbtop.exporters import EXPORTERS
from cbtop.exporters.base import RecordedProcess
from cbtop.exporters.recorded import process_of_files
from cbtop.profiler.analysis.graph.nodes import Function
from cbtop.profiler.instrument.governor import GovernedProfiler
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.profiler.session import Report
from cbtop.profiler.steps import ActiveStep
from cbtop.protocol.messages import StatsUpdate
from cbtop.protocol.ring import FLAG_CANCELLED, FLAG_FAILED, FLAG_PLAIN, RingWriter
from cbtop.protocol.ring_reader import RingReader
from cbtop.protocol.vocabulary import BrickCategory
from cbtop.reports import REPORTS
from cbtop.telemetry import metrics
from cbtop.telemetry.snapshot import snapshot
from cbtop.telemetry.steps import whole_step
from cbtop.tui.views.books import books_equation
from cbtop.tui.views.header import _tiles
from cbtop.viewmodels.merge import merged_view
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import SourceView, source_view
from cbtop.viewmodels.steps import StepsView
from tests.cbtop.recorded import Clock, apply, record_of, source_of
from tests.profiler.conftest import of_either
from tests.profiler.memory import Memory, is_plain

MAKE = type[BrickProfiler]
NAMES = ("decode", "prefill", "verify")


@pytest.fixture
def make(profiler_module: ModuleType) -> MAKE:
    made: MAKE = profiler_module.BrickProfiler
    return made


def sampled_as(profiler: BrickProfiler, decisions: Iterator[bool]) -> BrickProfiler:
    """Let `decisions` decide which outermost steps of `profiler` are recorded with their bricks.

    Returns the profiler.
    """
    profiler.parts.steps.is_sampled = lambda _key: next(decisions)
    return profiler


def one_in_two(first: bool = True) -> Iterator[bool]:
    while True:
        yield first
        first = not first


# --- random mixes of steps, compared with a plain oracle --------------------------------------------------------


@dataclass
class Made:
    """A step that has run, as counted by the test itself."""

    name: str | None
    tokens: object
    start_ns: int
    outer: Made | None
    recorded: bool
    end_ns: int = 0
    failed: bool = False
    cancelled: bool = False
    bricks_ns: list[tuple[str, int]] = field(default_factory=list)
    inside_ns: int = 0  # time of nested steps

    @property
    def took_ns(self) -> int:
        return self.end_ns - self.start_ns


OPERATIONS = st.one_of(
    st.tuples(
        st.just("begin"),
        st.integers(0, 2),
        st.sampled_from([None, "decode", *NAMES]),
        st.one_of(st.integers(0, 50), st.just("no count")) | st.integers(0, 50),
    ),
    st.tuples(st.just("brick"), st.integers(0, 2), st.sampled_from("ab"), st.integers(0, 30)),
    st.tuples(
        st.just("end"),
        st.integers(0, 2),
        st.sampled_from(["well", "well", "failed", "cancelled", "renamed"]),
        st.sampled_from(NAMES),
    ),
    st.tuples(st.just("sleep"), st.just(0), st.just(""), st.integers(0, 100)),
)


class Host:
    """A program that runs random operations and stores the expected steps.

    The operations run in three threads, in turns.
    """

    def __init__(self, profiler: BrickProfiler, clock: Clock, decisions: Iterator[bool]) -> None:
        self.ended: list[Made] = []
        self._profiler = sampled_as(profiler, map(self._decided, decisions))
        self._clock = clock
        self._last = True
        self._open: dict[int, list[tuple[ActiveStep, Made]]] = {thread: [] for thread in range(3)}
        self._threads = [ThreadPoolExecutor(1) for _ in range(3)]

    def _decided(self, decision: bool) -> bool:
        self._last = decision
        return decision

    def run(self, operations: list[tuple[str, int, object, object]]) -> None:
        try:
            for operation in operations:
                self._threads[operation[1]].submit(self._do, *operation).result()
            for thread, opened in self._open.items():
                while opened:
                    self._threads[thread].submit(self._do, "end", thread, "well", "").result()
        finally:
            for executor in self._threads:
                executor.shutdown()

    def _do(self, what: str, thread: int, name: object, value: object) -> None:
        opened, profiler, clock = self._open[thread], self._profiler, self._clock
        outer = opened[-1][1] if opened else None
        if what == "sleep":
            clock.sleep_us(value)  # type: ignore[arg-type]
        elif what == "begin" and len(opened) < 3:
            step = profiler.step(name, value)  # type: ignore[arg-type]
            step.__enter__()
            is_recorded = self._last if outer is None else outer.recorded
            opened.append((step, Made(name, value, clock.now_ns, outer, is_recorded)))  # type: ignore[arg-type]
        elif what == "brick":
            before_ns = clock.now_ns
            with profiler.brick(str(name)):
                clock.sleep_us(value)  # type: ignore[arg-type]
            if outer is not None:
                outer.bricks_ns.append((str(name), clock.now_ns - before_ns))
        elif what == "end" and opened:
            step, made = opened.pop()
            if made.name is None or (name == "renamed" and not made.recorded):
                step.name = made.name = str(value) or "step"
            if name == "cancelled":
                step.cancel()
            made.failed, made.cancelled, made.end_ns = name == "failed", name == "cancelled", clock.now_ns
            error = ValueError("mine") if made.failed else None
            step.__exit__(type(error) if error else None, error, None)
            if made.outer is not None:
                made.outer.inside_ns += made.took_ns
            self.ended.append(made)


def union_ns(steps: list[Made]) -> int:
    total, reached = 0, 0
    for start, end in sorted((step.start_ns, step.end_ns) for step in steps):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def held_against(view: SourceView, ended: list[Made]) -> None:
    """Compare the view with the steps that ran, as the test has counted them."""
    # Steps inside a plain step leave no record.
    there = [step for step in ended if step.outer is None or step.recorded]
    by_name: dict[str, list[Made]] = defaultdict(list)
    for step in there:
        if not step.cancelled:
            by_name[str(step.name)].append(step)
    assert {phase.phase for phase in view.phases} == set(by_name)
    seen = [step for steps in by_name.values() for step in steps]
    wall = max((step.end_ns for step in seen), default=0) - min((step.start_ns for step in seen), default=0)
    assert view.time_range is None or (view.time_range.in_steps_us is None) == any(
        one.is_sample for one in view.phases
    )
    for phase in view.phases:
        steps = by_name[phase.phase]
        recorded = [step for step in steps if step.recorded]
        assert (phase.count, phase.recorded) == (len(steps), len(recorded))
        assert phase.tokens == sum(step.tokens for step in steps if isinstance(step.tokens, int))
        union = union_ns(steps)
        assert phase.union_us == pytest.approx(union / 1e3)
        durations = sorted(step.took_ns for step in steps)
        assert phase.mean_us == pytest.approx(sum(durations) / len(steps) / 1e3)
        for shown, part in ((phase.p50_us, 0.50), (phase.p99_us, 0.99)):
            assert shown == pytest.approx(durations[max(1, ceil(part * len(steps))) - 1] / 1e3, rel=0.01)
        is_counted = phase.tokens > 0 and all(isinstance(step.tokens, int) for step in steps)
        in_steps = pytest.approx(1e9 * phase.tokens / union) if is_counted and union else None
        assert phase.tokens_per_sec_in_steps == in_steps
        # The figures are a sample if some steps may have left no record: no plain step of this name was recorded, or
        # a step was inside a plain step.
        is_inside = any(step.name == phase.phase and step.outer is not None for step in there)
        assert phase.is_sample == (len(recorded) == len(steps) or is_inside)
        is_known = not phase.is_sample and is_counted and wall
        assert phase.tokens_per_sec == (pytest.approx(1e9 * phase.tokens / wall) if is_known else None)
        is_known = not phase.is_sample and union
        assert phase.at_once == (pytest.approx(sum(durations) / union) if is_known else None)


def books_held_against(view: SourceView, ended: list[Made]) -> None:
    recorded = [step for step in ended if step.name == view.phase and step.recorded and not step.cancelled]
    wall = sum(step.took_ns for step in recorded)
    bricks: dict[str, int] = defaultdict(int)
    for step in recorded:
        for name, took_ns in step.bricks_ns:
            bricks[name] += took_ns
    books = view.books
    assert books is not None
    assert books.close
    assert books.wall_us == pytest.approx(wall / 1e3)
    assert books.bricks_us == pytest.approx(sum(bricks.values()) / 1e3)
    left = wall - sum(bricks.values()) - sum(step.inside_ns for step in recorded)
    assert books.unattributed_us == pytest.approx(left / 1e3, abs=1e-6)
    tokens = [step.tokens for step in recorded]
    for row in view.bricks:
        took_ns = bricks.get(row.name, 0)
        assert row.percent == (pytest.approx(100 * took_ns / wall) if wall else None)
        total = sum(one for one in tokens if isinstance(one, int))
        is_known = took_ns and total and all(isinstance(one, int) for one in tokens)
        assert row.us_per_token == (pytest.approx(took_ns / total / 1e3) if is_known else None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(OPERATIONS, max_size=60), st.lists(st.booleans(), min_size=1, max_size=8))
def test_any_mix_of_plain_and_recorded_steps_is_counted_like_an_oracle(
    make: MAKE, operations: list[tuple[str, int, object, object]], pattern: list[bool]
) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("logging.Logger.warning", lambda *_: None)
        clock = Clock()
        profiler = make(clock_ns=clock, recorder=RingRecorder(Path(directory), 1 << 20), sample_every=2)
        host = Host(profiler, clock, (pattern[at % len(pattern)] for at in count()))
        first = [("begin", 0, "decode", 3), ("brick", 0, "a", 5), ("sleep", 0, "", 2), ("end", 0, "well", "")]
        host.run([*first, *first, *operations])
        report = profiler.report()
        record = record_of(source_of(Path(directory)))
        profiler.close()
    view = source_view(record)
    held_against(view, host.ended)
    assert view.loss.produced == view.loss.received
    for phase in view.phases:
        books_held_against(source_view(record, phase.phase), host.ended)
    there = [step for step in host.ended if not step.cancelled and (step.outer is None or step.recorded)]
    assert (report.steps, report.recorded_steps) == (len(there), sum(step.recorded for step in there))
    failed = record.stats.column("failed")
    steps = [node.id for node in record.nodes.children[None] if node.name in (*NAMES, "step")]
    assert failed[steps].sum() == sum(step.failed for step in there)
    known = [step for step in host.ended if step.outer is None or step.recorded]
    assert record.stats.rare("cancelled", steps) == sum(step.cancelled for step in known)
    assert report.coverage is None or 0 <= report.coverage <= 1


def decoded(directory: Path, make: MAKE, sample_every: int) -> tuple[SourceView, Report]:
    """Return the view and the report of twelve steps.

    The steps are the same each time, and one in `sample_every` steps is recorded.
    """
    clock = Clock()
    profiler = make(clock_ns=clock, recorder=RingRecorder(directory), sample_every=sample_every)
    for number in range(12):
        with profiler.step("decode", tokens=1 + number % 3) as step:
            step.sequences, step.cached = 2, 10 * number
            with profiler.layer(0), profiler.brick("a", 4):
                clock.sleep_us(80)
            clock.sleep_us(number)
        clock.sleep_us(15)
    report = profiler.report()
    view = source_view(record_of(source_of(directory)))
    profiler.close()
    return view, report


def test_the_figures_of_steps_are_equal_however_few_of_them_are_recorded(make: MAKE, tmp_path: Path) -> None:
    views = []
    for sample_every in (1, 4):
        (tmp_path / str(sample_every)).mkdir()
        view, report = decoded(tmp_path / str(sample_every), make, sample_every)
        views.append(view)
    every, few = (view.steps for view in views)
    assert isinstance(every, StepsView)
    assert isinstance(few, StepsView)
    assert (every.tokens_per_sec, every.tokens_per_sec_in_steps, every.at_once) != (None, None, None)
    assert few.recorded == 3
    assert few.recorded_mean_us != every.recorded_mean_us  # Other steps were recorded, so their mean differs.
    assert replace(few, recorded=12, recorded_mean_us=every.recorded_mean_us) == every
    assert few.sequences is not None
    assert few.sequences.steps == 12
    assert str(report).startswith("a sample, one step in 4: 12 steps (3 recorded), 24 tokens, ")
    assert report.coverage == pytest.approx(240 / 252)
    assert "80.00µs incl avg ( 95.2% excl) [3 samples]" in str(report)
    (brick,) = views[1].bricks
    assert brick.count == 3
    # The share is relative to the wall-clock time of the recorded steps.
    assert brick.percent == pytest.approx(100 * 240 / (240 + 0 + 4 + 8))
    assert brick.us_per_token == pytest.approx(240 / (1 + 2 + 3))
    (place,) = [row for row in views[1].graph if row.name == "a"]
    assert place.label.startswith("a  80.0µs")
    assert views[1].books is not None
    assert (views[1].books.wall_us, views[1].books.close) == (252.0, True)


# --- single cases -----------------------------------------------------------------------------------------------


def tags(memory: Memory, name: str) -> list[tuple[int, int]]:
    """Return (flags, elements) of the records of nodes with this name."""
    nodes = {node for node, _, _, called in memory.nodes if called == name}
    return [(tag & ~0xFFFFFF, elements) for tag, _, _, elements in memory.records if tag & 0xFFFFFF in nodes]


def test_a_plain_step_leaves_one_record_under_its_final_name(make: MAKE) -> None:
    memory = Memory()
    profiler = sampled_as(make(recorder=memory, clock_ns=count(0, 10).__next__), iter([False] * 5))
    with profiler.step(tokens=1) as step, profiler.layer(0), profiler.brick("a"):
        step.name = "late"
    with profiler.step("first", tokens=2) as step, profiler.step("inner", tokens=3), profiler.brick("b"):
        step.name = "renamed"
    with profiler.step(tokens=4):
        profiler.add_tokens(5)
        with profiler.step("inner", tokens=6):
            # The inner step is not recorded, so these tokens belong to the plain step around it.
            profiler.add_tokens(7)
    with pytest.raises(ValueError, match="mine"), profiler.step("failed", tokens=8):
        raise ValueError("mine")
    with profiler.step("cancelled", tokens=9) as step:
        step.cancel()
    assert [name for *_, name in memory.nodes] == ["late", "renamed", "step", "failed", "cancelled"]
    assert tags(memory, "late") == [(FLAG_PLAIN, 1)]
    assert tags(memory, "renamed") == [(FLAG_PLAIN, 2)]
    assert tags(memory, "step") == [(FLAG_PLAIN, 9)]
    assert tags(memory, "failed") == [(FLAG_PLAIN | FLAG_FAILED, 8)]
    assert tags(memory, "cancelled")[0][0] & FLAG_CANCELLED
    # The clock was read only at the begin and the end of each step.
    assert all(end - start == 10 for _, start, end, _ in memory.records)
    assert len(memory.records) == 5
    assert profiler.recording


def test_a_plain_step_that_was_disabled_meanwhile_leaves_nothing(make: MAKE) -> None:
    memory = Memory()
    profiler = sampled_as(make(recorder=memory), iter([False] * 3))
    with profiler.step("decode", tokens=1):
        profiler.disable()
    with profiler.step("decode", tokens=1):
        profiler.enable()
    assert not memory.records
    with profiler.step("decode", tokens=1):
        pass
    assert len(memory.records) == 1


def test_a_cancelled_plain_step_takes_nothing_of_a_recorded_one_along(make: MAKE, runtime: Path) -> None:
    clock = Clock()
    profiler = sampled_as(make(clock_ns=clock, recorder=RingRecorder(runtime)), iter([True, False]))
    with profiler.step("decode", tokens=1):
        with profiler.brick("a"):
            clock.sleep_us(10)

        def cancelled() -> None:
            with profiler.step("decode", tokens=1) as step:
                clock.sleep_us(1)
                step.cancel()

        thread = threading.Thread(target=cancelled)
        thread.start()
        thread.join()
    view = source_view(record_of(source_of(runtime)))
    assert view.books is not None
    assert (view.books.bricks_us, view.books.wall_us, view.books.cancelled) == (10.0, 11.0, 1)


def test_twenty_plain_steps_at_once_take_no_lane_of_a_recorded_one(make: MAKE, runtime: Path) -> None:
    profiler = sampled_as(make(recorder=RingRecorder(runtime)), iter([False] * 20 + [True]))

    async def serve(all_run: asyncio.Event) -> None:
        with profiler.step("decode", tokens=1):
            await all_run.wait()

    async def main() -> None:
        all_run = asyncio.Event()
        tasks = [asyncio.create_task(serve(all_run)) for _ in range(21)]
        await asyncio.sleep(0)
        assert len(profiler.parts.steps.lanes.free) == 14
        all_run.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    view = source_view(record_of(source_of(runtime)))
    assert view.books is not None
    assert view.steps is not None
    assert (view.steps.count, view.steps.recorded, view.books.in_shared_lane) == (21, 1, 0)


def test_a_plain_step_without_tokens_hides_no_time_per_token_of_others(
    make: MAKE, runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    profiler = sampled_as(make(clock_ns=clock, recorder=RingRecorder(runtime)), one_in_two())
    for tokens in (2, "none"):
        with profiler.step("decode", tokens=tokens), profiler.brick("a"):  # type: ignore[arg-type]
            clock.sleep_us(10)
    view = source_view(record_of(source_of(runtime)))
    assert view.steps is not None
    assert (view.steps.tokens_per_sec, view.bricks[0].us_per_token) == (None, 5.0)


def test_of_steps_that_also_lie_in_others_it_is_said_that_some_left_nothing(make: MAKE, runtime: Path) -> None:
    clock = Clock()
    profiler = sampled_as(
        make(clock_ns=clock, recorder=RingRecorder(runtime), sample_every=2), iter([True, False, True, False])
    )
    for _ in range(2):
        with profiler.step("verify", tokens=1), profiler.step("decode", tokens=2):
            clock.sleep_us(10)
        with profiler.step("decode", tokens=3):
            clock.sleep_us(10)
    view = source_view(record_of(source_of(runtime)))
    found = {steps.phase: (steps.count, steps.recorded, steps.is_sample) for steps in view.phases}
    assert found == {"verify": (2, 2, True), "decode": (4, 2, True)}
    text = REPORTS["text"]([view], ["bricks"], None)
    assert "decode: 4 steps (2 recorded, some inside others left nothing)" in text
    assert "verify: 2 recorded steps (others, if any, left nothing)" in text


def test_what_a_function_spends_in_plain_steps_is_not_outside_of_steps(make: MAKE, runtime: Path) -> None:
    clock = Clock()
    profiler = sampled_as(make(clock_ns=clock, recorder=RingRecorder(runtime)), one_in_two())
    profiler.graph_push_scope(Function("generate"))
    for _ in range(4):
        with profiler.step("decode", tokens=1):
            clock.sleep_us(100)
        clock.sleep_us(7)
    profiler.graph_pop_scope()
    view = source_view(record_of(source_of(runtime)))
    assert view.outside is not None
    assert view.outside.us == 28.0


FORKS = """
import asyncio, os, sys
from pathlib import Path
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder

profiler = BrickProfiler(recorder=RingRecorder(Path(sys.argv[1])))
profiler.parts.steps.is_sampled = lambda key: False

async def waits(forked):
    with profiler.step("waits", tokens=1):
        await forked.wait()

async def main():
    forked = asyncio.Event()
    other = asyncio.create_task(waits(forked))
    await asyncio.sleep(0)
    with profiler.step("forks", tokens=1):
        child = os.fork()
    forked.set()
    await other
    with profiler.step("after", tokens=1):
        pass
    if child:
        os.waitpid(child, 0)
    report = profiler.report()
    names = sorted(node.name for node in profiler.parts.recorder.nodes())
    print("parent" if child else "child", report.steps, report.recorded_steps, *names, flush=True)

asyncio.run(main())
"""


@of_either
def test_plain_steps_that_run_during_a_fork_are_counted_once_by_the_parent(
    implementation: str, runtime: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(runtime)], capture_output=True, text=True, check=True, env=os.environ.copy()
    )
    assert done.stderr == ""
    assert sorted(done.stdout.splitlines()) == ["child 1 0 after", "parent 3 0 after forks waits"]


def test_tasks_that_interleave_have_each_a_plain_step_of_their_own(make: MAKE) -> None:
    memory = Memory()
    profiler = sampled_as(make(recorder=memory), one_in_two(first=False))

    async def serve(number: int) -> None:
        for _ in range(4):
            with profiler.step("decode", tokens=1):
                with profiler.brick(f"{number}"):
                    await asyncio.sleep(0)
                profiler.add_tokens(number)

    async def main() -> None:
        await asyncio.gather(*map(serve, range(5)))

    asyncio.run(main())
    assert sorted(elements for _, elements in tags(memory, "decode")) == sorted([1, 2, 3, 4, 5] * 4)
    assert sum(is_plain(tag) for tag, *_ in memory.records) == 10
    assert sum(len(tags(memory, f"{number}")) for number in range(5)) == 10


class Device:
    """A device that uses a counter as its clock, and counts how often the profiler waits for it."""

    def __init__(self) -> None:
        self.mark = count(0, 10).__next__
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1

    def time_ns(self, mark: object, /) -> int:
        assert isinstance(mark, int)
        return 1_000_000 + mark


def test_a_plain_step_has_the_times_of_its_device_and_waits_for_it_never(
    make: MAKE, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, device = Memory(), Device()
    profiler = sampled_as(make(recorder=memory, device_clock=device), iter([False] * 9 + [True] + [False] * 30))
    for _ in range(9):
        with profiler.step("decode", tokens=1), profiler.brick("a"):
            pass
    assert (device.waits, memory.records, profiler.pending_count) == (0, [], 9)
    with profiler.step("decode", tokens=1):
        pass
    assert (device.waits, len(memory.records)) == (1, 10)
    assert all(1_000_000 <= start == end - 10 for tag, start, end, _ in memory.records if is_plain(tag))
    monkeypatch.setattr(sys.modules[type(profiler.parts.paths.own).__module__], "MAX_PENDING", 20)
    for _ in range(30):
        with profiler.step("decode", tokens=1):
            pass
    # The profiler waits when its pending records reach a limit.
    assert (device.waits, profiler.pending_count) == (2, 10)


# --- from the records to every output ---------------------------------------------------------------------------


@contextmanager
def overlapping(directory: Path, make: MAKE) -> Iterator[Callable[[], Path]]:
    """Three times, record a step while a plain step of another thread runs, and then another plain step."""
    clock = Clock()
    profiler = sampled_as(make(clock_ns=clock, recorder=RingRecorder(directory)), cycle([False, True, False]))

    def recorded() -> None:
        with profiler.step("decode", tokens=1), profiler.brick("a", 3):
            clock.sleep_us(30)

    for _ in range(3):
        with profiler.step("decode", tokens=7):
            clock.sleep_us(10)
            thread = threading.Thread(target=recorded)
            thread.start()
            thread.join()
            clock.sleep_us(10)
        with profiler.step("decode", tokens=8):
            clock.sleep_us(10)
    (ring,) = directory.glob("*.ring")
    yield lambda: ring
    profiler.close()


def test_a_trace_of_a_process_holds_no_plain_step(make: MAKE, runtime: Path) -> None:
    with overlapping(runtime, make) as ring:
        reader = RingReader(ring())
        batch = reader.read()
        assert reader.newest_end_ns() == int(batch.end_ns[-1])
        reader.close()
    record = record_of(source_of(runtime))
    step = whole_step(batch, record.nodes)
    assert step is not None
    assert [record.nodes[node].name for node in step.node.tolist()] == ["a", "decode"]
    assert step.elements.tolist() == [3, 1]


def written(name: str, recorded: RecordedProcess) -> bytes:
    with tempfile.TemporaryFile() as out:
        EXPORTERS[name].write([recorded], out)
        out.seek(0)
        return out.read()


@pytest.mark.parametrize("name", EXPORTERS)
def test_in_an_export_a_plain_step_is_a_slice_in_which_nothing_lies(make: MAKE, runtime: Path, name: str) -> None:
    with overlapping(runtime, make) as ring:
        recorded = process_of_files(ring(), ring().with_suffix(".catalog"))
    records = list(recorded.records)
    assert [record.plain for record in records] == [False, False, True, True] * 3
    data = written(name, recorded)
    if name == "chrome-trace":
        events = [event for event in json.loads(data)["traceEvents"] if event["ph"] == "X"]
        plain = [event for event in events if event["args"].get("plain")]
        assert len(plain) == 6
        assert {event["tid"] for event in plain}.isdisjoint(event["tid"] for event in events if event not in plain)
    assert data


def test_in_dot_a_plain_step_is_no_run_of_the_graph(make: MAKE, runtime: Path) -> None:
    profiler = sampled_as(make(recorder=RingRecorder(runtime)), cycle([True, False, False]))
    for _ in range(6):
        with profiler.step("decode", tokens=1):
            for _ in range(3):
                profiler.graph_record_poll("task", 1_000, is_done=False)
    (ring,) = runtime.glob("*.ring")
    assert b"polls:3 " in written("dot", process_of_files(ring, ring.with_suffix(".catalog")))


def test_the_last_seconds_hold_plain_steps_and_bricks_of_recorded_ones(make: MAKE) -> None:
    clock = Clock()
    profiler = sampled_as(make(clock_ns=clock, recorder=RingRecorder()), iter([True, False, False, True, True]))
    with profiler.step("decode", tokens=1), profiler.brick("a"):
        clock.sleep_us(2_000_000)
    with profiler.step("decode", tokens=1):
        clock.sleep_us(1_000_000)
    # This step begins before the window of the last seconds and ends in the window.
    with profiler.step("decode", tokens=10) as step:
        clock.sleep_us(500_000)

        def in_another_thread() -> None:
            with profiler.step("decode", tokens=100):

                def in_a_third() -> None:  # This step uses lane 1, because the plain steps occupy no lane.
                    with profiler.step("decode", tokens=1000), profiler.brick("b"):
                        clock.sleep_us(100_000)

                _in_thread(in_a_third)

        _in_thread(in_another_thread)
        step.tokens = 10
    report = profiler.report(window_s=0.3)
    assert (report.steps, report.recorded_steps, report.tokens) == (2, 2, 1100)
    assert [stats.name for stats in report.bricks] == ["b"]
    assert (report.wall_ns, report.recorded_ns) == (200_000_000, 200_000_000)
    whole = profiler.report()
    assert (whole.steps, whole.recorded_steps, whole.tokens) == (5, 3, 1112)


def _in_thread(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_a_call_that_is_loose_in_any_lane_is_no_plain_step_and_has_a_time(runtime: Path) -> None:
    writer = RingWriter(runtime / "a.ring")
    for lane in range(16):
        # This call was in no step (flag 5, loose), so it does not count.
        writer.record(1 | (5 << 25) | lane << 28, 10, 20 + lane, 1)
        writer.record(1 | (1 << 25) | lane << 28, 10, 20 + lane, 1)  # cancelled
    writer.record(1 | FLAG_PLAIN | FLAG_FAILED, 10, 70, 1)
    writer.record(1 | 1 << 27, 1 << 40, 1 << 41, 0)  # amounts
    reader = RingReader(writer.path)
    batch = reader.read()
    assert batch.are(FLAG_PLAIN).nonzero()[0].tolist() == [32]
    assert len(batch.calls().node) == 17
    assert reader.newest_end_ns() == 70
    reader.close()


def half_plain(directory: Path, make: MAKE, us: float = 100) -> SourceRecord:
    """Record eight steps. Recorded steps take `us` in one brick, and plain steps take four times as long."""
    directory.mkdir(exist_ok=True)
    clock = Clock()
    profiler = sampled_as(make(clock_ns=clock, recorder=RingRecorder(directory), sample_every=2), one_in_two())
    for number in range(8):
        with profiler.step("decode", tokens=1 + 4 * (number % 2)), profiler.brick("a"):
            clock.sleep_us(us * (1 + 3 * (number % 2)))
    record = record_of(source_of(directory))
    profiler.close()
    return record


def test_a_merge_sums_plain_steps_and_takes_brick_time_of_recorded_ones(make: MAKE, tmp_path: Path) -> None:
    records = [half_plain(tmp_path / str(us), make, us) for us in (100, 110)]
    for rank, one in enumerate(records):
        assert one.hello is not None
        one.hello = replace(one.hello, rank=rank, world_size=2)
    summed = merged_view(records, MergeMode.SUM)
    assert summed.steps is not None
    assert (summed.steps.count, summed.steps.recorded, summed.steps.tokens) == (16, 8, 48)
    assert summed.steps.tokens_per_sec == pytest.approx(24e6 / 2000 + 24e6 / 2200)
    assert summed.bricks[0].us_per_token == pytest.approx(105)
    assert summed.books is not None
    assert (summed.books.wall_us, summed.books.unattributed_us) == (840.0, 0.0)
    ranks = merged_view(records, MergeMode.RANKS).ranks
    assert ranks is not None
    assert ranks.rows[0].us == pytest.approx((100, 110))


def test_what_a_rank_is_busy_with_is_a_step_of_those_recorded(make: MAKE, tmp_path: Path) -> None:
    slices = []
    for decisions in (one_in_two(), repeat(True)):
        directory = tmp_path / str(len(slices))
        directory.mkdir()
        clock, busy = Clock(), BusySlices()
        profiler = sampled_as(make(clock_ns=clock, recorder=RingRecorder(directory)), decisions)
        for number in range(8):
            with profiler.step("decode", tokens=1), profiler.brick("a"):
                clock.sleep_us(100)
            if number % 2:
                record = record_of(source_of(directory))
                busy.tick((number + 1) * round(SLICE_S * 1e9), record.nodes, record.stats)
        slices.append(busy.slices(record.nodes, "decode"))
    brick = ("a", BrickCategory.OTHER)
    assert slices[0] == [Slice(1, 100_000, {brick: 100_000})] * 3
    assert slices[1] == [Slice(2, 200_000, {brick: 200_000})] * 3


def test_metrics_count_every_step_and_say_how_many_the_bricks_are_of(make: MAKE, runtime: Path) -> None:
    store = Store()
    record = half_plain(runtime, make)
    store.sources[record.key] = record
    found = snapshot(store, 1)
    (duration,) = [point.value for point in found[metrics.STEP_DURATION]]
    assert isinstance(duration, metrics.DurationHistogram)
    assert (sum(duration.counts), duration.total_ns) == (8, 2_000_000)
    names = (metrics.TOKENS, metrics.RECORDED_STEPS, metrics.RECORDED_TOKENS)
    assert [[point.value for point in found[metric]] for metric in names] == [[24], [4], [4]]


def test_the_last_seconds_of_a_viewer_hold_both(make: MAKE, runtime: Path) -> None:
    clock, store = Clock(), Store(10.0)
    profiler = sampled_as(make(clock_ns=clock, recorder=RingRecorder(runtime)), one_in_two())
    source = None
    for second in range(1, 31):
        # Run four steps per second. If the window of the last seconds had fewer than 20 recorded steps, bricks would
        # cover all steps.
        for _ in range(4):
            with profiler.step("decode", tokens=3), profiler.brick("a"):
                clock.sleep_us(100 if second < 15 else 400)
        source = source or source_of(runtime)
        source.poll()
        messages = source.snapshot()
        at_ns = second * 10**9
        apply(store, [replace(m, monotonic_ns=at_ns) if isinstance(m, StatsUpdate) else m for m in messages])
    assert source is not None
    view = source_view(store.sources[source.key], window=True)
    assert view.steps is not None
    assert view.books is not None
    assert (view.steps.count, view.steps.recorded, view.steps.tokens, view.bricks[0].count) == (40, 20, 120, 20)
    assert (view.books.wall_us, view.books.bricks_us, view.bricks[0].us_per_token) == (8000.0, 8000.0, 400 / 3)
    assert view.steps.tokens_per_sec == pytest.approx(12)


def test_the_screen_shows_books_of_a_recorded_step_and_how_many_there_are(make: MAKE, runtime: Path) -> None:
    view = source_view(half_plain(runtime, make))
    assert view.books is not None
    equation = "".join(text for text, _ in books_equation(view, view.books, 80))
    assert equation.startswith("wall 100.0 µs = bricks 100.0")
    assert "8 4 recorded" in "".join(text for line in _tiles(view, 200) for text, _ in line)


KILLED = """
import os
from itertools import cycle
from cbtop.profiler.profiler import BrickProfiler

profiler = BrickProfiler()
profiler.parts.steps.is_sampled = lambda key, turns=cycle([True, False, False]): next(turns)
for number in range(9):
    with profiler.step("decode", tokens=1):
        with profiler.brick("first"):
            if number == 6:
                os.kill(os.getpid(), 9)
        with profiler.brick("second"):
            pass
"""


def test_what_a_killed_process_was_in_is_told_by_its_recorded_steps(runtime: Path) -> None:
    python = os.environ | {"CBTOP_PURE_PYTHON": "1", "CBTOP_RUNTIME_DIR": str(runtime)}
    subprocess.run([sys.executable, "-c", KILLED], env=python, check=False)
    (ring,) = runtime.glob("*.ring")
    found = post_mortem(ring)
    assert [one.path for one in found.in_flight] == ["decode → first"]
    assert len(found.steps) == 6


def test_the_governor_counts_what_a_plain_step_pays_for_its_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()

    class Slow(Memory):
        def record(self, tag: int, start_ns: int, end_ns: int, elements: int) -> None:
            clock.sleep_us(7)
            super().record(tag, start_ns, end_ns, elements)

    monkeypatch.setattr("cbtop.protocol.clock.perf_counter_ns", clock)
    profiler = GovernedProfiler(1, recorder=Slow())
    sampled_as(profiler, repeat(False))
    for _ in range(3):
        with profiler.step("decode", tokens=1) as step:
            clock.sleep_us(100)
            step.sequences = 4
    # Each step cost two readings of 7 µs: one for the step, and one for its amount of work.
    assert list(profiler.governor.own_ns) == [14_000] * 3
