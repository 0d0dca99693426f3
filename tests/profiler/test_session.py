"""Tests of a profiler without a daemon: a process can read its own records."""

from __future__ import annotations

import asyncio
import html
import threading
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest

from cbtop.profiler import session as session_module
from cbtop.profiler.analysis import phase_totals as phase_totals_module
from cbtop.profiler.analysis import time_breakdown as books_module
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.messages import Node
from cbtop.protocol.ring_reader import RingReader
from cbtop.protocol.vocabulary import BrickCategory, BrickId


@pytest.fixture
def profiler() -> BrickProfiler:
    return BrickProfiler(clock_ns=count(0, 1000).__next__)  # Each reading advances the fake clock by 1 µs.


def test_a_brick_is_summed_over_the_places_it_ran_in(profiler: BrickProfiler) -> None:
    assert profiler.stats_for(BrickId.RMS_NORM) is None
    for index in range(3):
        with profiler.layer(index), profiler.brick(BrickId.RMS_NORM, 10):
            pass
    stats = profiler.stats_for(BrickId.RMS_NORM)
    assert stats is not None
    assert (stats.calls.count, stats.calls.total_ns, stats.calls.elements) == (3, 3000, 30)
    assert stats.elements_per_sec == pytest.approx(1e7)
    assert profiler.stats_for("RmsNorm") == stats


def test_an_unprintable_name_does_not_make_printing_the_report_fail(profiler: BrickProfiler) -> None:
    """Lone surrogates from os.fsdecode cannot be encoded in UTF-8. Escape sequences would control the terminal."""
    with profiler.step("de\ncode") as step, profiler.brick("a\ud800\x1b[2J"):
        step.cancel()
    text = str(profiler.report())
    text.encode("utf-8")
    assert all(line.isprintable() for line in text.splitlines())
    assert "a\ufffdD800\ufffd001B[2J" in text


def test_a_notebook_shows_the_figures_of_the_report(profiler: BrickProfiler) -> None:
    with profiler.step("decode", tokens=1), profiler.brick("<Mine>"):
        pass
    report = profiler.report()
    shown = report._repr_html_()
    (brick,) = report.bricks
    report._repr_pretty_(printer := Mock(), cycle=False)
    printer.text.assert_called_once_with(str(report))
    assert html.unescape(shown).startswith(f"<p>{str(report).splitlines()[0]}</p><svg ")
    assert f"{100 * brick.closed.exclusive_ns / report.recorded_ns:.1f} %</td>" in shown
    assert "&lt;Mine&gt;</td>" in shown
    assert "<Mine>" not in shown


def test_f110_category_sums_are_those_of_their_bricks(profiler: BrickProfiler) -> None:
    for brick in (BrickId.GATE_PROJECTION, BrickId.UP_PROJECTION, BrickId.SAMPLING):
        with profiler.brick(brick, 5):
            pass
    found = profiler.category_stats()
    assert {key: (stats.count, stats.exclusive_ns) for key, stats in found.items() if stats.count} == {
        BrickCategory.FFN: (2, 2000),
        BrickCategory.OTHER: (1, 1000),
    }


def test_nested_bricks_are_not_counted_twice_and_tokens_are_not_elements(profiler: BrickProfiler) -> None:
    with profiler.step("decode", tokens=2), profiler.brick("outer", 4096), profiler.brick("inner", 4096):
        pass
    report = profiler.report()
    inner, outer = report.bricks[1], report.bricks[0]
    assert {stats.name: stats.exclusive_ns for stats in (inner, outer)} == {"outer": 2000, "inner": 1000}
    assert (report.steps, report.tokens, report.wall_ns, report.total_ns) == (1, 2, 5000, 3000)
    assert report.coverage == pytest.approx(0.6)
    assert report.tokens_per_sec == report.tokens_per_sec_in_steps == pytest.approx(2 / 5e-6)
    assert "60.0 % of it in bricks" in str(report)


def test_steps_without_tokens_have_a_rate_of_steps(profiler: BrickProfiler) -> None:
    for _ in range(2):
        with profiler.step("forward"), profiler.brick("a"):
            pass
    report = profiler.report()
    assert (report.tokens_per_sec, report.tokens_per_sec_in_steps) == (None, None)  # and not 0
    assert report.steps_per_sec == pytest.approx(2 * 1e9 / report.elapsed_ns)
    in_steps = 2 * 1e9 / report.union_ns
    assert f"2 steps, 6.0 µs, {report.steps_per_sec:,.1f} steps/s ({in_steps:,.1f} in steps), " in str(report)
    assert "tokens" not in str(report)


