"""Tests of all export formats: each contains every record and can be read by the tools for this format."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from perfetto.protos.perfetto.trace import perfetto_trace_pb2
from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

from cbtop.exporters import EXPORTERS
from cbtop.exporters.base import RecordedProcess
from cbtop.exporters.csv_rows import COLUMNS
from cbtop.exporters.folded import NOT_INSIDE, SELF
from cbtop.exporters.records import Records, TimedRecord
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import display_name, printable
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from tests.cbtop.exporters.made_processes import any_process, recorded_process, records_of
from tests.integration.hosts import DEADLINE_S
from tests.representatives import first_by_default

TEXTS = [name for name, exporter in EXPORTERS.items() if not exporter.is_binary]
SHELL = shutil.which("trace_processor_shell")


def exported_bytes(name: str, *processes: RecordedProcess) -> bytes:
    out = io.BytesIO()
    EXPORTERS[name].write(processes, out)
    return out.getvalue()


def exported(name: str, *processes: RecordedProcess) -> str:
    return exported_bytes(name, *processes).decode()


def names(recorded: RecordedProcess) -> list[str]:
    return [display_name(recorded.nodes[record.node]) for record in recorded.records]


@first_by_default("name", EXPORTERS, 3)
@given(recorded=any_process())
def test_every_format_can_be_written_to_a_file_and_again(name: str, recorded: RecordedProcess) -> None:
    assert exported_bytes(name, recorded) == exported_bytes(name, recorded)


@pytest.mark.parametrize("name", TEXTS)
def test_a_process_that_recorded_nothing_gives_a_whole_file(name: str) -> None:
    text = exported(name, RecordedProcess("idle", 1, NodeTable(), Records(())))
    if name.endswith("jsonl"):
        assert text == ""
    elif name == "csv":
        assert text == ",".join(COLUMNS) + "\r\n"
    elif name == "dot":
        assert text.startswith("digraph")
    elif name == "folded":
        assert text == ""
    else:
        assert json.loads(text)


def complete_events(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events that stand for records.

    First check that all events have the fields that the Chrome trace format requires.
    """
    for event in document["traceEvents"]:
        assert event["ph"] in "XM"
        assert {type(event["pid"]), type(event["tid"])} == {int}
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
        else:
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


@given(any_process())
def test_chrome_trace_holds_every_record_and_what_was_lost(recorded: RecordedProcess) -> None:
    document = json.loads(exported("chrome-trace", recorded))
    found = Counter(
        (e["name"], args["node"], round(e["ts"] * 1e3), round(e["dur"] * 1e3), args["failed"], "plain" in args)
        for e in complete_events(document)
        for args in (e["args"],)
    )
    assert found == Counter(
        (name, r.node, r.start_ns, r.end_ns - r.start_ns, r.failed, r.plain)
        for name, r in zip(names(recorded), recorded.records, strict=True)
    )
    lost = {"overwritten": recorded.overwritten, "rejected": recorded.rejected, "missed": recorded.missed}
    assert document["otherData"] == lost


@given(any_process())
def test_chrome_trace_events_of_one_thread_nest(recorded: RecordedProcess) -> None:
    open_until: dict[int, list[float]] = {}
    for event in complete_events(json.loads(exported("chrome-trace", recorded))):
        around, end = open_until.setdefault(event["tid"], []), round((event["ts"] + event["dur"]) * 1e3)
        while around and around[-1] <= round(event["ts"] * 1e3):
            around.pop()
        assert not around or end <= around[-1]
        around.append(end)


def test_a_recorded_chrome_trace_keeps_the_nanoseconds(runtime: Path) -> None:
    text = exported("chrome-trace", recorded_process(runtime))
    assert '"ts": 4000000000.123, "dur": 130.0' in text


