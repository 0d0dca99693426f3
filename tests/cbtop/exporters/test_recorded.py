"""Tests of exports of a process: they contain all available records, and the number of lost records."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cbtop.exporters.base import RecordedProcess
from cbtop.exporters.recorded import process_of_files
from cbtop.exporters.records import LISTED_RECORDS, TimedRecord
from cbtop.exporters.tracks import laid_out, on_tracks
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol.catalog import CatalogWriter
from cbtop.protocol.errors import DecodeError, RingError
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_FAILED, RECORD_BYTES, UNKNOWN_AMOUNT, RingWriter
from cbtop.protocol.vocabulary import NodeKind
from tests.cbtop.exporters.made_processes import record_run, recorded_process, records_of


def brick(number: int, parent: int | None = None) -> Node:
    return Node(number, parent, NodeKind.BRICK, f"brick {number}")


def table_of(*nodes: Node) -> NodeTable:
    table = NodeTable()
    for node in nodes:
        table.add(node)
    return table


def files(directory: Path, *nodes: Node, size_bytes: int = 1 << 20) -> tuple[RingWriter, Path, Path]:
    catalog = CatalogWriter(directory / "1-2-0.catalog")
    for node in nodes:
        catalog.write(node)
    catalog.close()
    return RingWriter(directory / "1-2-0.ring", size_bytes), directory / "1-2-0.ring", directory / "1-2-0.catalog"


def test_a_run_comes_back_whole(runtime: Path) -> None:
    recorded = recorded_process(runtime)
    assert recorded.pid == os.getpid()
    assert recorded.process
    assert (len(recorded.nodes), len(list(recorded.records)), recorded.overwritten, recorded.rejected) == (
        7,
        14,
        0,
        0,
    )
    first = next(iter(recorded.records))
    assert recorded.nodes[first.node].name == "RmsNorm"
    assert (first.end_ns - first.start_ns, first.elements, first.failed) == (10_000, 16, False)
    assert sum(record.failed for record in recorded.records) == 2


def test_what_one_thread_recorded_lies_on_one_track(runtime: Path) -> None:
    recorded = recorded_process(runtime)
    assert sorted(laid_out(recorded)) == sorted((0, record) for record in recorded.records)


def test_more_than_a_chunk_is_walked_in_order(runtime: Path) -> None:
    writer, ring, catalog = files(runtime, brick(1))
    for number in range(2 * LISTED_RECORDS + 1):
        writer.record(1 | FLAG_FAILED, number, number + 1, number)
    records = list(process_of_files(ring, catalog).records)
    assert records == [TimedRecord(1, n, n + 1, n, True) for n in range(2 * LISTED_RECORDS + 1)]


def test_what_is_not_in_the_trace_is_counted(runtime: Path) -> None:
    writer, ring, catalog = files(runtime, brick(1), size_bytes=8 * RECORD_BYTES)
    for node, start_ns, end_ns in [(1, 0, 1)] * 5 + [(0, 1, 2), (2, 1, 2), (1, 3, 2)] + [(1, 0, 1)] * 2:
        writer.record(node, start_ns, end_ns, 1)
    recorded = process_of_files(ring, catalog)
    records = list(recorded.records)
    assert recorded.rejected == 3
    assert len(records) + recorded.rejected + recorded.overwritten == 10
    assert records == [TimedRecord(1, 0, 1, 1, False)] * len(records)


def test_what_a_daemon_counts_in_nothing_is_in_no_trace(runtime: Path) -> None:
    writer, ring, catalog = files(runtime, brick(1))
    odd = [(1, -5, 2, 1), (1, 0, 1 << 62, 1), (1, 0, 1, 1 << 62), (1 | FLAG_AMOUNTS, -7, 0, 1)]
    for record in [(1, 0, 1, 1), *odd, (1 | FLAG_AMOUNTS, UNKNOWN_AMOUNT, 3, 0)]:
        writer.record(*record)
    recorded = process_of_files(ring, catalog)
    assert (len(list(recorded.records)), recorded.rejected) == (1, len(odd))


def test_a_killed_process_can_be_exported(runtime: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from cbtop import BrickProfiler\n"
        "profiler = BrickProfiler()\n"
        "with profiler.brick('done'): pass\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, env=os.environ | {"CBTOP_RUNTIME_DIR": str(runtime)})
    (ring,), (catalog,) = runtime.glob("*.ring"), runtime.glob("*.catalog")
    recorded = process_of_files(ring, catalog)
    assert [recorded.nodes[record.node].name for record in recorded.records] == ["done"]


def test_a_ring_that_is_not_there_is_an_error_of_ours(runtime: Path) -> None:
    ring, catalog = record_run(runtime)
    with pytest.raises(RingError):
        process_of_files(runtime / "none.ring", catalog)
    with pytest.raises(DecodeError):
        process_of_files(ring, runtime / "none.catalog")


def test_a_catalog_with_a_gap_is_an_error_of_ours(runtime: Path) -> None:
    _, ring, catalog = files(runtime, brick(2))
    with pytest.raises(DecodeError, match="1 was due"):
        process_of_files(ring, catalog)


def spans(*records: tuple[int, int, int]) -> tuple[TimedRecord, ...]:
    return tuple(TimedRecord(node, start_ns, end_ns, 1, False) for node, start_ns, end_ns in records)


@pytest.mark.parametrize(
    ("records", "places"),
    [
        # Brick 1 runs twice at the same time. Its first call ends before brick 2 begins, so brick 2 belongs to the
        # second call.
        ([(1, 0, 10), (1, 5, 60), (2, 20, 50)], [(0, 0), (1, 0), (1, 1)]),
        # Brick 1 runs twice at the same time. The call of brick 1 that ends first encloses only the short call of
        # brick 2. So the long call of brick 2 belongs to the other call of brick 1.
        ([(1, 0, 100), (1, 1, 50), (2, 5, 45), (2, 10, 80)], [(0, 0), (1, 0), (1, 1), (0, 1)]),
        # Brick 1 runs twice at the same time. Each of the two calls gets one call of brick 2.
        ([(1, 0, 100), (1, 1, 90), (2, 10, 20), (2, 30, 40)], [(0, 0), (1, 0), (1, 1), (0, 1)]),
        # The innermost call that encloses a call is its parent: brick 4 belongs to brick 2, not to brick 1.
        ([(1, 0, 70), (1, 1, 90), (2, 2, 80), (4, 10, 20)], [(0, 0), (1, 0), (1, 1), (1, 2)]),
    ],
)
def test_what_tasks_that_interleave_call_lies_in_what_called_it(
    records: list[tuple[int, int, int]], places: list[tuple[int, int]]
) -> None:
    nodes = table_of(brick(1), brick(2, 1), brick(3), brick(4, 2))
    assert [(track, depth) for track, depth, _ in on_tracks(nodes, spans(*records))] == places


@pytest.mark.parametrize(
    ("records", "tracks"),
    [
        ([(1, 0, 10), (1, 5, 15)], 2),  # Two threads run the same brick at the same time.
        ([(1, 0, 10), (3, 2, 4)], 2),  # Brick 3 is not a child of brick 1, although it runs at this time.
        ([(1, 0, 10), (2, 2, 4), (2, 4, 6)], 1),
        ([(1, 0, 10), (2, 0, 10)], 1),  # The clock is so coarse that parent and child have equal times.
        ([(1, 0, 0), (2, 0, 0), (3, 0, 0), (1, 0, 5), (3, 5, 9)], 1),
    ],
)
def test_what_overlaps_without_nesting_takes_another_track(records: list[tuple[int, int, int]], tracks: int) -> None:
    recorded = RecordedProcess("made", 1, table_of(brick(1), brick(2, 1), brick(3)), records_of(spans(*records)))
    found = list(laid_out(recorded))
    assert {track for track, _ in found} == set(range(tracks))
    assert sorted(record for _, record in found) == sorted(recorded.records)