def test_the_report_goes_on_where_the_last_one_ended(profiler: BrickProfiler) -> None:
    for times in (1, 2, 3):
        with profiler.brick("a"):
            pass
        assert profiler.report().bricks[0].calls.count == times


def test_what_the_ring_overwrote_is_said() -> None:
    from cbtop.profiler.recorder import RingRecorder

    profiler = BrickProfiler(recorder=RingRecorder(ring_bytes=8 * 32))
    for _ in range(20):
        with profiler.brick("a"):
            pass
    report = profiler.report()
    assert report.bricks[0].calls.count + report.overwritten == 20
    assert report.overwritten > 0
    assert f"{report.overwritten} records were overwritten" in str(report)


def test_tokens_known_only_at_the_end_are_added_to_the_step(profiler: BrickProfiler) -> None:
    with profiler.step("decode", tokens=1), profiler.brick("speculate"):
        profiler.add_tokens(3)
    assert (profiler.total_tokens, profiler.total_ns) == (4, 1000)
    assert profiler.tokens_per_sec == pytest.approx(4 / 3e-6)
    with pytest.raises(RuntimeError, match="outside a step"):
        profiler.add_tokens(1)
    profiler.disable()
    profiler.add_tokens(1)
    assert profiler.total_tokens == 4


def test_a_window_holds_the_steps_that_began_in_it() -> None:
    now_ns = 0
    profiler = BrickProfiler(clock_ns=lambda: now_ns)
    for number in range(10):
        with profiler.step("decode", tokens=1), profiler.brick(BrickId.RMS_NORM, 8):
            now_ns += (number + 1) * 100_000_000
    lifetime, window = profiler.report(), profiler.report(window_s=2.0)
    assert (lifetime.steps, lifetime.wall_ns, lifetime.window_s) == (10, 5_500_000_000, None)
    # The window of 2 s contains the two steps that took 0.9 s and 1 s. The first of these steps began before the
    # window.
    assert (window.steps, window.tokens, window.wall_ns, window.window_s) == (2, 2, 1_900_000_000, 1.9)
    assert (window.bricks[0].calls.count, window.coverage) == (2, 1.0)
    assert str(window).startswith("the last 1.9 s: 2 steps")
    assert profiler.report(window_s=1e-9).steps == 0


def test_a_window_leaves_out_what_ran_in_a_step_that_began_before_it(runtime: Path) -> None:
    from cbtop.profiler.recorder import RingRecorder

    now_ns = 0
    profiler = BrickProfiler(clock_ns=lambda: now_ns, recorder=RingRecorder(runtime))

    async def long() -> None:
        nonlocal now_ns
        for brick_ns in (9_000_000_000, 1_000):
            with profiler.step("decode", 1):
                for _ in range(3):
                    await asyncio.sleep(0)
                with profiler.brick("a"):
                    now_ns += brick_ns

    async def short() -> None:
        nonlocal now_ns
        for _ in range(9):
            now_ns += 1_000_000_000
            with profiler.step("prefill", 1):
                await asyncio.sleep(0)

    async def serve() -> None:
        await asyncio.gather(long(), short())

    asyncio.run(serve())
    for window_s in range(1, 20):
        report = profiler.report(window_s=window_s)
        assert "do not close" not in str(report), window_s
        assert report.coverage is None or 0 <= report.coverage <= 1
    profiler.close()


def test_a_window_says_when_the_ring_does_not_reach_back_so_far() -> None:
    from cbtop.profiler.recorder import RingRecorder

    now_ns = 0
    profiler = BrickProfiler(clock_ns=lambda: now_ns, recorder=RingRecorder(ring_bytes=64 * 32))
    for _ in range(1000):
        with profiler.brick("a"):
            now_ns += 1_000_000
    window = profiler.report(window_s=1.0)
    assert window.window_s is not None
    assert 0.05 < window.window_s < 0.07
    assert window.bricks[0].calls.count == pytest.approx(window.window_s * 1000, abs=2)


