"""Tests of the columns of calls: their values equal those that other exporters write.

Each call has the brick and the layer of its node.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from cbtop.exporters import EXPORTERS
from cbtop.exporters.base import RecordedProcess
from cbtop.exporters.call_columns import OF_BRICKS, OF_CALLS, OF_KERNELS, OF_STEPS, CallColumns, are_steps, of_kinds
from cbtop.exporters.recorded import processes_of_recording
from cbtop.exporters.records import Records, TimedRecord
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol.messages import Node
from cbtop.protocol.recording import RecordingReader
from cbtop.protocol.vocabulary import BrickCategory, NodeKind
from cbtop.tables.column_table import ColumnTable
from tests.cbtop.exporters.made_processes import any_process, records_of

RECORDINGS = sorted(Path(__file__).parents[1].glob("*.cbtop"))


def calls_of(*processes: RecordedProcess) -> ColumnTable:
    return CallColumns(processes, OF_CALLS, of_kinds(*NodeKind)).table()


def exported(name: str, process: RecordedProcess) -> str:
    out = io.BytesIO()
    EXPORTERS[name].write([process], out)
    return out.getvalue().decode()


@pytest.fixture(
    params=[pytest.param(path, marks=() if path.stem == "h100" else pytest.mark.slow) for path in RECORDINGS],
    ids=lambda path: path.stem,
)
def process(request: pytest.FixtureRequest) -> Iterator[RecordedProcess]:
    """Return the recorded process that has the most records."""
    reader = RecordingReader(request.param)
    yield max(processes_of_recording(reader).values(), key=lambda one: len(one.records))
    reader.close()


def texts(table: ColumnTable, name: str) -> list[str]:
    """Return a column as CSV shows it: an empty field for an unknown value."""
    found = table.column(name).tolist()
    return [
        "" if one is None or one != one else str(int(one)) if isinstance(one, float) else str(one) for one in found
    ]


def test_the_columns_have_the_values_of_csv(process: RecordedProcess) -> None:
    table = calls_of(process)
    rows = list(csv.DictReader(io.StringIO(exported("csv", process))))
    assert len(table) == len(rows) > 3_000
    for name in ("step", "phase", "model", "layer", "stack", "brick", "label", "kind", "node", "elements"):
        assert texts(table, name) == [row[name] for row in rows], name
    begin_ns = min(int(row["start_ns"]) for row in rows)
    starts_ns = np.round(table.column("begin_s") * 1e9).astype(np.int64) + begin_ns
    assert starts_ns.tolist() == [int(row["start_ns"]) for row in rows]
    spans_ns = np.round(table.column("duration_us") * 1e3).astype(np.int64)
    assert spans_ns.tolist() == [int(row["end_ns"]) - int(row["start_ns"]) for row in rows]
    for name in ("failed", "plain"):
        assert table.column(name).astype(int).tolist() == [int(row[name]) for row in rows]


def test_the_columns_have_the_values_of_json_lines(process: RecordedProcess) -> None:
    table = calls_of(process)
    rows = [json.loads(line) for line in exported("jsonl", process).splitlines()]
    assert table.column("node").tolist() == [row["node"] for row in rows]
    assert table.column("kind").tolist() == [row["kind"] for row in rows]
    assert table.column("failed").tolist() == [row["failed"] for row in rows]
    np.testing.assert_allclose(table.column("duration_us"), [(row["end_ns"] - row["start_ns"]) / 1e3 for row in rows])


def test_a_call_lies_inside_the_time_of_its_step(process: RecordedProcess) -> None:
    steps = CallColumns([process], OF_STEPS, are_steps).table()
    assert steps.column("step").tolist() == list(range(1, len(steps) + 1))
    begin_s, end_s = (np.zeros(len(steps) + 1) for _ in range(2))
    begin_s[1:] = steps.column("begin_s")
    end_s[1:] = begin_s[1:] + steps.column("duration_us") / 1e6
    table = calls_of(process)
    step = np.nan_to_num(table.column("step")).astype(np.int64)
    inside = step > 0
    assert inside.mean() > 0.99
    assert (table.column("begin_s")[inside] >= begin_s[step[inside]] - 1e-9).all()
    ends_s = table.column("begin_s") + table.column("duration_us") / 1e6
    assert (ends_s[inside] <= end_s[step[inside]] + 1e-9).all()


@given(any_process())
def test_any_records_give_one_row_each(recorded: RecordedProcess) -> None:
    table = calls_of(recorded, recorded)
    assert table.column("node").tolist() == [record.node for record in recorded.records] * 2
    assert table.column("elements").tolist() == [record.elements for record in recorded.records] * 2


def test_every_kind_of_node_is_in_its_place() -> None:
    nodes = NodeTable()
    for node in (
        Node(1, None, NodeKind.STEP, "decode", "draft"),
        Node(2, 1, NodeKind.LAYER, "7", "encoder"),
        Node(3, 2, NodeKind.BRICK, "Mlp", "mlp", BrickCategory.FFN, backend="cuda"),
        Node(4, 3, NodeKind.BRICK, "UpProjection", "up_proj"),
        Node(5, 4, NodeKind.KERNEL, "gemm", backend="cuda"),
        Node(6, 1, NodeKind.LAYER, "head"),
        Node(7, 1, NodeKind.STEP, "inner"),
        Node(8, 3, NodeKind.ADOPTED, "adopted"),
        Node(9, 8, NodeKind.BRICK, "Expert"),
    ):
        nodes.add(node)
    records = records_of([TimedRecord(node, 0, node, 1, False) for node in (9, 8, 5, 4, 3, 2, 6, 7, 1)])
    process = RecordedProcess("program", 42, nodes, records, key="host:42:1:0", rank=3)
    bricks = CallColumns([process], OF_BRICKS, of_kinds(NodeKind.BRICK)).table()
    names = [name for name in bricks.columns if name not in ("begin_s", "duration_us")]
    assert {name: bricks.column(name).tolist() for name in names} == {
        "step": [1] * 3, "phase": ["decode"] * 3, "model": ["draft"] * 3, "layer": [7] * 3, "stack": ["encoder"] * 3,
        "brick": ["Expert", "UpProjection", "Mlp"], "label": [None, "up_proj", "mlp"],
        "outer_brick": ["Mlp", "Mlp", None], "adopted": [True, False, False],
        "category": [None, None, "FFN"], "backend": [None, None, "cuda"], "elements": [1] * 3, "failed": [False] * 3,
        "program": ["program"] * 3, "pid": [42] * 3, "rank": [3] * 3,
        "source": ["host:42:1:0"] * 3, "node": [9, 4, 3],
    }  # fmt: skip
    kernels = CallColumns([process], OF_KERNELS, of_kinds(NodeKind.KERNEL)).table()
    assert [kernels.column(name).tolist() for name in ("kernel", "brick", "label")] == [
        ["gemm"], ["UpProjection"], ["up_proj"],
    ]  # fmt: skip
    layers = calls_of(process).column("layer").tolist()
    assert layers[:6] == [7] * 6
    assert np.isnan(layers[6:]).all()  # This layer has a name but no number.
    steps = CallColumns([process], OF_STEPS, are_steps).table()
    assert steps.column("phase").tolist() == ["decode"]  # A step inside another step is left out.


def test_a_process_without_records_gives_a_table_without_rows() -> None:
    table = calls_of(RecordedProcess("idle", 1, NodeTable(), Records(())))
    assert (len(table), table.columns) == (0, OF_CALLS)