# Without a path, the perfetto package would download trace_processor_shell.
@pytest.mark.skipif(SHELL is None, reason="there is no trace_processor_shell in the PATH")
@pytest.mark.parametrize("name", ["chrome-trace", "perfetto"])
def test_perfetto_opens_it(runtime: Path, name: str) -> None:
    recorded = recorded_process(runtime)
    data = io.BytesIO(exported_bytes(name, recorded))
    config = TraceProcessorConfig(bin_path=SHELL, load_timeout=round(DEADLINE_S))
    with TraceProcessor(trace=data, config=config) as processor:
        rows = processor.query("select name, ts, dur, depth from slice order by ts, depth")
        found = [(row.name, row.ts, row.dur, row.depth) for row in rows]
        (process,) = [row.name for row in processor.query("select name from process where pid != 0")]
    records = sorted(
        zip(names(recorded), recorded.records, strict=True), key=lambda pair: (pair[1].start_ns, pair[1].node)
    )
    depths = {"decode": 0, "Layer 0": 1, "Layer 1": 1}
    expected = [(name, r.start_ns, r.end_ns - r.start_ns, depths.get(name, 2)) for name, r in records]
    assert found == expected
    assert process == recorded.process


def slices(packets: perfetto_trace_pb2.Trace) -> Counter[tuple[str, str, int, int, int, bool]]:
    """Return (process, name, begin, end, elements, failed) of every slice, read with Perfetto's own protos."""
    named: dict[int, str] = {}
    processes: dict[int, str] = {}
    process_of: dict[int, str] = {}
    around: dict[int, list[tuple[str, int, int, bool]]] = {}
    found: Counter[tuple[str, str, int, int, int, bool]] = Counter()
    for packet in packets.packet:
        assert packet.trusted_packet_sequence_id
        named |= {name.iid: name.name for name in packet.interned_data.event_names}
        about = packet.track_descriptor
        if about.HasField("process"):
            processes[about.uuid] = about.process.process_name
        elif about.uuid:
            process_of[about.uuid] = processes[about.parent_uuid]
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        if event.type == event.TYPE_SLICE_BEGIN:
            values = {note.name_iid: note for note in event.debug_annotations}
            failed, plain = (number in values and values[number].bool_value for number in (2, 3))
            open_here = around.setdefault(event.track_uuid, [])
            open_here.append((named[event.name_iid], packet.timestamp, values[1].uint_value, failed, plain))
        else:
            name, start_ns, *about = around[event.track_uuid].pop()
            found[process_of[event.track_uuid], name, start_ns, packet.timestamp, *about] += 1
    assert not any(around.values())
    return found


@given(any_process(), any_process())
def test_perfettos_own_protos_read_every_record_of_every_process(
    first: RecordedProcess, second: RecordedProcess
) -> None:
    packets = perfetto_trace_pb2.Trace.FromString(exported_bytes("perfetto", first, second))

    def utf8(text: str) -> str:
        return text.encode("utf-8", "replace").decode()

    assert slices(packets) == Counter(
        (utf8(recorded.process), utf8(name), r.start_ns, r.end_ns, r.elements, r.failed, r.plain)
        for recorded in (first, second)
        for name, r in zip(names(recorded), recorded.records, strict=True)
    )


@given(any_process(), any_process())
def test_several_processes_in_one_file_are_all_there(first: RecordedProcess, second: RecordedProcess) -> None:
    both = json.loads(exported("chrome-trace", first, second))
    records = len(list(first.records)) + len(list(second.records))
    assert len(complete_events(both)) == records
    profiles = json.loads(exported("speedscope", first, second))["profiles"]
    assert sum(len(profile["events"]) for profile in profiles) == 2 * records


def test_dot_shows_the_graph_with_mean_times(runtime: Path) -> None:
    text = exported("dot", recorded_process(runtime))
    assert "RmsNorm" in text
    assert "10.0µs" in text


