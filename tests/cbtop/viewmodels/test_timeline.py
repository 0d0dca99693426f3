"""Tests of the timeline: each record of the last steps is on a lane (one per thread) or counted.

Bricks and gaps add up to the nanosecond.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cbtop.client import recent
from cbtop.client.source_record import SourceRecord
from cbtop.client.store import Store
from cbtop.daemon.source import Source
from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.messages import RecordBatch
from cbtop.protocol.record_batch import batches
from cbtop.protocol.ring import NODE_BITS
from cbtop.protocol.ring_reader import Batch
from cbtop.protocol.vocabulary import LAUNCHES, BrickCategory, BrickId
from cbtop.viewmodels import timeline as timeline_module
from cbtop.viewmodels.lanes import BRICKS, Gap, Lane, TimelineSpan
from cbtop.viewmodels.source import source_view
from cbtop.viewmodels.timeline import TimelineView, timeline_view
from tests.cbtop.recorded import Clock, apply, profiler_in, source_of


def followed(source: Source) -> SourceRecord:
    """Return the record of a process in a viewer that also receives single records."""
    source.poll()
    store = Store()
    store.keep_records(True)
    apply(store, [*source.snapshot()])
    apply(store, source.records())
    return store.sources[source.key]


def shown(record: SourceRecord, phase: str | None = None, *, is_sample: bool = False) -> TimelineView:
    found = timeline_view(record, phase, is_sample=is_sample)
    assert found is not None
    return found


def parts_of(lane: Lane) -> list[TimelineSpan | Gap]:
    """Return the outermost bricks and the gaps of a lane by start time. Those of zero length come first."""
    return sorted([*lane.rows[lane.bricks].spans, *lane.gaps], key=lambda part: (part.start_ns, part.end_ns))


def check_newest(found: TimelineView) -> None:
    """Check that the lanes of the newest step equal the end of all lanes.

    The lanes of the newest step must contain everything that is visible.
    """
    drawn: set[TimelineSpan] = set()
    for lane in found.newest_lanes:
        since_ns = min(part.start_ns for row in (*(row.spans for row in lane.rows), lane.gaps) for part in row)
        spans, gaps = since(since_ns, lane)
        drawn.update(spans)
        assert any(since(since_ns, other) == (spans, gaps) for other in found.lanes)
        assert sum(lane.parts_ns(since_ns, found.length_ns).values()) == found.length_ns - since_ns
    if found.newest is not None:
        sight_ns = found.newest.start_ns - 0.1 * found.newest.duration_ns
        assert {span for lane in found.lanes for span in since(0, lane)[0] if span.end_ns > sight_ns} <= drawn


def since(since_ns: int, lane: Lane) -> tuple[list[TimelineSpan], list[Gap]]:
    """Return the spans and gaps of a lane that began at `since_ns` or later. The rows of the spans do not matter."""
    spans = [
        span._replace(level=0)
        for row in lane.rows
        for span in row.spans
        if span.start_ns >= since_ns and span.end_ns > since_ns
    ]
    return sorted(spans, key=lambda one: (one.start_ns, -one.end_ns, one.node)), [
        gap for gap in lane.gaps if gap.start_ns > since_ns
    ]


def told(lane: Lane) -> list[tuple[str, int, int]]:
    return [(part.name, part.start_ns, part.duration_ns) for part in parts_of(lane)]


def check(found: TimelineView, record: SourceRecord) -> None:
    """Check what must be true for every timeline."""
    check_newest(found)
    assert found.spans + found.unplaced + found.older == len(record.recent)
    for lane in found.lanes:
        at_ns = 0
        for part in parts_of(lane):
            assert part.start_ns == at_ns
            at_ns = part.end_ns
        assert at_ns == found.length_ns
        assert sum(lane.parts_ns(0, found.length_ns).values()) == found.length_ns
        assert all(gap.duration_ns > 0 for gap in lane.gaps)
        for number, row in enumerate(lane.rows):
            for span, after in zip(row.spans, row.spans[1:], strict=False):
                assert span.end_ns <= after.start_ns
            if number:
                check_nesting(lane.rows[number - 1].spans if number != lane.bricks else (), row.spans, record)


def check_nesting(outer: Sequence[TimelineSpan], inner: Sequence[TimelineSpan], record: SourceRecord) -> None:
    """Check the nesting of spans: a span drawn inside another is inside it in time and in the graph.

    Spans of zero length may be drawn anywhere.
    """
    nodes = record.nodes
    for span in inner:
        around = [one for one in outer if one.start_ns <= span.start_ns and span.end_ns <= one.end_ns]
        if outer and span.duration_ns and len(span.where) and around:
            above, at = set(), span.node
            while at:
                at = nodes.parent_of[at]
                above.add(at)
            assert any(one.node in above for one in around)


def test_steps_layers_and_bricks_lie_over_each_other_and_gaps_have_names(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for _ in range(2):
        with profiler.step("decode", tokens=1):
            clock.sleep_us(3)
            with profiler.layer(0):
                clock.sleep_us(1)
                with profiler.brick(BrickId.RMS_NORM, 64):
                    clock.sleep_us(10)
            with profiler.brick("Sampling"):
                clock.sleep_us(5)
                with profiler.brick("TopK"):
                    clock.sleep_us(2)
        clock.sleep_us(7)
    record = followed(source_of(runtime))
    found = shown(record, "decode")
    (lane,) = found.lanes
    assert [(row.name, len(row.spans)) for row in lane.rows] == [
        ("steps", 2), ("layers", 2), ("bricks", 4), ("in bricks", 2),
    ]  # fmt: skip
    assert told(lane) == [
        ("rest of step", 0, 3_000), ("inside layers", 3_000, 1_000), ("RmsNorm", 4_000, 10_000),
        ("Sampling", 14_000, 7_000), ("between steps", 21_000, 7_000),
        ("rest of step", 28_000, 3_000), ("inside layers", 31_000, 1_000), ("RmsNorm", 32_000, 10_000),
        ("Sampling", 42_000, 7_000),
    ]  # fmt: skip
    assert lane.parts_ns(0, 21_000) == {BRICKS: 17_000, "rest of step": 3_000, "inside layers": 1_000}
    norm = lane.rows[2].spans[0]
    assert (norm.where, norm.elements, norm.category) == (("decode", "Layer 0"), 64, BrickId.RMS_NORM.category)
    assert found.newest is not None
    assert (found.newest.name, found.newest.start_ns, found.newest.duration_ns) == ("decode", 28_000, 21_000)
    assert [part.name for _, part in found.newest_parts()] == [
        "rest of step", "inside layers", "RmsNorm", "Sampling",
    ]  # fmt: skip
    assert (found.steps, found.unplaced, found.older, found.missing) == (2, 0, 0, 0)
    check(found, record)


def test_the_newest_step_is_one_of_the_phase_that_is_shown(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for phase in ("prefill", "decode"):
        with profiler.step(phase, tokens=1), profiler.brick("a"):
            clock.sleep_us(10)
    record = followed(source_of(runtime))
    names = [found.name for phase in ("prefill", "decode", None) if (found := shown(record, phase).newest)]
    assert names == ["prefill", "decode", "decode"]
    view = source_view(record, "prefill").timeline
    assert view is not None
    assert view.newest is not None
    assert view.newest.name == "prefill"
    # If there is no new data, the view returns the same object.
    assert view is source_view(record, "prefill").timeline


async def two_steps_at_once(profiler: BrickProfiler, clock: Clock) -> None:
    """Run steps of two asyncio tasks at the same time: step a begins, step b begins, step a ends, step b ends."""

    async def one(name: str) -> None:
        with profiler.step("decode", tokens=1), profiler.brick(name):
            clock.sleep_us(10)
            await asyncio.sleep(0)
            clock.sleep_us(10)

    await asyncio.gather(one("a"), one("b"))


def test_steps_that_overlap_have_own_lanes_and_no_made_up_time_between_them(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    asyncio.run(two_steps_at_once(profiler, clock))
    clock.sleep_us(5)
    with profiler.step("decode", tokens=1), profiler.brick("c"):
        clock.sleep_us(1)
    record = followed(source_of(runtime))
    found = shown(record)
    assert {lane.name: told(lane) for lane in found.lanes} == {
        "steps": [
            ("a", 0, 30_000), ("a step on another lane", 30_000, 10_000), ("between steps", 40_000, 5_000),
            ("c", 45_000, 1_000),
        ],
        "steps 2": [
            ("a step on another lane", 0, 10_000), ("b", 10_000, 30_000), ("between steps", 40_000, 5_000),
            ("a step on another lane", 45_000, 1_000),
        ],
    }  # fmt: skip
    check(found, record)


def test_tasks_that_interleave_on_one_thread_are_not_drawn_inside_each_other(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)

    async def around() -> None:
        with profiler.brick("a"):
            clock.sleep_us(10)
            await asyncio.sleep(0)
            with profiler.brick("in a"):
                clock.sleep_us(10)

    async def meanwhile() -> None:
        # This task begins and ends its brick `b` while the brick `a` of the other task runs.
        with profiler.brick("b"), profiler.brick("in b"):
            clock.sleep_us(5)

    async def both() -> None:
        await asyncio.gather(around(), meanwhile())

    asyncio.run(both())
    record = followed(source_of(runtime))
    found = shown(record)
    assert [lane.name for lane in found.lanes] == ["outside steps", "outside steps 2"]
    drawn = [[(span.name, span.where) for row in lane.rows for span in row.spans] for lane in found.lanes]
    assert drawn == [[("a", ()), ("in a", ("a",))], [("b", ()), ("in b", ("b",))]]
    assert told(found.lanes[1]) == [
        ("no brick recorded", 0, 10_000), ("b", 10_000, 5_000), ("no brick recorded", 15_000, 10_000),
    ]  # fmt: skip
    check(found, record)


def test_what_others_do_for_a_step_has_a_lane_of_its_own(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.step("decode", tokens=1), profiler.brick("own"):
        place = profiler.place()

        async def other() -> None:
            with profiler.adopt(place), profiler.brick("work"):
                clock.sleep_us(10)

        asyncio.run(other())
    found = shown(record := followed(source_of(runtime)))
    assert [lane.name for lane in found.lanes] == ["steps", "adopted"]
    assert ("own", 0, 10_000) in told(found.lanes[0])
    assert "work" in [span.name for row in found.lanes[1].rows for span in row.spans]
    check(found, record)


def test_bricks_that_the_host_timed_of_a_devices_step_lie_beside_it(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    there = BrickDefinition("Attention", BrickCategory.ATTENTION, backend="torch on cuda")
    here = BrickDefinition("Sampling", BrickCategory.OTHER, backend="torch")
    launched = BrickDefinition("Launched", BrickCategory.OTHER, backend=f"torch on cuda{LAUNCHES}")
    for bricks in ((there, here, launched), (launched, here)):
        with profiler.step("decode" if there in bricks else "verify", tokens=1):
            for brick in bricks:
                with profiler.brick(brick):
                    clock.sleep_us(10)
    record = followed(source_of(runtime))
    lanes = {lane.name: lane for lane in shown(record).lanes}
    assert [span.name for span in lanes["steps"].rows[1].spans] == ["Attention", "Launched", "Sampling"]
    assert [span.name for span in lanes["host"].rows[0].spans] == ["Sampling", "Launched"]
    check(shown(record), record)


def test_a_step_timed_as_a_whole_says_that_nothing_is_known_inside(runtime: Path) -> None:
    clock = Clock()
    profiler = BrickProfiler(clock_ns=clock, recorder=RingRecorder(runtime, 1 << 20), sample_every=2)
    for _ in range(4):
        with profiler.step("decode", tokens=1), profiler.brick("a"):
            clock.sleep_us(10)
        clock.sleep_us(1)
    record = followed(source_of(runtime))
    (lane,) = shown(record).lanes
    plain = [span.start_ns for span in lane.rows[0].spans if span.is_plain]
    assert len(plain) == 2
    assert [gap.start_ns for gap in lane.gaps if gap.name == "not recorded inside"] == plain
    assert not shown(record).newest.is_plain  # type: ignore[union-attr]
    between = {gap.name for gap in shown(record, is_sample=True).lanes[0].gaps if not gap.where}
    # Between the recorded steps there may have been steps without a record.
    assert between == {"between recorded steps"}
    check(shown(record), record)


def test_a_gap_where_records_were_lost_has_no_name(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    source: Source | None = None
    store = Store()
    store.keep_records(True)
    for number in range(4):
        with profiler.step("decode", tokens=1), profiler.brick("a"):
            clock.sleep_us(10)
        clock.sleep_us(1)
        source = source or source_of(runtime)
        source.poll()
        if not number:
            apply(store, [*source.snapshot()])
        batches = source.records()
        if number != 2:
            apply(store, batches)
    assert source is not None
    record = store.sources[source.key]
    found = shown(record)
    (lane,) = found.lanes
    assert [(gap.name, gap.duration_ns) for gap in lane.gaps] == [("between steps", 1_000), ("unnamed gap", 12_000)]
    assert found.missing == 2
    check(found, record)


def test_records_of_a_step_that_has_not_ended_are_counted(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.step("decode", tokens=1), profiler.brick("a"):
        clock.sleep_us(10)
    with profiler.step("decode", tokens=1):
        with profiler.brick("b"):
            clock.sleep_us(10)
        record = followed(source_of(runtime))
        found = shown(record)
    assert (found.spans, found.unplaced) == (2, 1)
    check(found, record)


def test_where_bricks_of_a_cancelled_step_ran_is_not_called_between_steps(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for is_cancelled in (False, True, False):
        with profiler.step("decode", tokens=1) as step:
            with profiler.brick("a"):
                clock.sleep_us(10)
            if is_cancelled:
                step.cancel()
        clock.sleep_us(1)
    record = followed(source_of(runtime))
    found = shown(record)
    (lane,) = found.lanes
    assert told(lane) == [
        ("a", 0, 10_000), ("between steps", 10_000, 1_000), ("a step cut short", 11_000, 10_000),
        ("between steps", 21_000, 1_000), ("a", 22_000, 10_000),
    ]  # fmt: skip
    check(found, record)


def test_what_is_kept_is_bounded_and_what_is_older_is_counted(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "MAX_RECENT", 50)
    monkeypatch.setattr(timeline_module, "MAX_SPANS", 20)
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for _ in range(40):
        with profiler.step("decode", tokens=1), profiler.brick("a"):
            clock.sleep_us(10)
        clock.sleep_us(1)
    record = followed(source_of(runtime))
    found = shown(record)
    assert len(record.recent) == 50
    assert (found.spans, found.older, found.steps) == (20, 30, 10)
    assert {gap.name for gap in found.lanes[0].gaps} == {"between steps"}
    check(found, record)


def test_a_step_of_more_records_than_are_kept_is_not_called_whole(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent, "MAX_RECENT", 10)
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.step("decode", tokens=1):
        for _ in range(30):
            with profiler.brick("a"):
                clock.sleep_us(10)
    record = followed(source_of(runtime))
    found = shown(record)
    assert found.newest is None
    assert {gap.name for gap in found.lanes[0].gaps} <= {"unnamed gap"}
    check(found, record)


def test_where_no_records_are_kept_there_is_no_timeline(runtime: Path) -> None:
    clock = Clock()
    with profiler_in(runtime, clock).step("decode", tokens=1):
        clock.sleep_us(1)
    source = source_of(runtime)
    source.poll()
    store = Store()
    apply(store, [*source.snapshot(), *source.records()])
    record = store.sources[source.key]
    assert source_view(record).timeline is None
    assert len(record.recent) == 0


def test_records_of_nodes_that_are_not_known_yet_wait(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.step("decode", tokens=1):
        clock.sleep_us(10)
    source = source_of(runtime)
    source.poll()
    store = Store()
    store.keep_records(True)
    apply(store, [*source.snapshot(), *source.records()])
    with profiler.step("decode", tokens=1), profiler.brick("new"):
        clock.sleep_us(10)
    source.poll()
    apply(store, source.records())  # The daemon may send records before it sends the definitions of their nodes.
    record = store.sources[source.key]
    assert shown(record).spans == 2
    apply(store, source.delta())
    assert shown(record).spans == 3


program = st.lists(
    st.tuples(st.sampled_from(["step", "layer", "brick", "pause", "adopt", "end"]), st.integers(0, 5)), max_size=24
)


async def run(profiler: BrickProfiler, clock: Clock, tasks: Sequence[Sequence[tuple[str, int]]]) -> None:
    """Run asyncio tasks that take turns to open and close steps, layers and bricks."""

    async def one(number: int, words: Sequence[tuple[str, int]]) -> None:
        opened: list[object] = []
        for word, us in words:
            clock.sleep_us(us)
            if word == "pause":
                await asyncio.sleep(0)
            elif word == "end" and opened:
                opened.pop().__exit__(None, None, None)  # type: ignore[attr-defined]
            elif word != "end":
                begun = {
                    "step": lambda: profiler.step(f"phase {number % 2}", tokens=1),
                    "layer": lambda: profiler.layer(len(opened)),
                    "adopt": lambda: profiler.adopt(profiler.place()),
                    "brick": lambda: profiler.brick(f"brick {number}"),
                }[word]()
                begun.__enter__()  # type: ignore[attr-defined]
                opened.append(begun)
        while opened:
            opened.pop().__exit__(None, None, None)  # type: ignore[attr-defined]

    await asyncio.gather(*(one(number, words) for number, words in enumerate(tasks)))


@given(tasks=st.lists(program, min_size=1, max_size=4), most=st.sampled_from([6, 1_000]))
@example(tasks=[[("step", 0), ("step", 0), ("end", 0), ("step", 0), ("step", 1)]], most=6)
def test_whatever_ran_every_record_is_drawn_once_or_counted_and_lanes_add_up(
    tasks: list[list[tuple[str, int]]], most: int
) -> None:
    with TemporaryDirectory(prefix="cbtop-t-") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(recent, "MAX_RECENT", most)
        clock = Clock()
        profiler = profiler_in(Path(directory), clock)
        with profiler.brick("first"):
            pass
        asyncio.run(run(profiler, clock, tasks))
        record = followed(source_of(Path(directory)))
        found = timeline_view(record, None, is_sample=False)
        if found is not None:
            check(found, record)


def test_a_record_that_runs_backwards_by_more_than_a_clock_holds_is_none(runtime: Path) -> None:
    with profiler_in(runtime, Clock()).brick("a"):
        pass
    source = source_of(runtime)
    source.poll()
    store = Store()
    store.keep_records(True)
    apply(store, [*source.snapshot()])
    one, zero = np.array([1]), np.array([0])
    backwards = Batch(one, zero, np.array([(1 << 63) - 1]), np.array([-(1 << 63)]), zero, overwritten=0)
    apply(store, [*batches(source.key, 0, 1, backwards)])
    assert timeline_view(store.sources[source.key], None, is_sample=False) is None


@given(data=st.data())
def test_whatever_records_a_daemon_sends_they_add_up_or_are_refused(data: st.DataObject) -> None:
    """The records have times, lanes and nodes that no profiler would write."""
    with TemporaryDirectory(prefix="cbtop-t-") as directory:
        clock = Clock()
        profiler = profiler_in(Path(directory), clock)
        with profiler.step("decode", tokens=1), profiler.layer(0), profiler.brick("a"), profiler.brick("b"):
            pass
        with profiler.brick("c"):
            pass
        source = source_of(Path(directory))
        source.poll()
        store = Store()
        store.keep_records(True)
        apply(store, [*source.snapshot()])
    times = st.integers(-5, 60) | st.sampled_from([1 << 61, (1 << 63) - 1, -(1 << 63)])
    rows = data.draw(
        st.lists(st.tuples(st.integers(0, 7), st.integers(0, 255), times, times, st.integers(-1, 3)), max_size=30)
    )
    node, flags, start, end, elements = (
        np.array([row[column] for row in rows], np.int64) for column in range(5)
    )  # fmt: skip
    with np.errstate(over="ignore"):
        batch = Batch(node, flags << NODE_BITS, start, end, elements, overwritten=0)
        apply(store, [*batches(source.key, 0, len(rows) + data.draw(st.integers(0, 3)), batch)])
    record = store.sources[source.key]
    found = timeline_view(record, "decode", is_sample=False)
    if found is not None:
        assert found.spans + found.unplaced + found.older <= len(record.recent)
        for lane in found.lanes:
            assert sum(lane.parts_ns(0, found.length_ns).values()) == found.length_ns


def test_a_batch_that_was_here_before_is_not_taken_twice(runtime: Path) -> None:
    clock = Clock()
    with profiler_in(runtime, clock).step("decode", tokens=1):
        clock.sleep_us(1)
    source = source_of(runtime)
    source.poll()
    kept = recent.RecentRecords()
    (batch,) = source.records()
    kept.take(batch)
    kept.take(batch)
    assert (len(kept), kept.missing) == (1, 0)
    late = replace(batch, first=5, produced=6)
    assert isinstance(late, RecordBatch)
    kept.take(late)
    assert (len(kept), kept.missing) == (2, 4)
