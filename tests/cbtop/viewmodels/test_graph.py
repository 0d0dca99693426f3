"""Tests of the rows of the graph: a row is computed on demand, and equals that of a completely computed graph."""

from __future__ import annotations

from pathlib import Path

from cbtop.client.store import Store
from cbtop.protocol.vocabulary import NodeKind
from cbtop.reports import REPORTS
from cbtop.reports.text import SECTIONS
from cbtop.viewmodels.graph import costliest_brick, places_of
from cbtop.viewmodels.source import source_view
from tests.cbtop.recorded import Clock, apply, decode_run, profiler_in, source_of


def test_a_row_asked_for_by_itself_is_that_of_all_together(tmp_path: Path) -> None:
    rows = source_view(decode_run(tmp_path)).graph
    assert len(rows) == 12
    assert [rows[at] for at in range(len(rows))] == list(rows) == list(rows[:])
    assert rows[-1] == rows[len(rows) - 1]


def test_a_view_makes_no_row_of_the_graph_and_a_report_each_once(tmp_path: Path, rows_made: list[int]) -> None:
    view = source_view(decode_run(tmp_path))
    assert view.bricks
    assert view.books is not None
    assert rows_made == []
    assert view.graph[3].id == rows_made.pop()
    for report in REPORTS.values():
        report([view], list(SECTIONS), None)
        assert sorted(rows_made) == sorted(node.id for node in places_of(view.graph))
        rows_made.clear()


def test_where_no_node_is_new_the_places_are_the_same_object(tmp_path: Path) -> None:
    record = decode_run(tmp_path)
    assert places_of(source_view(record).graph) is places_of(source_view(record).graph)


def test_views_are_compared_without_a_row_made(tmp_path: Path, rows_made: list[int]) -> None:
    profiler = profiler_in(tmp_path, Clock())
    with profiler.step("decode", 1), profiler.brick("a"):
        pass
    source, store = source_of(tmp_path), Store()
    source.poll()
    apply(store, source.snapshot())
    record = store.sources[source.key]
    first, again = source_view(record), source_view(record)
    with profiler.step("decode", 1), profiler.brick("a"):
        pass
    source.poll()
    apply(store, source.delta())
    later = source_view(record)
    assert first.graph == again.graph
    assert first.graph != later.graph
    assert rows_made == []


def test_the_costliest_brick_counts_with_all_its_places(tmp_path: Path) -> None:
    clock = Clock()
    profiler = profiler_in(tmp_path, clock)
    with profiler.step("decode", 1):
        for layer, took_ns in enumerate((300, 400, 350)):
            with profiler.layer(layer), profiler.brick("Mlp"):
                clock.now_ns += took_ns
        with profiler.brick("LmHead"):
            clock.now_ns += 600
    source, store = source_of(tmp_path), Store()
    source.poll()
    apply(store, source.snapshot())
    graph = source_view(store.sources[source.key]).graph
    for rows in (graph, tuple(graph)):
        (costliest,) = [row for row in graph if row.id == costliest_brick(rows)]
        assert (costliest.name, costliest.total_inclusive_us) == ("Mlp", 0.4)


def test_the_costliest_brick_is_that_with_most_exclusive_time_without_a_row_made(
    tmp_path: Path, rows_made: list[int]
) -> None:
    view = source_view(decode_run(tmp_path))
    node = costliest_brick(view.graph)
    assert rows_made == []
    us = {row.id: row.total_inclusive_us for row in view.graph if row.kind is NodeKind.BRICK}
    parents = {row.parent for row in view.graph if row.kind is NodeKind.BRICK}
    leaves = {id_: taken for id_, taken in us.items() if id_ not in parents and taken}
    assert node in leaves
    assert leaves[node] == max(leaves.values())
    assert costliest_brick(tuple(view.graph)) in us
    assert costliest_brick(()) is None
