"""Tests of concurrency: threads, asyncio and trio tasks, greenlets and executors each have their own current node."""

from __future__ import annotations

import asyncio
import contextvars
import random
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import MAX_NODE
from cbtop.protocol.ring_reader import Batch
from tests.cbtop.recorded import source_of
from tests.profiler.conftest import of_either
from tests.profiler.memory import Memory

MAKE = type[BrickProfiler]
Program = list[list[object]]
Pause = Callable[[], Awaitable[None]]

# What a task runs in the test: steps with bricks, and bricks inside these.
bricks = st.recursive(
    st.tuples(st.sampled_from("abc"), st.just(())),
    lambda inner: st.tuples(st.sampled_from("abc"), st.lists(inner, max_size=2).map(tuple)),
    max_leaves=4,
)
programs = st.lists(st.lists(st.lists(bricks, max_size=3), min_size=1, max_size=3), min_size=1, max_size=5)


@pytest.fixture
def make(profiler_module: ModuleType) -> MAKE:
    made: MAKE = profiler_module.BrickProfiler
    return made


class Ticks:
    """A fake clock that is different in each task. Other tasks do not advance it."""

    def __init__(self) -> None:
        self.mine: contextvars.ContextVar[list[int]] = contextvars.ContextVar("mine")

    def __call__(self) -> int:
        now = self.mine.get()
        now[0] += 10
        return now[0]


async def _run(
    profiler: BrickProfiler, number: int, program: list[list[object]], pause: Callable[[], Awaitable[None]]
):
    for tokens, step in enumerate(program):
        with profiler.step(f"phase {number % 2}", tokens=tokens), profiler.layer(number):
            await pause()
            for one in step:
                await _run_brick(profiler, one, pause)
        await pause()


async def _run_brick(profiler: BrickProfiler, one: object, pause: Pause) -> None:
    name, inside = one  # type: ignore[misc]
    with profiler.brick(name, len(inside)):
        await pause()
        for each in inside:
            await _run_brick(profiler, each, pause)


def _found(memory: Memory) -> Counter[tuple[tuple[str, ...], int, int]]:
    """Count the records in memory by path, duration and elements."""
    paths: dict[int, tuple[str, ...]] = {0: ()}
    for node, parent, _, name in memory.nodes:
        paths[node] = (*paths[parent or 0], name)
    return Counter((paths[tag & 0xFFFFFF], end - start, elements) for tag, start, end, elements in memory.records)


def _books(memory: Memory) -> Counter[tuple[tuple[str, ...], str]]:
    """Return two times of each path, summed up: the time in finished steps, and its part outside child nodes."""
    table, stats = NodeTable(), NodeStats()
    for message in memory.said:
        if isinstance(message, Node):
            table.add(message)
    rows = np.array(memory.records, np.int64).reshape(-1, 4)
    tag, start_ns, end_ns, elements = rows.T
    records = Batch(tag & MAX_NODE, tag & ~MAX_NODE, start_ns, end_ns, elements, 0)
    stats.grow(len(table) + 1)
    stats.add(records, *table.columns())
    found: Counter[tuple[tuple[str, ...], str]] = Counter()
    for phase in {node.name for node in table.children[None]}:
        totals = PhaseTotals.of(table, stats, phase)
        assert totals.step is not None
        paths = {totals.step.id: (phase,)}
        for node in (totals.step, *totals.nodes):
            path = paths[node.id] = (*paths[node.parent], node.name) if node.parent else (phase,)
            found[path, "closed"] += totals.closed_ns[node.id]
            found[path, "exclusive"] += int(totals.closed_exclusive_ns[node.id])
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(programs=programs, order=st.randoms(use_true_random=False))
@pytest.mark.parametrize("kind", ["asyncio", "trio"])
def test_interleaved_tasks_are_recorded_as_if_each_ran_alone(
    make: MAKE, kind: str, programs: list[Program], order: random.Random
) -> None:
    def profiled() -> tuple[BrickProfiler, Memory, Ticks]:
        memory, ticks = Memory(), Ticks()
        return make(recorder=memory, clock_ns=ticks), memory, ticks

    async def together(profiler: BrickProfiler, ticks: Ticks) -> None:
        async def one(number: int, program: object) -> None:
            ticks.mine.set([1000 * number])

            async def pause() -> None:
                for _ in range(order.randrange(3)):
                    await (asyncio.sleep(0) if kind == "asyncio" else trio.lowlevel.checkpoint())

            await _run(profiler, number, program, pause)

        if kind == "asyncio":
            await asyncio.gather(*(one(*each) for each in enumerate(programs)))
        else:
            async with trio.open_nursery() as nursery:
                for each in enumerate(programs):
                    nursery.start_soon(one, *each)

    async def at_once() -> None: ...

    interleaved, memory, ticks = profiled()
    run = asyncio.run if kind == "asyncio" else lambda coroutine: trio.run(_awaiting, coroutine)
    run(together(interleaved, ticks))
    alone: Counter[tuple[tuple[str, ...], int, int]] = Counter()
    books: Counter[tuple[tuple[str, ...], str]] = Counter()
    for number, program in enumerate(programs):
        profiler, apart, clock = profiled()
        clock.mine.set([1000 * number])
        with pytest.raises(StopIteration):
            _run(profiler, number, program, at_once).send(None)
        alone += _found(apart)
        books += _books(apart)
    assert _found(memory) == alone
    assert +_books(memory) == books