@given(any_process())
def test_speedscope_opens_and_closes_frames_in_order(recorded: RecordedProcess) -> None:
    document = json.loads(exported("speedscope", recorded))
    assert document["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = document["shared"]["frames"]
    spans: Counter[tuple[str, int, int]] = Counter()
    for profile in document["profiles"]:
        assert (profile["type"], profile["unit"]) == ("evented", "nanoseconds")
        now, around = profile["startValue"], []
        for event in profile["events"]:
            assert event["at"] >= now
            now = event["at"]
            assert 0 <= event["frame"] < len(frames)
            if event["type"] == "O":
                around.append(event)
            else:
                opened = around.pop()
                assert (event["type"], event["frame"]) == ("C", opened["frame"])
                spans[frames[event["frame"]]["name"], opened["at"], event["at"]] += 1
        assert not around
        assert now <= profile["endValue"]
    assert spans == Counter((n, r.start_ns, r.end_ns) for n, r in zip(names(recorded), recorded.records, strict=True))


def test_speedscope_gives_one_name_one_frame(runtime: Path) -> None:
    document = json.loads(exported("speedscope", recorded_process(runtime)))
    frames = [frame["name"] for frame in document["shared"]["frames"]]
    assert frames == ["decode", "Layer 0", "RmsNorm", 'q"k\\v, projection', "Layer 1"]
    assert len(document["profiles"]) == 1


# A line as flamegraph.pl reads it. If the first group matches again, the line would be one of two runs.
FOLDED = re.compile(r"^(.*)\s+?(\d+(?:\.\d*)?)$")


def folded(*processes: RecordedProcess) -> dict[tuple[str, ...], int]:
    """Return the self time of each path, read as flamegraph.pl and speedscope read a file."""
    times: Counter[tuple[str, ...]] = Counter()
    for line in exported("folded", *processes).splitlines():
        match = FOLDED.match(line)
        assert match
        assert line == f"{match[1]} {match[2]}"
        assert not FOLDED.match(match[1])
        stack = match[1].split(";")
        times[tuple(stack[:-1] if stack[-1] == SELF else stack)] += int(match[2])
    return dict(times)


def without_adopted(recorded: RecordedProcess) -> RecordedProcess:
    """Return the process with bricks instead of the work of other threads."""
    table = NodeTable()
    for node in recorded.nodes.nodes:
        table.add(replace(node, kind=NodeKind.BRICK) if node.kind is NodeKind.ADOPTED else node)
    return replace(recorded, nodes=table)


@given(any_process().map(without_adopted))
def test_folded_stacks_have_the_self_times_of_the_flame_chart(recorded: RecordedProcess) -> None:
    charted: Counter[str] = Counter()
    document = json.loads(exported("speedscope", recorded))
    for profile in document["profiles"]:
        around: list[str] = []
        now = 0
        for event in profile["events"]:
            if around:
                charted[around[-1]] += event["at"] - now
            now = event["at"]
            if event["type"] == "O":
                around.append(document["shared"]["frames"][event["frame"]]["name"])
            else:
                around.pop()
    stacked: Counter[str] = Counter()
    for path, self_ns in folded(recorded).items():
        stacked[path[-2] if path[-1] == NOT_INSIDE else path[-1]] += self_ns
    as_frames: Counter[str] = Counter()
    for name, self_ns in charted.items():
        as_frames[printable(name).replace(";", ",")] += self_ns
    assert +stacked == +as_frames


def test_a_folded_brick_that_waits_for_other_threads_has_all_of_its_time() -> None:
    table = NodeTable()
    kinds = NodeKind.STEP, NodeKind.BRICK, NodeKind.ADOPTED, NodeKind.BRICK
    for number, (kind, name) in enumerate(zip(kinds, ("decode", "Experts", "adopted", "Expert"), strict=True), 1):
        table.add(Node(number, number - 1 or None, kind, name))
    inside = [TimedRecord(node, 20, end, 0, False) for end in (60, 70) for node in (3, 4)]
    records = [TimedRecord(1, 0, 100, 0, False), TimedRecord(2, 10, 80, 0, False), *inside]
    assert folded(RecordedProcess("host", 42, table, records_of(records))) == {
        ("decode",): 30,
        ("decode", "Experts"): 70,
        ("decode", "Experts", "adopted", "Expert"): 40 + 50,
    }


def test_a_folded_stack_is_the_path_of_a_brick_and_of_its_process(runtime: Path) -> None:
    recorded = recorded_process(runtime)
    alone = folded(recorded)
    layers = [("decode", f"Layer {index}") for index in range(2)]
    assert alone == {
        ("decode",): 2 * 2 * 5_000,
        **{(*layer, "RmsNorm"): 2 * 10_000 for layer in layers},
        **{(*layer, 'q"k\\v, projection'): 2 * 50_000 for layer in layers},
    }
    process = f"{recorded.process} {recorded.pid}"
    assert folded(recorded, recorded) == {(process, *path): 2 * self_ns for path, self_ns in alone.items()}


@given(any_process())
def test_csv_has_one_line_a_record(recorded: RecordedProcess) -> None:
    text = exported("csv", recorded)
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert len(rows) == len(list(recorded.records)) == text.count("\r\n") - 1
    for row, record in zip(rows, recorded.records, strict=True):
        node = recorded.nodes[record.node]
        numbers = [int(row[column]) for column in ("node", "start_ns", "end_ns", "elements", "failed", "plain")]
        assert numbers == [int(value or 0) for value in record]
        assert row["parent"] == ("" if node.parent is None else str(node.parent))


def named(*names: str) -> RecordedProcess:
    """Return a process that has one brick for each name, and one record of each brick."""
    table = NodeTable()
    for number, name in enumerate(names, start=1):
        table.add(Node(number, None, NodeKind.BRICK, name))
    return RecordedProcess(
        "host", 42, table, records_of([TimedRecord(n + 1, n, n + 1, n, False) for n in range(len(names))])
    )


@given(any_process())
def test_no_cell_of_csv_begins_a_formula(recorded: RecordedProcess) -> None:
    for row in list(csv.reader(io.StringIO(exported("csv", recorded), newline=""))):
        assert not any(cell.startswith(tuple("=+-@\t\r＝＋－＠")) for cell in row)


def test_only_a_name_that_would_begin_a_formula_is_put_after_a_quote() -> None:
    text = exported("csv", named("=HYPERLINK(1)", "+1", "-1", "@SUM(1)", "＝1", "\t=1", "\r=1", "a=b", "x-1", "'"))
    found = [row["name"] for row in csv.DictReader(io.StringIO(text, newline=""))]
    assert found == [
        "'=HYPERLINK(1)", "'+1", "'-1", "'@SUM(1)", "'＝1", r"\t=1", r"\r=1", "a=b", "x-1", "'",
    ]  # fmt: skip


@given(any_process())
def test_labels_of_dot_are_quoted_strings_that_hold_the_names(recorded: RecordedProcess) -> None:
    text = exported("dot", recorded)
    labels = re.findall(
        r'^  n\d+ \[label="((?:[^"\\]|\\["\\])*)", style=filled, fillcolor=\w+\];$', text, re.MULTILINE
    )
    assert len(labels) == text.count("label=") == text.count("fillcolor=")
    shown = [html.unescape(re.sub(r'\\(["\\])', r"\1", label)) for label in labels]
    for record, name in zip(recorded.records, names(recorded), strict=True):
        if recorded.nodes[record.node].kind is NodeKind.BRICK:
            assert any(printable(name) in label for label in shown)


@given(any_process())
def test_json_lines_hold_one_record_each(recorded: RecordedProcess) -> None:
    found = [json.loads(line) for line in exported("jsonl", recorded).splitlines()]
    for line, name, record in zip(found, names(recorded), recorded.records, strict=True):
        node = recorded.nodes[record.node]
        assert line == {
            "node": record.node,
            "parent": node.parent,
            "kind": node.kind.name.lower(),
            "name": name,
            "start_ns": record.start_ns,
            "end_ns": record.end_ns,
            "elements": record.elements,
            "failed": record.failed,
            "plain": record.plain,
        }
