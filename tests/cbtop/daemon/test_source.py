"""Tests of a source, the daemon's part that reads one process.

The source adds up records, and counts lost and rejected records. Nonsense from the process does no harm.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.client.store import Store
from cbtop.daemon import liveness as liveness_module
from cbtop.daemon import source as source_module
from cbtop.daemon.source import Source
from cbtop.profiler import recorder as recorder_module
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol import announcements, codec
from cbtop.protocol.catalog import CatalogReader, CatalogWriter
from cbtop.protocol.ended import EndedProcess
from cbtop.protocol.messages import (
    Activity,
    CatalogMessage,
    Ceiling,
    CheckResult,
    Dependency,
    Goodbye,
    HostHello,
    Manifest,
    Node,
    SourceCatalog,
    SourceState,
    StatsUpdate,
    TraceSummary,
)
from cbtop.protocol.ring import RECORD_BYTES, RingWriter
from cbtop.protocol.vocabulary import NodeKind, Provenance
from cbtop.reports.json import json_report
from cbtop.reports.sources import sources_json, sources_text
from cbtop.reports.text import text_report
from cbtop.tui.views.header import drops
from cbtop.viewmodels.source import source_view
from cbtop.viewmodels.sources import source_row
from tests.cbtop.recorded import Clock, apply, profiler_in, record_of, source_of
from tests.representatives import first_by_default

decode = codec.decode


def balanced(source: Source) -> bool:
    state = source.state_message()
    return state.produced == state.received + state.overwritten + state.rejected


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_an_unread_source_is_a_hello_and_a_count_until_all_of_it_is_wanted(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, says_goodbye: bool
) -> None:
    profiler = profiler_in(runtime, Clock())
    for number in range(5):
        with profiler.brick("a", number):
            pass
    if says_goodbye:
        profiler.close()
    monkeypatch.setattr(liveness_module, "is_running", lambda *_: False)
    monkeypatch.setattr(liveness_module, "is_locked", lambda _: False)
    monkeypatch.setattr(liveness_module, "has_mapped", lambda *_: False)
    at_once = source_of(runtime)
    at_once.poll()
    decoded: list[object] = []
    monkeypatch.setattr(codec, "decode", lambda data: decoded.append(found := decode(data)) or found)
    source = Source(at_once.ring_path, on_demand=True)
    for _ in range(3):
        source.poll()
    state = source.state_message()
    assert [type(message) for message in decoded] == [HostHello]
    assert (source.key, state.state) == (at_once.key, at_once.state)
    assert (state.produced, state.received, state.unread) == (0, 0, 5)
    assert [type(message) for message in source.snapshot()] == [SourceCatalog, SourceState]
    assert source.records() == []
    source.want()
    source.poll()
    assert source.state_message() == at_once.state_message()
    assert source.catalog == at_once.catalog
    assert record_of(source).stats.received == 5
    profiler.close()


def test_unwanted_records_are_skipped_and_those_after_them_are_numbered_on(runtime: Path) -> None:
    profiler = profiler_in(runtime, Clock())
    with profiler.brick("a", 1):
        pass
    source = source_of(runtime)
    source.poll()
    source.pass_over_records()
    assert (source.waiting, source.records()) == (0, [])
    with profiler.brick("a", 1):
        pass
    source.poll()
    (batch,) = source.records()
    assert (batch.first, batch.produced, batch.count) == (1, 2, 1)
    assert record_of(source).stats.received == 2
    profiler.close()


def test_statistics_have_the_time_of_the_ring_read_however_long_adding_takes(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 5_000_000_000
    monkeypatch.setattr(source_module.time, "perf_counter_ns", lambda: now_ns)
    profiler = profiler_in(runtime, Clock())
    with profiler.brick("a", 1):
        pass
    source = source_of(runtime)
    add = source.stats.add

    def add_slowly(*arguments: Any) -> Any:
        nonlocal now_ns
        now_ns += 700_000_000
        return add(*arguments)

    monkeypatch.setattr(source.stats, "add", add_slowly)
    source.poll()
    now_ns += 250_000_000
    said = [*source.delta(), *source.snapshot()]
    assert [one.monotonic_ns for one in said if isinstance(one, StatsUpdate)] == [5_000_000_000] * 2
    profiler.close()


def test_a_process_that_says_goodbye_is_ended_and_read_to_its_last_record(runtime: Path) -> None:
    profiler = profiler_in(runtime, Clock())
    source = None
    for number in range(5):
        with profiler.brick("a", number):
            pass
        source = source or source_of(runtime)
    profiler.close("done")
    assert source is not None
    source.poll()
    state = source.state_message()
    assert (state.state, state.reason, state.received) == ("ended", "done", 5)
    assert balanced(source)


def test_a_process_that_vanishes_is_gone(runtime: Path) -> None:
    script = (
        "import os; from cbtop import BrickProfiler\n"
        "p = BrickProfiler()\n"
        "for _ in range(7):\n"
        "    with p.brick('a'): pass\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=False)
    source = source_of(runtime)
    source.poll()
    state = source.state_message()
    assert (state.state, state.received) == ("gone", 7)


@given(bursts=st.lists(st.integers(0, 60), max_size=8))
def test_produced_is_received_plus_lost_however_late_the_reader_is(bursts: list[int]) -> None:
    directory = Path(os.environ["CBTOP_RUNTIME_DIR"])
    recorder = RingRecorder(directory, 16 * RECORD_BYTES)
    profiler = BrickProfiler(recorder=recorder)
    with profiler.brick("a", 1):
        pass
    source, written = source_of(directory), 1
    for burst in bursts:
        for number in range(burst):
            with profiler.brick("a", 0.5 if number % 7 == 0 else 1):  # type: ignore[arg-type]
                pass
        written += burst
        source.poll()
        assert balanced(source)
    profiler.close()
    source.poll()
    state = source.state_message()
    assert state.produced == written
    assert balanced(source)
    assert int(source.stats.column("count").sum()) == state.received
    source.close()
    EndedProcess(source.ring_path, 0, 0).remove()


def test_what_was_overwritten_before_anyone_looked_is_told_apart(runtime: Path) -> None:
    profiler = profiler_in(runtime, Clock(), 16 * RECORD_BYTES)
    for _ in range(40):
        with profiler.brick("a"):
            pass
    source = source_of(runtime)
    source.poll()
    for _ in range(40):
        with profiler.brick("a"):
            pass
    source.poll()
    state = source.state_message()
    assert 0 < state.before_attach < state.overwritten
    assert balanced(source)


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ([Goodbye("no hello")], "does not begin with one hello"),
        ([Node(5, None, NodeKind.BRICK, "gap")], "does not begin"),
        ([], ""),
    ],
)
def test_a_catalog_that_breaks_its_word_makes_only_its_own_source_faulty(
    runtime: Path, said: list[Node | Goodbye], complaint: str
) -> None:
    RingWriter(runtime / "1-2-0.ring")
    writer = CatalogWriter(runtime / "1-2-0.catalog")
    for message in said:
        writer.write(message)
    source = Source(runtime / "1-2-0.ring")
    source.poll()
    assert (source.state == "faulty") == bool(complaint)
    assert complaint in source.reason
    store = Store()
    apply(store, [*source.snapshot()])


def test_a_node_out_of_place_makes_the_source_faulty_with_the_reason(runtime: Path) -> None:
    recorder = RingRecorder(runtime, 1 << 12)
    profiler = BrickProfiler(recorder=recorder)
    with profiler.brick("a"):
        pass
    recorder.announce(Node(7, 99, NodeKind.BRICK, "adrift"))
    source = source_of(runtime)
    source.poll()
    source.poll()
    assert (source.state, "node 7" in source.reason) == ("faulty", True)


def test_records_that_make_no_sense_are_rejected_and_counted(runtime: Path) -> None:
    recorder = RingRecorder(runtime, 1 << 12)
    profiler = BrickProfiler(recorder=recorder)
    with profiler.brick("a", 3):
        pass
    for node, start, end, elements in ((9, 0, 1, 1), (1, 5, 4, 1), (1, -(1 << 62), 1 << 62, 1)):
        recorder.record(node, start, end, elements)
    source = source_of(runtime)
    source.poll()
    state = source.state_message()
    assert (state.received, state.rejected) == (1, 3)
    assert balanced(source)


def test_a_cursor_that_jumps_makes_the_source_faulty(runtime: Path) -> None:
    profiler = profiler_in(runtime, Clock())
    with profiler.brick("a"):
        pass
    source = source_of(runtime)
    source.poll()
    with source.ring_path.open("r+b") as file:
        file.seek(128)
        file.write(struct.pack("<q", -1))
    source.poll()
    assert (source.state, "went back" in source.reason) == ("faulty", True)
    assert balanced(source)


def test_deltas_bring_a_viewer_to_where_a_snapshot_would(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.step("decode", tokens=1), profiler.brick("a"):
        clock.sleep_us(5)
    source, store = source_of(runtime), Store()
    source.poll()
    apply(store, [*source.snapshot()])
    source.delta()
    for number in range(20):
        with profiler.step("decode", tokens=1), profiler.brick(f"b{number % 3}", number):
            clock.sleep_us(number)
        source.poll()
        apply(store, [*source.delta()])
    followed, fresh = store.sources[source.key], record_of(source)
    for name in ("count", "total_ns", "min_ns", "max_ns", "elements", "closed_ns"):
        assert followed.stats.column(name).tolist() == fresh.stats.column(name).tolist()
    ids = range(len(fresh.nodes) + 1)
    assert followed.stats.histogram(ids).tolist() == fresh.stats.histogram(ids).tolist()
    assert followed.state == fresh.state


def test_what_is_quiet_is_told_again_twice_and_then_seldom(runtime: Path) -> None:
    profiler = profiler_in(runtime, Clock())
    with profiler.brick("a"):
        pass
    source = source_of(runtime)
    source.poll()
    assert [bool(source.keyframe()) for _ in range(14)] == [n in (0, 1, 6, 12) for n in range(14)]
    with profiler.brick("a"):
        pass
    source.poll()
    assert [bool(source.keyframe()) for _ in range(4)] == [True, True, False, False]


def test_an_unchanged_catalog_is_sent_again_twice_and_then_seldom(runtime: Path) -> None:
    profiler = profiler_in(runtime, Clock())
    with profiler.brick("a"):
        pass
    source = source_of(runtime)

    def is_told() -> bool:
        with profiler.brick("a"):
            pass
        source.poll()
        said = [type(message) for message in source.keyframe()]
        assert StatsUpdate in said
        return SourceCatalog in said

    assert [is_told() for _ in range(14)] == [n in (0, 1, 6, 12) for n in range(14)]
    with profiler.brick("new"):
        pass
    assert [is_told() for _ in range(4)] == [True, True, False, False]


AGAIN_AND_AGAIN: dict[str, Callable[[int], CatalogMessage]] = {
    "activity": lambda n: Activity("loading", n / 1000),
    "trace": lambda n: TraceSummary("MLT-01", "activations", "about", n, (), ()),
    "check": lambda n: CheckResult("RmsNorm", "bounds", n % 2 == 0, n / 1000, 1.0),
    "ceiling": lambda n: Ceiling("dram_read", "bandwidth", 1.0 + n, "GB/s", Provenance.MEASURED),
    "manifest": lambda n: Manifest("toy", "qwen2", "numba", "Q4_K", n, 2, 64, 512, 1, 1),
}


@first_by_default("what", AGAIN_AND_AGAIN, 2)
def test_of_what_is_said_again_and_again_only_the_last_is_kept_and_shown(
    runtime: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "FREE_UPDATE_BYTES", 2000)
    said, clock, store = AGAIN_AND_AGAIN[what], Clock(), Store()
    recorder = RingRecorder(runtime, 1 << 12, clock)
    recorder.announce(said(0))
    source = source_of(runtime)
    source.poll()
    apply(store, [*source.snapshot()])
    source.delta()
    known, written = len(source.catalog), os.stat(source.ring_path.with_suffix(".catalog")).st_size
    for number in range(1, 3000):
        recorder.announce(said(number))
    grown = os.stat(source.ring_path.with_suffix(".catalog")).st_size - written
    # The recorder may write 2,000 bytes of these announcements. It stops after the announcement that exceeds this
    # limit.
    assert 2000 <= grown <= 2300
    clock.sleep_us(10_000_000)
    recorder.flush()
    source.poll()
    (catalog, state) = source.delta()
    assert isinstance(catalog, SourceCatalog)
    assert catalog.messages == (said(2999),)
    assert (len(source.catalog), state) == (known, source.state_message())
    assert (source.state, source.state_message().left_out) == ("live", 0)
    apply(store, [catalog])
    fresh = record_of(source)
    for name in ("activity", "traces", "checks", "ceilings", "manifest"):
        assert getattr(store.sources[source.key], name) == getattr(fresh, name)
    recorder.close("done")


@pytest.mark.parametrize("together", [False, True], ids=["that they held was heard before", "heard together"])
def test_failed_checks_stand_in_the_order_in_which_they_came_to_fail(runtime: Path, together: bool) -> None:
    def say(brick: str, *, passed: bool, note: str = "") -> None:
        recorder.announce(CheckResult(brick, "finite", passed, None, None, note=note))
        clock.sleep_us(10_000_000)
        recorder.flush()

    def hear() -> None:
        source.poll()
        apply(store, [*source.delta()])

    clock, store = Clock(), Store()
    recorder = RingRecorder(runtime, 1 << 12, clock)
    recorder.announce(Activity("checking the bricks"))
    source = source_of(runtime)
    source.poll()
    apply(store, [*source.snapshot()])
    for brick in ("RmsNorm", "DownProjection", "LmHead"):  # the order of these bricks in the model
        say(brick, passed=True)
    if not together:
        hear()
    say("DownProjection", passed=False)
    say("RmsNorm", passed=False)
    say("DownProjection", passed=False, note="met 2 times")
    hear()
    checks = store.sources[source.key].checks
    failed = [(brick, check.note) for (brick, _), check in checks.items() if not check.passed]
    assert failed == [("DownProjection", "met 2 times"), ("RmsNorm", "")]
    assert list(record_of(source).checks) == list(checks)
    recorder.close("done")


def test_announcements_over_the_limit_are_counted_and_shown_and_harm_nothing(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(announcements, "MAX_ANNOUNCED", 10)
    profiler = profiler_in(runtime, Clock())
    for number in range(50):
        profiler.announce(CheckResult(f"brick {number}", "finite", True, None, None))
        profiler.announce(Ceiling(f"roof {number}", "bandwidth", 1.0, "GB/s", Provenance.MEASURED))
        profiler.announce(Dependency(1, number))
    # The limit of announcements is reached. This result is accepted, because it replaces a result with the same name.
    profiler.announce(CheckResult("brick 3", "finite", False, None, None))
    source = source_of(runtime)
    record = record_of(source)
    state = source.state_message()
    assert (state.state, state.left_out) == ("live", 120)
    assert (len(record.checks), len(record.ceilings), len(record.dependencies)) == (10, 10, 10)
    assert not record.checks["brick 3", "finite"].passed
    assert len(caplog.messages) == 1
    view = source_view(record)
    assert "120 announcements left out" in text_report([view], [])
    assert json.loads(json_report([view]))["sources"][0]["loss"]["announcements_left_out"] == 120
    assert "120 announcements left out" in sources_text([source_row(record)])
    assert json.loads(sources_json([source_row(record)]))["sources"][0]["announcements_left_out"] == 120
    assert "120 announcements left out" in "".join(text for text, _ in drops(view.loss))


def test_a_writer_without_bounds_makes_its_source_neither_grow_nor_faulty(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Keep a reference to the profiler. Python would otherwise collect it, and it would announce its end.
    profiler = profiler_in(runtime, Clock())
    profiler.announce(Activity("loading"))
    source = source_of(runtime)
    source.poll()
    monkeypatch.setattr(announcements, "MAX_ANNOUNCED", 10)
    monkeypatch.setattr(announcements, "MAX_ANNOUNCED_BYTES", 2000)
    with source.ring_path.with_suffix(".catalog").open("ab") as file:
        for number in range(30):
            for message in (CheckResult(str(number), "finite", True, None, None), Activity("x" * 200, number / 30)):
                payload = codec.encode(message)
                file.write(struct.pack("<II", len(payload), zlib.crc32(payload)) + payload)
    source.poll()
    assert source.state_message().left_out == 20
    assert len(source.catalog) == 12
    assert source.state == "live"


def test_records_read_together_with_a_source_fault_are_not_half_counted(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = profiler_in(runtime, Clock())
    with profiler.brick("a"):
        pass
    source = source_of(runtime)
    source.poll()
    with profiler.brick("a"):
        pass
    monkeypatch.setattr(CatalogReader, "read", lambda _: [Node(99, None, NodeKind.BRICK, "adrift")])
    source.poll()
    assert source.state == "faulty"
    assert balanced(source)