async def _awaiting(coroutine: Awaitable[None]) -> None:
    await coroutine


def test_the_books_of_interleaved_steps_close_for_each_step(make: MAKE, runtime: Path) -> None:
    profiler = make(recorder=RingRecorder(runtime))

    async def request(number: int) -> None:
        for _ in range(50):
            with profiler.step("decode", tokens=1):
                for name in "ab":
                    with profiler.brick(name):
                        await asyncio.sleep(0)

    async def serve() -> None:
        await asyncio.gather(*(request(number) for number in range(3)))

    asyncio.run(serve())
    source = source_of(runtime)
    source.poll()
    totals = PhaseTotals.of(source.nodes, source.stats, "decode")
    assert totals.step is not None
    step = totals.step.id
    assert totals.count[step] == totals.tokens == 150
    assert all(totals.closed_ns[node.id] == totals.total_ns[node.id] for node in totals.nodes)
    assert sum(totals.total_ns[node.id] for node in totals.nodes) <= totals.total_ns[step]
    # Almost all the time, three steps ran at once. So the sum of their times is about three times the time when at
    # least one ran.
    union_ns = source.stats.rare("union_ns", (step,))
    wall_ns = source.stats.rare("last_ns", (step,)) - source.stats.rare("first_ns", (step,))
    assert max(totals.total_ns[step] // 3, 1) <= union_ns <= wall_ns
    report = profiler.report()
    assert report.tokens_per_sec_in_steps == pytest.approx(1e9 * 150 / union_ns)
    assert report.tokens_per_sec == pytest.approx(1e9 * 150 / wall_ns)


def test_a_long_step_beside_short_ones_keeps_its_own_bricks_open(make: MAKE, runtime: Path) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    begun, go_on = threading.Event(), threading.Event()

    def long() -> None:
        with profiler.step("decode", tokens=1):
            with profiler.brick("long"):
                pass
            begun.set()
            go_on.wait()

    thread = threading.Thread(target=long)
    thread.start()
    begun.wait()
    for _ in range(3):
        with profiler.step("decode", tokens=1), profiler.brick("short"):
            pass
    source = source_of(runtime)
    source.poll()
    open_ns = {n.name: _open_ns(source.stats, n.id) for n in source.nodes.nodes}
    assert (open_ns["long"] > 0, open_ns["short"]) == (True, 0)
    go_on.set()
    thread.join()
    source.poll()
    assert not any(_open_ns(source.stats, n.id) for n in source.nodes.nodes)


def _open_ns(stats: NodeStats, node: int) -> int:
    return int(stats.column("total_ns")[node] - stats.column("closed_ns")[node])


def test_more_steps_than_lanes_at_once_are_all_recorded(make: MAKE, runtime: Path) -> None:
    profiler = make(recorder=RingRecorder(runtime))

    async def request() -> None:
        for _ in range(4):
            with profiler.step("decode", tokens=2), profiler.brick("a"):
                await asyncio.sleep(0)

    async def serve() -> None:
        await asyncio.gather(*(request() for _ in range(40)))

    for _ in range(2):  # lanes are reused
        asyncio.run(serve())
    report = profiler.report()
    assert (report.steps, report.tokens, report.bricks[0].calls.count) == (320, 640, 320)
    assert len(profiler.parts.steps.lanes.free) == len(set(profiler.parts.steps.lanes.free)) == 15


def test_what_runs_in_an_executor_lies_outside_of_the_step_that_waits_for_it(make: MAKE) -> None:
    memory = Memory()
    profiler = make(recorder=memory)

    def work() -> None:
        with profiler.brick("work"):
            pass

    async def serve() -> None:
        with profiler.step("decode", tokens=1):
            await asyncio.to_thread(work)
            with ThreadPoolExecutor(1) as pool:
                await asyncio.get_running_loop().run_in_executor(pool, work)
            with profiler.brick("inside"):
                pass

    asyncio.run(serve())
    assert [(parent, name) for _, parent, _, name in memory.nodes] == [
        (None, "decode"),
        (None, "work"),
        (1, "inside"),
    ]


def test_a_call_in_a_context_of_its_own_stays_where_its_caller_is(make: MAKE) -> None:
    memory = Memory()
    profiler = make(recorder=memory)

    def work() -> None:
        with profiler.brick("work"):
            pass

    with profiler.step("decode", tokens=1):
        contextvars.copy_context().run(work)
        with profiler.brick("after"):
            pass
    assert [(parent, name) for _, parent, _, name in memory.nodes] == [(None, "decode"), (1, "work"), (1, "after")]


def test_tasks_that_share_one_context_are_told_apart(make: MAKE) -> None:
    memory = Memory()
    profiler = make(recorder=memory)

    async def request(name: str) -> None:
        with profiler.step(name, tokens=1):
            await asyncio.sleep(0)
            with profiler.brick("a"):
                await asyncio.sleep(0)

    async def serve() -> None:
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.create_task(request(name), context=context) for name in ("one", "two")))

    asyncio.run(serve())
    assert [(parent, name) for _, parent, _, name in memory.nodes] == [
        (None, "one"),
        (None, "two"),
        (1, "a"),
        (2, "a"),
    ]