def test_reset_clears_every_field_but_settings_and_places(profiler: BrickProfiler) -> None:
    fresh = {name: repr(value) for name, value in vars(profiler).items()}
    settings = {
        "sample_every",
        "_enabled",
        "_clock",
        "_now_ns",
        "_recorder",
        "_chance",
    }
    # `reset` leaves these attributes: where running code is, the ids of scopes, and why recording has ended.
    places = {"_path", "parts", "start_brick", "stop_brick", "brick", "layer", "_scopes", "_steps"}
    said = {"_ended_why", "_said"}
    cleared = {
        "_elapsed",
        "_turns",
        "graph",
        "stats",
        "_pending",
        "_paths",
        "_checks",
    }  # `_paths` belongs to stored steps
    assert set(fresh) <= settings | places | said | cleared, "say of a new field whether reset clears it"

    profiler.elapsed_ns()
    with profiler.step("decode", tokens=1):
        ids = [profiler.graph_record_brick(name, 1000) for name in "ab"]
        profiler.graph_add_dependency(*ids)
        profiler.record_deferred("deferred", 0)
    profiler.parts.scopes.dropped = 3
    assert (profiler.report().steps, profiler.execution_graph().dropped) == (1, 3)
    profiler.reset()
    report = profiler.report()
    assert (report.steps, report.tokens, report.wall_ns, report.bricks, report.categories) == (0, 0, 0, (), ())
    assert (report.overwritten, report.rejected, profiler.pending_count) == (0, 0, 0)
    graph = profiler.execution_graph()
    assert (graph.nodes, graph.added_edges, graph.dropped) == ([], [], 0)
    assert profiler.elapsed_ns() == 0
    with profiler.step("decode", tokens=1), profiler.brick("b"):
        pass
    assert [stats.name for stats in profiler.report().bricks] == ["b"]
    assert profiler.execution_graph().added_edges == []


def test_a_function_is_timed_by_a_decorator(profiler: BrickProfiler) -> None:
    @profiler.timed(BrickId.RMS_NORM, elements=lambda values, scale: len(values))
    def norm(values: list[float], scale: float) -> list[float]:
        """Scale."""
        return [value * scale for value in values]

    assert norm([1.0, 2.0], scale=2.0) == [2.0, 4.0]
    assert norm.__doc__ == "Scale."
    stats = profiler.stats_for(BrickId.RMS_NORM)
    assert stats is not None
    assert (stats.calls.count, stats.calls.elements) == (1, 2)

    @profiler.timed("fails", elements=7)
    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    failed = profiler.stats_for("fails")
    assert failed is not None
    assert (failed.calls.failed, failed.calls.elements) == (1, 7)
    profiler.disable()
    assert norm([1.0], scale=1.0) == [1.0]
    assert stats.calls.count == 1

    async def piecewise() -> None: ...

    with pytest.raises(TypeError, match="piecewise runs in pieces"):
        profiler.timed("a")(piecewise)


def test_after_close_the_report_is_still_there(profiler: BrickProfiler) -> None:
    with profiler.brick("a"):
        pass
    profiler.close()
    assert profiler.report().bricks[0].calls.count == 1


def test_the_rate_of_a_process_is_over_the_union_of_steps_of_any_name(runtime: Path) -> None:
    now_ns = count(0, 10)
    profiler = BrickProfiler(clock_ns=now_ns.__next__, recorder=RingRecorder(runtime))
    draft, target = profiler.step("decode", 4, model="draft"), profiler.step("decode", 1, model="target")
    ready, go_on = threading.Event(), threading.Event()

    def run() -> None:
        with draft:
            ready.set()
            go_on.wait()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    with target:
        pass
    go_on.set()
    thread.join()
    report = profiler.report()
    batch = RingReader(next(runtime.glob("*.ring"))).read()
    both_ns = int(batch.end_ns.max() - batch.start_ns.min())
    assert (report.steps, report.tokens, report.union_ns) == (2, 5, both_ns)
    assert report.wall_ns > both_ns


def test_a_report_looks_at_each_name_a_few_times_however_many_there_are(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def looked(node: Node) -> str:
        nonlocal looks
        looks += 1
        return display_name(node)

    for module in (books_module, phase_totals_module, session_module):
        monkeypatch.setattr(module, "display_name", looked)
    profiler = BrickProfiler(recorder=RingRecorder(runtime))
    for number in range(500):
        with profiler.step(f"decode {number}", 1), profiler.brick("a"):
            pass
    assert profiler.report().steps == 500
    assert looks < 5 * 500
