"""Tests of the critical path: the path is shown if work overlaps. Its computation does not block the view."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbtop.client.source_record import SourceRecord
from cbtop.profiler.analysis.graph.analysis import CriticalPath
from cbtop.profiler.analysis.graph.execution_graph import ExecutionGraph
from cbtop.profiler.analysis.graph.nodes import Transfer
from cbtop.profiler.definitions import BrickDefinition
from cbtop.protocol.messages import Dependency
from cbtop.protocol.vocabulary import BrickCategory, TransferDirection
from cbtop.reports import REPORTS
from cbtop.viewmodels import graph
from cbtop.viewmodels.source import source_view
from cbtop.viewmodels.timeline import timeline_view
from tests.cbtop.recorded import Clock, decode_run, profiler_in, record_of, source_of
from tests.cbtop.viewmodels.test_timeline import followed

STEPS = 3


def fetch_beside_the_bricks(runtime: Path) -> SourceRecord:
    """Record steps of 35 µs: the brick `first` takes 10 µs, then `second` takes 20 µs.

    The brick `fetch` runs in the background at the same time. A poll finds that `fetch` has finished, and records 4
    µs for it.
    """
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for _ in range(STEPS):
        with profiler.step("decode", tokens=1):
            with profiler.brick("first"):
                clock.sleep_us(10)
            profiler.graph_record_poll("fetch", 4_000, is_done=True)
            with profiler.brick("second"):
                clock.sleep_us(20)
            clock.sleep_us(5)
    return record_of(source_of(runtime))


def test_what_lies_beside_the_path_has_slack(runtime: Path) -> None:
    view = source_view(fetch_beside_the_bricks(runtime))
    path = view.critical_path
    assert path is not None
    assert (path.total_us, path.nodes, path.timed_nodes, path.unknown) == (30, 2, 3, "")
    found = {row.name: (row.on_critical_path, row.slack_us) for row in view.graph}
    assert found == {"first": (True, 0), "fetch": (False, 16), "second": (True, 0)}


def test_text_and_json_say_the_path_and_the_slack(runtime: Path) -> None:
    view = source_view(fetch_beside_the_bricks(runtime))
    text = REPORTS["text"]([view], ["tree"], None)
    lines = text.split("\n\n")[1].splitlines()
    assert [line.partition("  [")[2] for line in lines] == ["", "critical]", "slack 16.00 µs]", "critical]", ""]
    assert lines[-1] == "critical path 30.00 µs, 2 of 3 timed nodes (derived, of the mean run)"
    found = json.loads(REPORTS["json"]([view], [], None))
    (source,) = found["sources"]
    assert [(row["on_critical_path"], row["slack_us"]) for row in source["graph"]] == [
        (True, 0),
        (False, 16),
        (True, 0),
    ]
    assert source["critical_path"] == {"total_us": 30, "nodes": 2, "timed_nodes": 3, "unknown": None}
    assert {"on_critical_path", "slack_us"} <= set(found["provenance"]["derived from measured"])
    assert "[" not in source["tree"]


def test_of_one_sequence_nothing_is_said(runtime: Path) -> None:
    view = source_view(decode_run(runtime))
    assert view.critical_path is None
    assert {(row.on_critical_path, row.slack_us) for row in view.graph} == {(None, None)}
    assert "critical" not in REPORTS["text"]([view], ["tree"], None)


def test_where_all_of_it_is_critical_the_length_is_said_and_no_row_is_marked(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.step("decode", tokens=1):
        clock.sleep_us(6)
        profiler.graph_record_transfer("host", "gpu", 4096, TransferDirection.H2D, 6_000)
        with profiler.brick("only"):
            clock.sleep_us(10)
    text = REPORTS["text"]([source_view(record_of(source_of(runtime)))], ["tree"], None)
    assert "critical path 16.00 µs, 2 of 2 timed nodes" in text
    assert "[critical]" not in text


FIRST, SECOND = (BrickDefinition(name, BrickCategory.FFN, backend="cuda") for name in ("first", "second"))


def two_streams(runtime: Path, stream: int | None) -> SourceRecord:
    """Record steps of 250 µs.

    One brick runs from 10 to 100 µs, one from 100 to 200 µs, and a copy of 1 MB from 50 to 130 µs.
    """
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    copy = Transfer("host", "device", 1_000_000, TransferDirection.H2D, stream=stream)
    for _ in range(STEPS):
        begun_ns = clock()
        with profiler.step("decode", tokens=1) as step:
            clock.sleep_us(250)
            step.wait()
        ran = ((FIRST,), 10, 100), ((copy,), 50, 130), ((SECOND,), 100, 200)
        step.told([(key, begun_ns + 1_000 * begin, begun_ns + 1_000 * end, 1) for key, begin, end in ran])
    return followed(source_of(runtime))


def test_a_copy_on_its_own_stream_is_off_the_path_and_on_its_own_lane(runtime: Path) -> None:
    record = two_streams(runtime, stream=7)
    view = source_view(record)
    found = {row.name: (row.on_critical_path, row.slack_us) for row in view.graph}
    assert found == {"first": (True, 0), "host → device": (False, 20), "second": (True, 0)}
    assert view.critical_path is not None
    assert view.critical_path.total_us == 90 + 100
    timeline = timeline_view(record, "decode", is_sample=False)
    assert timeline is not None
    shown = [(lane.name, [span.name for span in lane.rows[lane.bricks].spans]) for lane in timeline.lanes]
    assert shown == [("steps", ["first", "second"] * STEPS), ("beside steps", ["host → device"] * STEPS)]


def test_a_path_longer_than_the_step_is_none_and_it_is_said_why(runtime: Path) -> None:
    view = source_view(two_streams(runtime, stream=None))
    assert view.critical_path is not None
    said = "its nodes take 270.0 µs, a step 250.0 µs: some run beside others, and none of them says so"
    assert view.critical_path.unknown == said
    assert {row.slack_us for row in view.graph} == {None}


def test_a_copy_is_shown_with_its_bytes_and_what_they_are_over_its_time(runtime: Path) -> None:
    view = source_view(two_streams(runtime, stream=7))
    assert "H2D: host → device  1000000B 80.0µs  [12.50 GB/s]" in REPORTS["text"]([view], ["tree"], None)
    (source,) = json.loads(REPORTS["json"]([view], [], None))["sources"]
    copies = [row["transfer"] for row in source["graph"] if row["transfer"] is not None]
    assert copies == [
        {
            "source": "host", "destination": "device", "size_bytes": 1_000_000, "direction": "H2D", "stream": 7,
            "gb_per_sec": 12.5,
        }
    ]  # fmt: skip


def test_an_order_that_bites_its_own_tail_is_said_and_has_no_path(runtime: Path) -> None:
    record = fetch_beside_the_bricks(runtime)
    ids = {node.name: node.id for node in record.nodes.nodes}
    record.dependencies[Dependency(ids["second"], ids["first"])] = None
    view = source_view(record)
    assert view.critical_path is not None
    assert "cycle" in view.critical_path.unknown
    assert {row.slack_us for row in view.graph} == {None}
    assert "critical path n/a: a cycle has no critical path: first" in REPORTS["text"]([view], ["tree"], None)
    (source,) = json.loads(REPORTS["json"]([view], [], None))["sources"]
    assert source["critical_path"]["total_us"] is None


def test_the_path_is_computed_anew_only_when_the_graph_changed(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []

    def counted(of: ExecutionGraph) -> CriticalPath:
        computed.append(of)
        return critical_path(of)

    critical_path = graph.critical_path
    graph._recent.clear()
    monkeypatch.setattr(graph, "critical_path", counted)
    record = fetch_beside_the_bricks(runtime)
    first, again = source_view(record).graph, source_view(record).graph
    assert len(computed) == 1
    assert again == first
    ids = {node.name: node.id for node in record.nodes.nodes}
    record.dependencies[Dependency(ids["fetch"], ids["second"])] = None
    changed = source_view(record).critical_path
    assert len(computed) == 2
    assert changed is not None
    assert changed.total_us == 34


def test_a_graph_too_large_has_no_path_and_says_so(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MAX_PATH_NODES", 2)
    view = source_view(fetch_beside_the_bricks(runtime))
    assert view.critical_path is not None
    assert view.critical_path.unknown == "3 nodes; it is computed for up to 2"
    assert {row.on_critical_path for row in view.graph} == {None}
