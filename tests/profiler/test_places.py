"""Tests of a place (step, layer and brick) that is handed over to another thread or task.

Work in this thread or task belongs to the step and layer of the place.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest

from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.profiler.places import GraphPlace
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.ring import FLAG_LOOSE, LANE_SHIFT
from tests.cbtop.recorded import source_of
from tests.profiler.memory import Memory
from tests.profiler.test_steps import paths

MAKE = type[BrickProfiler]


@pytest.fixture
def make(profiler_module: ModuleType) -> MAKE:
    made: MAKE = profiler_module.BrickProfiler
    return made


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def profiler(make: MAKE, memory: Memory) -> BrickProfiler:
    return make(recorder=memory, clock_ns=count(0, 10).__next__)


def in_thread(work: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def work_at(profiler: BrickProfiler, place: object) -> None:
    with profiler.adopt(place), profiler.brick("work", 7):  # type: ignore[arg-type]
        pass
    with profiler.brick("own"):
        pass


def names(memory: Memory) -> list[str]:
    return [path for path, *_ in paths(memory)]


def test_adopted_work_lies_in_the_step_layer_and_brick_it_is_done_for(
    profiler: BrickProfiler, memory: Memory
) -> None:
    with profiler.step("decode", 1), profiler.layer(3), profiler.brick("experts"):
        place = profiler.place()
        in_thread(lambda: work_at(profiler, place))
    experts = "/decode/3/experts"
    assert names(memory) == [
        f"{experts}/adopted/work", f"{experts}/adopted", "/own", experts, "/decode/3", "/decode",
    ]  # fmt: skip
    assert len({tag >> LANE_SHIFT & 15 for tag, *_ in memory.records if tag & 0xFFFFFF <= 5}) == 1


def test_tasks_and_executors_adopt_too(profiler: BrickProfiler, memory: Memory) -> None:
    async def serve() -> None:
        with profiler.step("decode", 1), profiler.layer(0):
            place = profiler.place()
            await asyncio.to_thread(work_at, profiler, place)

            async def task() -> None:
                work_at(profiler, place)

            await asyncio.create_task(task())

    asyncio.run(serve())
    assert names(memory).count("/decode/0/adopted/work") == 2


def test_what_runs_on_after_the_step_lies_outside_of_it(profiler: BrickProfiler, memory: Memory) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def work() -> None:
        with profiler.adopt(place):
            with profiler.brick("late"):
                inside.set()
                go_on.wait()
            with profiler.brick("after"):
                pass

    with profiler.step("decode", 1), profiler.layer(0):
        place = profiler.place()
        thread = threading.Thread(target=work)
        thread.start()
        inside.wait()
    go_on.set()
    thread.join()
    in_thread(lambda: work_at(profiler, place))  # The step that this place belongs to has already ended.
    assert names(memory) == ["/decode/0", "/decode", "/decode/0/adopted/late", "/after", "/work", "/own"]
    assert [tag & FLAG_LOOSE == FLAG_LOOSE for tag, *_ in memory.records] == [False, False, True, False, False, False]


def test_a_step_that_ends_while_its_place_is_being_adopted_keeps_nobody(make: MAKE, memory: Memory) -> None:
    adopting, ended = threading.Event(), threading.Event()
    ticks = count(0, 10)
    worker = threading.Thread(target=lambda: work_in_a_step_of_its_own())

    def clock() -> int:
        if threading.current_thread() is worker and not adopting.is_set():
            adopting.set()
            ended.wait()
        return next(ticks)

    def work_in_a_step_of_its_own() -> None:
        with profiler.adopt(place):
            pass
        with profiler.step("own", 1), profiler.brick("mine"):
            pass

    profiler = make(recorder=memory, clock_ns=clock)
    with profiler.step("decode", 1):
        place = profiler.place()
        worker.start()
        adopting.wait()
    ended.set()
    worker.join()
    assert [name for name in names(memory) if name != "/decode/adopted"] == ["/decode", "/own/mine", "/own"]


def test_in_a_step_without_a_name_adopted_work_waits_for_it(profiler: BrickProfiler, memory: Memory) -> None:
    with profiler.step() as step:
        with profiler.layer(0):
            place = profiler.place()
            in_thread(lambda: work_at(profiler, place))
        step.name = "decode"
    assert names(memory) == ["/own", "/decode/0/adopted/work", "/decode/0/adopted", "/decode/0", "/decode"]


def test_of_what_is_done_for_a_step_that_is_not_sampled_nothing_is_recorded(make: MAKE, memory: Memory) -> None:
    profiler = make(recorder=memory, sample_every=2)
    for _ in range(2):
        with profiler.step("decode", 1), profiler.layer(0):
            place = profiler.place()
            in_thread(lambda place=place: work_at(profiler, place))  # type: ignore[misc]
    inside = ["/decode/0/adopted/work", "/decode/0/adopted", "/own", "/decode/0"]
    assert names(memory) == [*inside, "/decode", "/own", "/decode"]


def test_tokens_counted_in_adopted_work_are_the_steps(profiler: BrickProfiler, memory: Memory) -> None:
    with profiler.step("decode", 1), profiler.layer(0):
        place = profiler.place()

        def work() -> None:
            with profiler.adopt(place):
                profiler.add_tokens(4)

        in_thread(work)
    assert memory.records[-1][3] == 5


def test_a_place_that_the_caller_is_at_or_that_is_nowhere_changes_nothing(
    profiler: BrickProfiler, memory: Memory
) -> None:
    nowhere = profiler.place()
    in_thread(lambda: work_at(profiler, nowhere))
    with profiler.step("decode", 1):
        work_at(profiler, profiler.place())
    assert names(memory) == ["/work", "/own", "/decode/work", "/decode/own", "/decode"]
    with pytest.raises(ValueError, match="is no place"):
        profiler.adopt("here")  # type: ignore[arg-type]


def test_adopted_work_closes_with_its_step_and_takes_nothing_from_its_layer(make: MAKE, runtime: Path) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            with profiler.step("decode", 1), profiler.layer(0):
                place = profiler.place()
                list(pool.map(lambda _, place=place: work_at(profiler, place), range(8)))
    source = source_of(runtime)
    source.poll()
    totals = PhaseTotals.of(source.nodes, source.stats, "decode")
    layer, adopted, work = totals.nodes
    assert (totals.count[layer.id], totals.count[adopted.id], totals.count[work.id]) == (20, 160, 160)
    assert all(totals.closed_ns[node.id] == totals.total_ns[node.id] for node in totals.nodes)
    assert totals.closed_exclusive_ns[layer.id] == totals.closed_ns[layer.id]
    assert source.stats.rare("over", [node.id for node in source.nodes.nodes]) == 0
    profiler.close()


def test_an_adopted_call_that_outlasts_its_step_is_one_line_of_the_report(make: MAKE, runtime: Path) -> None:
    profiler = make(recorder=RingRecorder(runtime))
    begun, go_on = threading.Event(), threading.Event()

    def work(place: GraphPlace) -> None:
        with profiler.adopt(place), profiler.brick("late"):
            begun.set()
            go_on.wait()

    with profiler.step("decode", 1):
        thread = threading.Thread(target=work, args=(profiler.place(),))
        thread.start()
        begun.wait()
    go_on.set()
    thread.join()
    said = [line for line in str(profiler.report()).splitlines() if " in 1 calls" in line]
    assert len(said) == 1, said
    assert "stopped twice, out of order or late" in said[0]