GREENLETS = """
import sys
patched = sys.argv[1] == "patched"
if patched:
    from gevent import monkey; monkey.patch_all()
import gc, gevent, greenlet
from collections import Counter
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
import cbtop.profiler.hot_path as h
sys.path.insert(0, sys.argv[2])
from tests.profiler.memory import Memory
memory = Memory()
profiler = BrickProfiler(recorder=memory)

def request(n):
    for _ in range(20):
        with profiler.step("decode", 1):
            gevent.sleep(0)
            with profiler.brick("a", n):
                gevent.sleep(0)
                with profiler.brick("b", n):
                    pass

for _ in range(5):  # greenlets come and go, and their positions with them
    gevent.joinall([gevent.spawn(request, n) for n in range(3)], raise_error=True)
    gc.collect()

def raw():
    with profiler.step("raw", 1):
        greenlet.getcurrent().parent.switch()
        with profiler.brick("c"):
            pass

several = [greenlet.greenlet(raw) for _ in range(3)]
for _ in range(2):
    for one in several:
        one.switch()
with profiler.brick("outside"):
    pass
names = {n.id: n.name for n in memory.said if hasattr(n, "parent")}
counts = Counter(names[tag & 0xFFFFFF] for tag, *_ in memory.records)
print([(parent, name) for _, parent, _, name in memory.nodes], sorted(counts.items()))
"""


@of_either
@pytest.mark.parametrize("how", ["patched", "not patched"])
def test_greenlets_have_a_place_each_and_harm_nobody(implementation: str, how: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GREENLETS, how, str(root)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    tree = [(None, "decode"), (1, "a"), (2, "b"), (None, "raw"), (4, "c"), (None, "outside")]
    counts = [("a", 300), ("b", 300), ("c", 3), ("decode", 300), ("outside", 1), ("raw", 3)]
    assert done.stdout.strip() == f"{tree} {counts}"


def test_a_thread_that_ends_takes_its_place_with_it(make: MAKE) -> None:
    profiler = make(recorder=Memory())
    seen: list[weakref.ref[object]] = []

    def run() -> None:
        with profiler.brick("a"):
            seen.append(weakref.ref(profiler.parts.paths.own.position))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [position() for position in seen] == [None]
