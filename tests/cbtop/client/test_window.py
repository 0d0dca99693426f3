"""Statistics of the last seconds equal those of a viewer that saw only these seconds."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.client import window
from cbtop.client.source_record import SourceRecord
from cbtop.client.store import Store
from cbtop.commands import top
from cbtop.daemon.source import Source
from cbtop.profiler.analysis.growth import Growth
from cbtop.profiler.analysis.histograms import BUCKETS
from cbtop.profiler.analysis.node_columns import COLUMNS, SPARSE_COLUMNS, SUMS
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol import catalog
from cbtop.protocol.messages import Heartbeat, HostHello, SourceCatalog, StatsUpdate
from cbtop.text.statistics import statistic
from cbtop.viewmodels.source import SourceView, source_view
from tests.cbtop.recorded import Clock, apply, profiler_in, source_of
from tests.integration.hosts import DEADLINE_S, PATIENTLY, host
from tests.integration.hosts import cbtop as run
from tests.representatives import first_by_default


class Watched:
    """A process, and the store of a viewer that watches it. The test sets the clocks of both."""

    def __init__(self, directory: Path, window_s: float = 10.0) -> None:
        self.clock = Clock()
        self.profiler: BrickProfiler = profiler_in(directory, self.clock)
        self.store = Store(window_s)
        # time of the daemon's hello message in s; None: the viewer's present time
        self.began_s: float | None = None
        self._directory = directory
        self._source: Source | None = None

    def step(self, us: float, tokens: int = 1) -> None:
        with self.profiler.step("decode", tokens), self.profiler.layer(0):
            with self.profiler.brick("outer", 1):
                with self.profiler.brick("inner", 1):
                    self.clock.sleep_us(us)
                self.clock.sleep_us(us)
            self.clock.sleep_us(1)

    def look(self, second: float) -> None:
        """Let the daemon read the process and publish its statistics at `second`."""
        if self._source is None:
            self._source = source_of(self._directory)
        self._source.poll()
        at_ns = round(second * 1e9)
        everything = [*self._source.snapshot(), Heartbeat(at_ns, (self._source.state_message(),))]
        dated = [replace(m, monotonic_ns=at_ns) if isinstance(m, StatsUpdate) else m for m in everything]
        apply(self.store, [self._began(m) if isinstance(m, SourceCatalog) else m for m in dated])

    def _began(self, catalog: SourceCatalog) -> SourceCatalog:
        if self.began_s is None:
            return catalog
        began_ns = round(self.began_s * 1e9)
        said = (replace(m, monotonic_ns=began_ns) if isinstance(m, HostHello) else m for m in catalog.messages)
        return replace(catalog, messages=tuple(said))

    @property
    def record(self) -> SourceRecord:
        return self.store.sources[self.source.key]

    @property
    def source(self) -> Source:
        assert self._source is not None
        return self._source

    def recent(self) -> SourceView:
        return source_view(self.record, window=True)


def balanced(view: SourceView) -> bool:
    books = view.books
    assert books is not None
    return books.wall_us == pytest.approx(books.bricks_us + books.gaps_us + books.unattributed_us)


def test_the_window_holds_what_ran_in_it_and_nothing_before(runtime: Path) -> None:
    watched = Watched(runtime)
    for second in range(30):
        watched.step(100 if second < 15 else 400)
        watched.look(second)
    view, life = watched.recent(), source_view(watched.record)
    assert view.window is not None
    assert (view.window.asked_s, view.window.covers_s) == (10.0, 10.0)
    assert view.steps is not None
    assert view.steps.count == view.steps.tokens == 10
    assert view.steps.mean_us == pytest.approx(801)
    inner = next(row for row in view.bricks if row.name == "inner")
    assert (inner.count, inner.avg_inclusive_us, inner.total_exclusive_us) == (10, 400, 4000)
    assert inner.p50_us == pytest.approx(400, rel=0.01)
    assert inner.min_us == pytest.approx(400, rel=0.01)
    assert inner.max_us == pytest.approx(400, rel=0.01)
    assert balanced(view)
    assert life.window is None
    assert life.steps is not None
    assert life.steps.count == 30
    assert view.loss == life.loss


@first_by_default("arguments", ["--once", "--once --window 1.5", "--duration 1.5"])
def test_the_command_line_watches_a_window_long_and_prints_only_that(
    arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert top.DEFAULT_WINDOW_S == 10
    monkeypatch.setattr(top, "DEFAULT_WINDOW_S", 1.5)
    with host():
        done = run(*arguments.split(), "--format", "json", *PATIENTLY)
    assert done.returncode == 0, done.stderr
    (source,) = json.loads(done.stdout)["sources"]
    assert source["window_s"] == 1.5
    assert source["window_covers_s"] >= 1.0
    assert 0 < source["steps"]["count"] * 4 < source["loss"]["received"]
    books = source["books"]
    assert books["wall_us"] == pytest.approx(books["bricks_us"] + books["gaps_us"] + books["unattributed_us"])


def test_the_command_line_watches_on_until_there_is_a_window_to_print(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(runtime, 1.0)
    watched.step(100)
    watched.look(0.0)
    looks = iter([0.25, 0.5, 0.75, 1.0])

    class Heard:
        refused = ""

        def poll(self, _: int) -> None:
            watched.look(next(looks))

    monkeypatch.setattr(top, "running", lambda _: [watched.record])
    top._watch(Heard(), argparse.Namespace(), 0.0)  # type: ignore[arg-type]
    view = watched.recent()
    assert view.window is not None
    assert view.window.covers_s == 1.0


@pytest.mark.slow
def test_the_command_line_prints_all_that_was_seen_at_once_if_asked_for_it() -> None:
    with host():
        done = run("--once", "--window", "all", "--format", "json", *PATIENTLY)
    (source,) = json.loads(done.stdout)["sources"]
    assert (source["window_s"], source["window_covers_s"]) == (None, None)
    assert source["since_s"] == pytest.approx(time.time(), abs=DEADLINE_S)


def test_a_window_cut_through_a_step_still_closes_its_books(runtime: Path) -> None:
    watched = Watched(runtime)
    for second in range(20):
        with watched.profiler.step("decode", 1):
            with watched.profiler.brick("head", 1):
                watched.clock.sleep_us(50)
            with watched.profiler.brick("outer", 1):
                with watched.profiler.brick("inner", 1):
                    watched.clock.sleep_us(700)
                # The viewer looks now: the bricks head and inner have ended, but the brick outer and the step have
                # not.
                watched.look(second)
                watched.clock.sleep_us(200)
    view = watched.recent()
    assert balanced(view)
    assert view.books is not None
    assert view.books.open_us == 50
    assert {row.name: row.total_exclusive_us for row in view.bricks} == {"inner": 7000, "outer": 2000, "head": 500}
    assert sum(row.total_exclusive_us for row in view.bricks) == view.books.bricks_us


def test_calls_count_when_they_end_and_exclusive_time_when_its_step_ends(runtime: Path) -> None:
    watched = Watched(runtime)
    for second in range(20):
        with watched.profiler.step("decode", 1):
            with watched.profiler.brick("head", 1):
                watched.clock.sleep_us(1000 - second)  # each call takes less time than the call before
            watched.look(second)
    (row,) = watched.recent().bricks
    assert row.total_inclusive_us == sum(1000 - second for second in range(10, 20))
    assert row.total_exclusive_us == sum(1000 - second for second in range(9, 19))
    assert row.avg_exclusive_us == row.avg_inclusive_us  # nothing ran inside
    assert "so it may exceed incl µs" in statistic("total_exclusive_us").help


def test_the_mean_of_a_call_is_right_if_steps_fill_nearly_the_whole_window(runtime: Path) -> None:
    watched = Watched(runtime, window_s=3)
    for second in range(20):
        if second % 4 == 0:
            step = watched.profiler.step("decode", 1)
            step.__enter__()
        with watched.profiler.brick("outer", 1), watched.profiler.brick("inner", 1):
            watched.clock.sleep_us(1000)
        if second % 4 == 3:
            step.__exit__(None, None, None)
        watched.look(second)
        view = watched.recent()
        if view.window is not None:
            means = {row.name: row.avg_exclusive_us for row in (*view.bricks, *view.categories)}
            has_ended = view.steps is not None and view.steps.count > 0
            assert means["inner"] == (1000 if has_ended else None)
            assert means["outer"] == (0 if has_ended else None)
            assert means["Other"] == (500 if has_ended else None)


def test_a_window_longer_than_was_watched_says_what_it_covers(runtime: Path) -> None:
    watched = Watched(runtime, window_s=60)
    watched.step(100)
    watched.look(5)
    watched.step(100)
    watched.look(8.5)
    view = watched.recent()
    assert view.window is not None
    assert (view.window.asked_s, view.window.covers_s) == (60, 3.5)
    assert view.steps is not None
    assert view.steps.count == 1  # Steps from before the viewer connected do not count.


def test_what_ran_before_a_long_catalog_was_read_is_not_of_these_seconds(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "PIECE_BYTES", 64)
    watched = Watched(runtime)
    watched.step(100)
    watched.look(0.0)
    second = 0.0
    while watched.source.is_behind:
        watched.look(second := second + 1)
    watched.look(second + 1)
    assert second > 1
    watched.step(100)
    watched.look(second + 2)
    view = watched.recent()
    assert view.steps is not None
    assert view.steps.count == 1
    assert view.window is not None
    assert view.window.covers_s <= 2


def test_a_heartbeat_from_before_the_last_look_turns_no_window_clock_back(runtime: Path) -> None:
    watched = Watched(runtime)
    watched.step(100)
    watched.look(0.0)
    watched.step(100)
    watched.look(3.5)
    apply(watched.store, [Heartbeat(3_400_000_000, (watched.source.state_message(),))])
    view = watched.recent()
    assert view.window is not None
    assert view.window.covers_s == 3.5


def test_a_process_that_has_gone_quiet_has_an_empty_window(runtime: Path) -> None:
    watched = Watched(runtime)
    watched.step(100)
    for second in range(20):
        watched.look(second)
    view = watched.recent()
    assert view.bricks == ()
    assert view.steps is not None
    assert (view.phase, view.steps.count, view.steps.mean_us) == ("decode", 0, None)
    assert balanced(view)


@first_by_default("window_s", [1.0, 10.0, 600.0])
def test_a_window_keeps_few_slices_however_long_it_is(window_s: float) -> None:
    kept = window.Window(window_s)
    for tick in range(8_000):
        kept.tick(tick * 100_000_000, growth(tick))
    assert kept.stored_slices <= window.SLICES + 2
    assert window_s <= kept.statistics(TABLE)[1].covers_s <= window_s * 1.1 + window.SPACING_S


def test_a_slice_takes_the_memory_of_what_grew_in_it(runtime: Path) -> None:
    watched = Watched(runtime)
    for second in range(30):
        watched.step(100)
        watched.look(second)
    busy_bytes = watched.record.window.size_bytes
    for second in range(30, 60):
        watched.look(second)
    assert busy_bytes > 0
    assert watched.record.window.size_bytes == 0


def test_a_window_that_was_shortened_says_what_it_covers() -> None:
    kept = window.Window(10.0)
    for second in range(20):
        kept.tick(second * 1_000_000_000, growth(1))
    before_bytes = kept.size_bytes
    for _ in range(7):
        kept.shorten()
    assert 0 < kept.size_bytes < before_bytes / 2
    assert kept.statistics(TABLE)[1].covers_s == 3.0


TABLE = NodeStats()
TABLE.grow(10)


def growth(count: int) -> Growth:
    """Return the growth of the statistics of ten nodes: each node has `count` more calls."""
    node, many = np.arange(10), np.full(10, count)
    return Growth.made(node, np.array([many] * len(SUMS)), node * BUCKETS, many, {})


def test_its_blocks_are_the_finished_slices_and_hold_all_growth_in_them() -> None:
    kept = window.Window(10.0)
    for half in range(41):
        kept.tick(half * 500_000_000, growth(half))
    blocks = kept.blocks()
    assert [(block.begin_ns, block.end_ns) for block in blocks] == [
        (at * 10**9, (at + 1) * 10**9) for at in range(10, 20)
    ]
    counted = [int(block.growth.column("count").sum()) for block in blocks]
    assert counted == [10 * (4 * at + 3) for at in range(10, 20)]
    assert window.Window(10.0).blocks() == []


class Counted:
    """A window of the last seconds, and the complete statistics from which the test computes the expected result."""

    def __init__(self) -> None:
        self.window = window.Window(10.0)
        self.stats = NodeStats()
        self.stats.grow(6)
        self._at = 0.0
        self._grown: list[tuple[int, Growth]] = []

    def hear(self, after_s: float, node: int, ns: int, cells: int) -> None:
        """Add a call of `node` that took `ns` nanoseconds and ended `after_s` seconds after the call before it.

        The call adds one count to each of the node's first `cells` histogram cells.
        """
        self._at += after_s
        self.stats.grow(node + 1)
        more = np.array([[ns if name == "total_ns" else 1] for name in COLUMNS])
        cell = node * BUCKETS + np.arange(cells)
        rare = {(UNION, node): self.stats.rare("union_ns", (node,)) + ns}
        said = np.array([node]), self.stats.totals(np.array([node])) + more, cell, self.stats.buckets(cell) + 1
        growth, now_ns = self.stats.take_over(*said, rare), round((100 + self._at) * 1e9)
        self._grown.append((now_ns, growth))
        self.window.tick(now_ns, growth)

    def from_scratch(self, begin_ns: int) -> NodeStats:
        """Return the sum of all statistics that arrived after `begin_ns`."""
        return self.stats.since(Growth.of([growth for at_ns, growth in self._grown if at_ns > begin_ns]))


UNION = SPARSE_COLUMNS.index("union_ns")


@given(
    st.lists(
        st.tuples(
            st.floats(0.001, 4), st.integers(1, 5), st.integers(1, 10**12), st.integers(1, 4), st.sampled_from("hals")
        ),
        max_size=40,
    )
)
def test_adding_and_removing_slices_equals_the_full_sum_to_the_nanosecond(
    said: list[tuple[float, int, int, int, str]],
) -> None:
    counted = Counted()
    for after_s, node, ns, cells, then in said:
        counted.hear(after_s, node, ns, cells)
        if then == "s" and counted.window.stored_slices > 1:
            counted.window.shorten()
        if then in "as":  # a viewer asks for the statistics
            found, covered = counted.window.statistics(counted.stats)
            expected = counted.from_scratch(covered.begin_ns)
            for name in COLUMNS:
                assert found.column(name).tolist() == expected.column(name).tolist(), name
            for node in range(1, 6):
                assert found.histogram([node]).tolist() == expected.histogram([node]).tolist()
                assert found.rare("union_ns", (node,)) == expected.rare("union_ns", (node,))


def test_a_look_counts_what_came_since_the_last_one_and_what_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, times = Counted(), []
    count = NodeStats.count

    def noted(self: NodeStats, growth: Growth, sign: int = 1) -> None:
        times.append(sign)
        count(self, growth, sign)

    for _ in range(30):
        counted.hear(1.0, 1, 5, 1)
    counted.window.statistics(counted.stats)
    monkeypatch.setattr(NodeStats, "count", noted)
    counted.window.statistics(counted.stats)
    assert times == []  # no data arrived
    counted.hear(1.0, 1, 5, 1)
    counted.window.statistics(counted.stats)
    assert sorted(times) == [-1, 1]


def test_a_window_that_nobody_looks_at_keeps_no_sum() -> None:
    counted = Counted()
    counted.hear(1.0, 1, 5, 1)
    counted.hear(1.0, 1, 5, 1)
    assert counted.window.sum_bytes == 0
    counted.window.statistics(counted.stats)
    assert counted.window.sum_bytes > 0
    counted.hear(1.0 + window.SUM_KEPT_S, 1, 5, 1)
    assert counted.window.sum_bytes == 0


def test_steps_since_a_range_began_count_for_a_process_that_was_there_before(runtime: Path) -> None:
    watched = Watched(runtime)
    watched.step(100)
    watched.look(1)
    watched.store.begin_range(10)
    assert steps_in(watched.recent()) == 0
    watched.step(100)
    watched.look(1.1)
    assert steps_in(watched.recent()) == 1


@pytest.mark.parametrize(("began_s", "counted"), [(3, 2), (0.5, 0)])
def test_all_steps_count_for_a_process_that_began_and_was_seen_in_a_range(
    began_s: float, counted: int, runtime: Path
) -> None:
    late = Watched(runtime)
    late.store.apply(Heartbeat(round(1e9), ()))
    late.store.begin_range(10)
    late.step(100)
    late.step(100)
    late.began_s = began_s
    late.look(4)
    assert steps_in(late.recent()) == counted
    late.step(100)
    late.look(5)
    assert steps_in(late.recent()) == counted + 1


def steps_in(view: SourceView) -> int:
    assert view.steps is not None
    return view.steps.count
