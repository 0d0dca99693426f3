"""The critical path of what ran: said where anything lies beside it, and never at the price of the view."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbtop.client.store import SourceRecord
from cbtop.profiler.graph.analysis import CriticalPath
from cbtop.profiler.graph.execution_graph import ExecutionGraph
from cbtop.protocol.messages import Dependency
from cbtop.protocol.vocabulary import TransferDirection
from cbtop.reports import REPORTS
from cbtop.viewmodels import graph
from cbtop.viewmodels.source import source_view
from tests.cbtop.recorded import Clock, decode_run, profiler_in, record_of, source_of

STEPS = 3


def fetch_beside_the_bricks(runtime: Path) -> SourceRecord:
    """Each step: 10 µs `first`, then 20 µs `second` and beside it a `fetch` polled for 4 µs."""
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for _ in range(STEPS):
        with profiler.step("decode", tokens=1):
            with profiler.brick("first"):
                clock.sleep_us(10)
            profiler.graph_record_poll("fetch", 4_000, is_done=True)
            with profiler.brick("second"):
                clock.sleep_us(20)
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
        profiler.graph_record_transfer("host", "gpu", 4096, TransferDirection.H2D, 6_000)
        with profiler.brick("only"):
            clock.sleep_us(10)
    text = REPORTS["text"]([source_view(record_of(source_of(runtime)))], ["tree"], None)
    assert "critical path 16.00 µs, 2 of 2 timed nodes" in text
    assert "[critical]" not in text


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
