"""Tests of the parts of a step: the parts add up to the time of the step.

If they do not add up, every report says so, with the reason and the difference.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.daemon.source import Source
from cbtop.profiler.analysis.graph.nodes import Function
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.profiler.analysis.time_breakdown import Beside, TimeBreakdown, books_of, outside_steps
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.profiler.scopes import MAX_RECURSION
from cbtop.reports import REPORTS
from cbtop.tui.views.books import books_equation
from cbtop.viewmodels.merge import merged_view
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import SourceView, source_view
from cbtop.viewmodels.time_breakdown import BesideView, TimeBreakdownView, beside_view, books_view
from cbtop.viewmodels.time_range import NamedTime
from tests.cbtop.recorded import Clock, profiler_in, record_of, source_of

Host = Callable[[BrickProfiler, Clock], None]


def seen(host: Host, *, sample_every: int = 1) -> tuple[SourceView, str, dict[str, object]]:
    """Run the program `host`. Return its view, its text report and its JSON."""
    with tempfile.TemporaryDirectory() as directory:
        clock = Clock()
        recorder = RingRecorder(Path(directory), 1 << 20)
        profiler = BrickProfiler(clock_ns=clock, recorder=recorder, sample_every=sample_every)
        host(profiler, clock)
        said = str(profiler.report())
        view = source_view(record_of(source_of(Path(directory))))
        profiler.close()
    text = REPORTS["text"]([view], ["bricks", "categories"], None)
    assert "do not close" in said or "do not close" not in text
    return view, text, json.loads(REPORTS["json"]([view], [], None))["sources"][0]


def shares(view: SourceView) -> list[float]:
    rows = [*view.bricks, *view.categories, *view.graph]
    found = [row.percent for row in rows if row.percent is not None]
    books = view.books
    if books is not None and books.wall_us:
        found += [100 * us / books.wall_us for us in (books.bricks_us, books.gaps_us, books.unattributed_us)]
    return found


def books_in(view: SourceView) -> TimeBreakdownView:
    assert view.books is not None
    return view.books


def test_every_time_of_the_books_is_in_microseconds_and_every_count_as_it_is() -> None:
    books = TimeBreakdown(
        wall_ns=100_000, bricks_ns=60_000, gaps_ns={"inside layers": 8_000, "between layers": 2_000},
        overlap_ns=1_000, open_ns=3_000,
        over=4, over_ns=5_000, exceeded=(("Layer 0", 6_000),), unmatched_calls=7, unmatched_ns=9_000, cancelled=11,
        in_shared_lane=12,
        adopted=Beside(13, 14_000, (("Sampling", 14_000),)),
    )  # fmt: skip
    assert books_view(books) == TimeBreakdownView(
        wall_us=100.0, bricks_us=60.0, gaps=(NamedTime("inside layers", 8.0), NamedTime("between layers", 2.0)),
        gaps_us=10.0, unattributed_us=31.0, residual_percent=31.0, open_us=3.0, overlap_us=1.0, close=False,
        over=4, over_us=5.0,
        exceeded=(NamedTime("Layer 0", 6.0),), unmatched_calls=7, unmatched_us=9.0, cancelled=11, in_shared_lane=12,
        adopted=BesideView(13, 14.0, (NamedTime("Sampling", 14.0),)),
    )  # fmt: skip
    nothing = TimeBreakdown(0, 0, {}, 0, 0, 0, 0, (), 0, 0, 0, 0, None)
    view = books_view(nothing)
    assert view is not None
    assert (view.residual_percent, view.adopted, view.close) == (None, None, True)
    assert (books_view(None), beside_view(None)) == (None, None)


@pytest.mark.parametrize(
    ("books", "close"),
    [
        (TimeBreakdown(10, 10, {}, 0, 0, 0, 0, (), 0, 0, 0, 0, None), True),
        (TimeBreakdown(10, 8, {"a": 1, "b": 1}, 0, 0, 0, 0, (), 0, 0, 0, 0, None), True),
        (TimeBreakdown(10, 8, {"a": 1, "b": 2}, 1, 0, 0, 0, (), 0, 0, 0, 0, None), True),  # two calls overlapped
        # These parts take more than the wall-clock time, so they do not add up.
        (TimeBreakdown(10, 8, {"a": 1, "b": 2}, 0, 0, 0, 0, (), 0, 0, 0, 0, None), False),
        (TimeBreakdown(10, 8, {}, 0, 0, 1, 0, (), 0, 0, 0, 0, None), False),
        (TimeBreakdown(10, 8, {}, 0, 0, 0, 0, (("Layer 0", 1),), 0, 0, 0, 0, None), False),
    ],
)
def test_books_close_only_if_nothing_is_larger_than_what_it_is_a_part_of(books: TimeBreakdown, close: bool) -> None:
    assert books.close is close


def elapsed_longer_than_one_of_its_steps(profiler: BrickProfiler, clock: Clock) -> None:
    for number in range(10):
        with profiler.step("decode", 1):
            clock.sleep_us(100)
            if not number:
                profiler.record_elapsed("a", 500_000)


def elapsed_longer_than_its_layer(profiler: BrickProfiler, clock: Clock) -> None:
    with profiler.step("decode", 1):
        with profiler.layer(0):
            clock.sleep_us(10)
            profiler.record_elapsed("a", 50_000)
        clock.sleep_us(1_000)


def test_layers_that_were_outdone_are_named_by_how_much_the_largest_first() -> None:
    def host(profiler: BrickProfiler, clock: Clock) -> None:
        with profiler.step("decode", 1):
            for layer, took_ns in ((0, 50_000), (1, 90_000), (2, 70_000)):
                with profiler.layer(layer):
                    clock.sleep_us(10)
                    profiler.record_elapsed("a", took_ns)
            clock.sleep_us(1_000)

    view, _, _ = seen(host)
    assert [(one.name, one.us) for one in books_in(view).exceeded] == [
        ("Layer 1", 80.0), ("Layer 2", 60.0), ("Layer 0", 40.0),
    ]  # fmt: skip


def a_timer_of_the_step_before(profiler: BrickProfiler, clock: Clock) -> None:
    with profiler.step("decode", 1):
        timer = profiler.start_brick("a")
        clock.sleep_us(10)
    clock.sleep_us(500)
    with profiler.step("decode", 1):
        profiler.start_brick("a")
        # The program reports a time for this brick that is longer than the step.
        profiler.stop_brick(timer, 1)


def a_clock_that_goes_back(profiler: BrickProfiler, clock: Clock) -> None:
    for number in range(3):
        with profiler.step("decode", 1):
            with profiler.brick("a"):
                clock.sleep_us(10)
            # In one step the clock goes back, so this step is rejected. Its bricks are valid.
            clock.sleep_us(-100 if number == 1 else 0)


@pytest.mark.parametrize(
    ("host", "why"),
    [
        (elapsed_longer_than_one_of_its_steps, "in 1 step what ran took 400.0 µs more"),
        (elapsed_longer_than_its_layer, "what ran inside outdid Layer 0 by 40.00 µs"),
        (a_timer_of_the_step_before, "bricks and gaps measured 5,100.0 % of the steps' wall time"),
        (a_clock_that_goes_back, "bricks and gaps measured 150.0 % of the steps' wall time"),
    ],
)
def test_books_that_do_not_close_say_why_and_by_how_much(host: Host, why: str) -> None:
    view, text, report = seen(host)
    books = report["books"]
    assert isinstance(books, dict)
    assert f"parts do not add up: {why}" in text
    assert (books_in(view).close, books["close"]) == (False, False)


@pytest.mark.parametrize("depth", [4, MAX_RECURSION, MAX_RECURSION + 1, 60])
def test_recursion_however_deep_adds_up_to_its_step(depth: int) -> None:
    def host(profiler: BrickProfiler, clock: Clock) -> None:
        def work(left: int) -> None:
            with profiler.brick("a"):
                clock.sleep_us(10)
                if left:
                    work(left - 1)
                with profiler.brick("b"):
                    clock.sleep_us(1)

        with profiler.step("decode", 1):
            work(depth - 1)

    view, text, _ = seen(host)
    books = books_in(view)
    assert (books.close, books.wall_us, books.bricks_us) == (True, 11 * depth, 11 * depth)
    assert sum(row.percent or 0 for row in view.bricks) == pytest.approx(100)
    too_deep = 2 * max(0, depth - MAX_RECURSION)
    assert (view.loss.rejected, view.loss.without_node, view.loss.lost) == (too_deep, too_deep, 0)
    assert (f"({too_deep} too deep: their time is in the calls around them)" in text) == (too_deep > 0)
    assert "rejected" not in text
    assert {row.name: row.count for row in view.bricks} == dict.fromkeys("ab", depth - too_deep // 2)


def test_what_runs_in_a_brick_that_cannot_be_recorded_does_not_lie_elsewhere() -> None:
    class Nameless:
        def __str__(self) -> str:
            raise ZeroDivisionError

    def host(profiler: BrickProfiler, clock: Clock) -> None:
        with profiler.step("decode", 1), profiler.brick(Nameless()), profiler.brick("inside"):
            clock.sleep_us(1)

    view, _, _ = seen(host)
    assert (view.outside, view.bricks, view.loss.rejected) == (None, (), 2)


def test_a_call_stopped_twice_out_of_order_or_late_is_listed_as_in_no_books() -> None:
    def host(profiler: BrickProfiler, clock: Clock) -> None:
        with profiler.step("decode", 1):
            twice = profiler.start_brick("a")
            clock.sleep_us(60)
            profiler.stop_brick(twice, 1)
            profiler.stop_brick(twice, 1)
            outer = profiler.start_brick("outer")
            inner = profiler.start_brick("inner")
            clock.sleep_us(10)
            profiler.stop_brick(outer, 1)
            clock.sleep_us(10)
            profiler.stop_brick(inner, 1)
            late = profiler.start_brick("late")
            clock.sleep_us(20)
        clock.sleep_us(30)
        profiler.stop_brick(late, 1)

    view, text, report = seen(host)
    books = books_in(view)
    assert (books.close, books.bricks_us, books.unattributed_us, books.open_us) == (True, 70, 30, 0)
    assert (books.unmatched_calls, books.unmatched_us) == (3, 60 + 20 + 50)
    assert "in no step: 130.0 µs in 3 calls, stopped twice, out of order or late" in text
    assert isinstance(report["books"], dict)
    assert (report["books"]["loose_calls"], report["books"]["loose_us"]) == (3, 130)
    assert {row.name: (row.count, row.total_inclusive_us) for row in view.bricks}["a"] == (2, 120)


def test_what_runs_outside_of_steps_is_a_row_of_its_own() -> None:
    def host(profiler: BrickProfiler, clock: Clock) -> None:
        for _ in range(10):
            with profiler.step("decode", 1), profiler.brick("a"):
                clock.sleep_us(10)
            with profiler.brick("detokenize"), profiler.brick("lookup"):
                clock.sleep_us(500)
            clock.sleep_us(7)  # The program does nothing for 7 µs.

    view, text, report = seen(host)
    assert "outside steps: 5.00 ms in 10 calls, added up (detokenize 5.00 ms), in no step's wall time" in text
    assert report["outside_steps"] == {"calls": 10, "us": 5_000, "by_name": [{"name": "detokenize", "us": 5_000}]}
    assert (books_in(view).wall_us, books_in(view).bricks_us) == (100, 100)


def test_steps_inside_a_function_are_not_counted_again_outside_of_steps() -> None:
    def host(profiler: BrickProfiler, clock: Clock) -> None:
        profiler.graph_push_scope(Function("generate"))
        with profiler.step("decode", 1):
            clock.sleep_us(100)
        clock.sleep_us(3)
        profiler.graph_pop_scope()

    view, _, _ = seen(host)
    assert view.outside is not None
    assert (view.outside.calls, view.outside.us) == (1, 3)


def test_a_step_inside_a_step_is_named_in_the_books_of_both() -> None:
    def host(profiler: BrickProfiler, clock: Clock) -> None:
        # The outer step has the phase `draft` or `decode`. The inner one always has the phase `decode`.
        for name in ("draft", "decode"):
            with profiler.step("decode", 1):
                with profiler.brick("a"):
                    clock.sleep_us(10)
                    with profiler.step(name, 1), profiler.brick("b"):
                        clock.sleep_us(80)
                clock.sleep_us(5)

    view, text, _ = seen(host)
    books = books_in(view)
    assert (books.close, books.wall_us, books.bricks_us, books.unattributed_us) == (
        True,
        95 * 2 + 80,
        10 * 2 + 80,
        10,
    )
    assert [(gap.name, gap.us) for gap in books.gaps] == [("steps inside", 160)]
    assert "+ steps inside 160.0 µs" in text
    assert {row.name: row.total_exclusive_us for row in view.bricks} == {"a": 20, "b": 80}


def test_steps_beyond_fifteen_at_once_are_counted_and_said() -> None:
    def host(profiler: BrickProfiler, clock: Clock) -> None:
        async def request(end: asyncio.Event) -> None:
            with profiler.step("decode", 1), profiler.brick("a"):
                clock.sleep_us(1)
                await end.wait()

        async def serve() -> None:
            end = asyncio.Event()
            tasks = [asyncio.create_task(request(end)) for _ in range(18)]
            await asyncio.sleep(0)
            end.set()
            await asyncio.gather(*tasks)

        asyncio.run(serve())

    view, text, report = seen(host)
    assert books_in(view).in_shared_lane == 3
    assert "3 steps ran beside fifteen others, whose bricks are whose is not known" in text
    assert isinstance(report["books"], dict)
    assert report["books"]["crowded_steps"] == 3


def test_bricks_of_cancelled_steps_are_said_to_be_in_no_books() -> None:
    def host(profiler: BrickProfiler, clock: Clock) -> None:
        for number in range(4):
            with profiler.step("decode", 1) as step:
                with profiler.brick("a"):
                    clock.sleep_us(5)
                if number:
                    step.cancel()

    view, text, report = seen(host)
    assert books_in(view).wall_us == books_in(view).bricks_us == 5
    assert [row.total_exclusive_us for row in view.bricks] == [20]
    assert "in no step: bricks of 3 steps cancelled or renamed inside, which the rows hold" in text
    assert isinstance(report["books"], dict)
    assert report["books"]["cancelled_steps"] == 3


def test_what_other_threads_do_for_a_step_is_added_up_beside_its_wall_time() -> None:
    def host(profiler: BrickProfiler, clock: Clock) -> None:
        with profiler.step("decode", 1), profiler.layer(0):
            with profiler.brick("experts"):
                place, all_of_them = profiler.place(), threading.Barrier(3)

                def work() -> None:
                    with profiler.adopt(place), profiler.brick("expert"):
                        all_of_them.wait()
                        all_of_them.wait()

                threads = [threading.Thread(target=work) for _ in range(2)]
                for thread in threads:
                    thread.start()
                all_of_them.wait()  # At this point both threads are inside the brick.
                clock.sleep_us(100)
                all_of_them.wait()
                for thread in threads:
                    thread.join()
            clock.sleep_us(1)

    view, text, report = seen(host)
    books = books_in(view)
    assert (books.close, books.wall_us, books.bricks_us, books.gaps_us, books.unattributed_us) == (
        True,
        101,
        100,
        1,
        0,
    )
    assert books.adopted is not None
    assert (books.adopted.calls, books.adopted.us) == (2, 200)  # Both threads take 100 µs each, in a step of 101 µs.
    assert [one.name for one in books.adopted.by_name] == ["expert"]
    assert "in other threads for these steps: 200.0 µs in 2 calls, added up" in text
    assert {row.name: row.percent for row in view.bricks} == {
        "experts": pytest.approx(100 * 100 / 101),
        "expert": None,
    }
    assert isinstance(report["books"], dict)
    assert report["books"]["adopted"]["calls"] == 2
    assert view.outside is None


def test_figures_of_a_sample_name_the_factor_and_nothing_is_multiplied(runtime: Path) -> None:
    def host(profiler: BrickProfiler, clock: Clock) -> None:
        for _ in range(30):
            with profiler.step("decode", 2), profiler.brick("a"):
                clock.sleep_us(10)

    view, text, report = seen(host, sample_every=10)
    assert "a sample: one step in 10; what lies in steps is of the recorded ones, nothing is multiplied" in text
    assert "decode: 30 steps (3 recorded), 60 tokens, " in text
    assert " of 3 recorded steps = " in text
    assert view.steps is not None
    assert (view.steps.count, view.steps.recorded, view.bricks[0].count, report["sample_every"]) == (30, 3, 3, 10)
    profiler = BrickProfiler(clock_ns=Clock(), recorder=RingRecorder(runtime), sample_every=10)
    assert str(profiler.report()).startswith("a sample, one step in 10: 0 steps")


def test_a_sum_of_processes_with_other_samples_says_some_leave_steps_out(tmp_path: Path) -> None:
    records = []
    for name, sample_every in (("one", 1), ("two", 7)):
        (tmp_path / name).mkdir()
        recorder = RingRecorder(tmp_path / name)
        profiler = BrickProfiler(clock_ns=Clock(), recorder=recorder, sample_every=sample_every)
        with profiler.step("decode", 1):
            pass
        records.append(record_of(source_of(tmp_path / name)))
    view = merged_view(records, MergeMode.SUM)
    assert view.sample_every is None
    assert "a sample: some processes leave steps out" in REPORTS["text"]([view], ["bricks"], None)


def test_a_merge_by_the_slowest_rank_has_no_shares_if_books_do_not_close(tmp_path: Path) -> None:
    records = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        clock = Clock()
        elapsed_longer_than_its_layer(profiler_in(tmp_path / name, clock), clock)
        records.append(record_of(source_of(tmp_path / name)))
    view = merged_view(records, MergeMode.MAX)
    assert [row.percent for row in (*view.bricks, *view.categories)] == [None, None]
    assert "do not add up" in REPORTS["text"]([merged_view(records, MergeMode.SUM)], ["bricks"], None)


def test_a_clock_below_zero_is_rejected_and_the_rest_still_shown(runtime: Path) -> None:
    clock = Clock(-50_000)
    profiler = profiler_in(runtime, clock)
    for _ in range(3):
        with profiler.step("decode", 1):
            clock.sleep_us(30)
    view = source_view(record_of(source_of(runtime)))
    assert (view.loss.rejected, view.steps.count if view.steps else 0) == (2, 1)


OPERATIONS = st.one_of(
    st.tuples(st.just("brick"), st.sampled_from("abc")),
    st.tuples(st.just("layer"), st.integers(0, 1)),
    st.tuples(st.just("step"), st.sampled_from(["decode", "prefill"])),
    # End one of the open nodes. Nodes may end in any order, and a node may end twice.
    st.tuples(st.just("leave"), st.integers(0, 9)),
    st.tuples(st.just("sleep"), st.integers(-20, 100)),
    st.tuples(st.just("elapsed"), st.integers(0, 200)),
)


@given(operations=st.lists(OPERATIONS, max_size=40), polls=st.sets(st.integers(0, 40), max_size=3))
def test_shares_are_0_to_100_percent_or_a_line_says_so_whatever_a_host_does(
    operations: list[tuple[str, object]], polls: set[int]
) -> None:
    entered: list[object] = []

    def host(profiler: BrickProfiler, clock: Clock) -> None:
        with profiler.step("decode", 1):
            clock.sleep_us(10)
        for number, (what, value) in enumerate(operations):
            if what in ("brick", "layer", "step"):
                entered.append(getattr(profiler, what)(value))
                entered[-1].__enter__()  # type: ignore[attr-defined]
            elif what == "leave" and entered:
                entered[value % len(entered)].__exit__(None, None, None)  # type: ignore[attr-defined, operator]
            elif what == "sleep":
                clock.sleep_us(value)  # type: ignore[arg-type]
            elif what == "elapsed":
                profiler.record_elapsed("e", value * 1_000)  # type: ignore[operator]
            if number in polls:
                profiler.report()
        with ExitStack() as rest:
            for one in entered:
                rest.push(one.__exit__)  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logging.Logger.warning", lambda *_: None)
        view, text, _ = seen(host)
    shown = [*shares(view), *(row.total_exclusive_us for row in view.bricks)]
    # Calls that overlap count fully, so the sum of their shares may exceed 100 %.
    most = 100 + 1e-6 if " - overlap " not in text else float("inf")
    assert "do not add up: " in text or (min(shown, default=0) >= -1e-6 and max(shares(view)) <= most)
    assert view.outside is None or view.outside.us >= 0


def books_beside(directory: Path, host: Host) -> tuple[TimeBreakdown | None, Beside | None]:
    """Return the parts of the time of decode steps, and the work outside steps.

    Both are read from the records of the program `host`.
    """
    record = record_of(_recorded(directory, host))
    whole = PhaseTotals.of(record.nodes, record.stats, "decode")
    return books_of(whole, whole), outside_steps(record.nodes, record.stats)


def _recorded(directory: Path, host: Host) -> Source:
    clock = Clock()
    profiler = BrickProfiler(clock_ns=clock, recorder=RingRecorder(directory, 1 << 20))
    host(profiler, clock)
    return source_of(directory)


def test_work_outside_of_steps_is_named_longest_first_and_adopted_work_apart(
    tmp_path: Path,
) -> None:
    """The function that starts the threads waits for 1 µs and has its own row.

    A function that was not called has no row.
    """

    def host(profiler: BrickProfiler, clock: Clock) -> None:
        with profiler.step("decode", 1):
            clock.sleep_us(50)
        for name, us in (("load", 20), ("tokenize", 300), ("tokenize", 40)):
            with profiler.brick(name):
                clock.sleep_us(us)
        with profiler.brick("call"):
            place = profiler.place()

            def work() -> None:
                with profiler.adopt(place), profiler.brick("worker"):
                    clock.sleep_us(70)

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            clock.sleep_us(1)

    books, outside = books_beside(tmp_path, host)
    assert books is not None
    assert (books.adopted, books.open_ns) == (None, 0)
    assert outside == Beside(
        5, 501_000, (("tokenize", 340_000), ("call", 71_000), ("worker", 70_000), ("load", 20_000))
    )


def test_time_in_a_running_step_is_open_less_what_is_loose_or_cancelled(tmp_path: Path) -> None:
    def host(profiler: BrickProfiler, clock: Clock) -> None:
        with profiler.step("decode", 1) as step:
            with profiler.brick("a"):
                clock.sleep_us(5)
            step.cancel()
        with profiler.step("decode", 1):
            twice = profiler.start_brick("a")
            clock.sleep_us(7)
            profiler.stop_brick(twice, 1)
            profiler.stop_brick(twice, 1)
        profiler.step("decode", 1).__enter__()
        with profiler.brick("a"):
            clock.sleep_us(90)

    books, _ = books_beside(tmp_path, host)
    assert books is not None
    assert (books.open_ns, books.bricks_ns, books.wall_ns) == (90_000, 7_000, 7_000)
    assert (books.unmatched_calls, books.unmatched_ns, books.cancelled) == (1, 7_000, 1)


def test_outdone_layers_are_named_worst_first_and_adopted_bricks_are_not(
    tmp_path: Path,
) -> None:
    def host(profiler: BrickProfiler, clock: Clock) -> None:
        with profiler.step("decode", 1):
            for layer, us in ((0, 30), (1, 90), (2, 60)):
                with profiler.layer(layer):
                    clock.sleep_us(10)
                    profiler.record_elapsed("a", 1_000 * (10 + us))
            clock.sleep_us(1_000)

    books, _ = books_beside(tmp_path, host)
    assert books is not None
    assert books.exceeded == (("Layer 1", 90_000), ("Layer 2", 60_000), ("Layer 0", 30_000))
    assert not books.close


class TwoStreams:
    """A fake device with two streams that work at the same time."""

    def __init__(self) -> None:
        self.stream, self.reached_ns = 0, [1_000, 1_000]

    def work(self, duration_ns: int) -> None:
        self.reached_ns[self.stream] += duration_ns

    def join(self) -> None:
        self.reached_ns[:] = [max(self.reached_ns)] * 2

    def mark(self) -> int:
        return self.reached_ns[self.stream]

    def synchronize(self) -> None:
        pass

    def time_ns(self, mark: object, /) -> int:
        assert isinstance(mark, int)
        return mark


def test_bricks_of_two_streams_keep_their_times_and_together_fit_the_step(
    tmp_path: Path,
) -> None:
    """A step of 750 µs: 400 µs on one stream, 290 µs on the other, 120 µs of overlap and 180 µs idle."""
    device = TwoStreams()
    profiler = BrickProfiler(recorder=RingRecorder(tmp_path, 1 << 20), device_clock=device)
    with profiler.step("decode", tokens=1):
        with profiler.layer(0):
            with profiler.brick("attention"):
                device.work(400_000)
            device.stream = 1
            device.work(280_000)
            with profiler.brick("experts"):
                device.work(290_000)
            device.join()
        device.work(180_000)
    profiler.finalize()
    said = str(profiler.report())
    view = source_view(record_of(source_of(tmp_path)))
    profiler.close()
    books = books_in(view)
    assert (books.wall_us, books.bricks_us, books.overlap_us) == (750.0, 690.0, 120.0)
    assert (books.gaps_us, books.unattributed_us, books.close) == (0.0, 180.0, True)
    assert {row.name: row.total_exclusive_us for row in view.bricks} == {"attention": 400.0, "experts": 290.0}
    assert "120.0µs in which two of these ran at the same time, in both" in said
    text = REPORTS["text"]([view], ["bricks"], None)
    assert (
        "wall 750.0 µs = bricks 690.0 µs + inside layers 0.00 µs - overlap 120.0 µs + rest of step 180.0 µs" in text
    )
    assert json.loads(REPORTS["json"]([view], [], None))["sources"][0]["books"]["overlap_us"] == 120.0
    drawn = "".join(text for text, _ in books_equation(view, books, 200))
    assert (
        drawn == "wall 750.0 µs = bricks 690.0 + ▒ inside layers 0.00 - overlap 120.0 + ░ rest of step 180.0 (24.0 %)"
    )
