"""Tests of exported traces: a sampled step is exported completely or not at all. Spans are nested like records."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.proto.trace.v1.trace_pb2 import Status as ProtoStatus
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from cbtop.client.source_record import SourceRecord
from cbtop.protocol.messages import RecordBatch
from cbtop.protocol.record_batch import batches, pack
from cbtop.protocol.ring_reader import Batch, RingReader
from cbtop.telemetry import steps
from cbtop.telemetry.otlp_traces import MAX_PROGRAMS, PREVIOUS, RUN_BEFORE, SentSteps, spans
from cbtop.telemetry.steps import GaplessRecords, whole_step
from tests.cbtop.recorded import Clock, decode_run, profiler_in, record_of, source_of

# number of records of a step with two layers of three bricks; kernels have no records
STEP_RECORDS = 1 + 2 * (1 + 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[SourceRecord, Batch]:
    """Return a process with a prefill and ten decode steps, and all of its records."""
    directory = tmp_path_factory.mktemp("run")
    record = decode_run(directory)
    (path,) = directory.glob("*.ring")
    reader = RingReader(path)
    batch = reader.read(final=True)
    reader.close()
    assert len(batch.node) == 11 * STEP_RECORDS
    return record, batch


def part(batch: Batch, start: int, stop: int) -> Batch:
    at = np.arange(len(batch.node))
    return batch.only((at >= start) & (at < stop))


def names(record: SourceRecord, batch: Batch) -> list[str]:
    return [record.nodes[node].name for node in batch.node.tolist()]


def test_the_step_that_had_already_begun_is_passed_over(run: tuple[SourceRecord, Batch]) -> None:
    record, batch = run
    step = whole_step(part(batch, STEP_RECORDS + 1, len(batch.node)), record.nodes)  # starts inside the second step
    assert step is not None
    assert names(record, step).count("decode") == 1
    assert len(step.node) == STEP_RECORDS
    # Receiving begins in the second step, so the third step is the first complete one.
    assert step.start_ns.min() >= batch.end_ns[2 * STEP_RECORDS - 1]


def test_a_step_that_has_not_ended_is_waited_for(run: tuple[SourceRecord, Batch]) -> None:
    record, batch = run
    assert whole_step(part(batch, 5, 2 * STEP_RECORDS - 1), record.nodes) is None
    assert whole_step(part(batch, 5, 2 * STEP_RECORDS), record.nodes) is not None


def test_a_step_of_too_many_records_is_passed_over(
    run: tuple[SourceRecord, Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "MAX_STEP_RECORDS", STEP_RECORDS - 1)
    assert whole_step(run[1], run[0].nodes) is None


@given(st.lists(st.integers(1, 40), max_size=10), st.sets(st.integers(0, 10)))
def test_however_records_arrive_a_step_is_whole_or_there_is_none(
    run: tuple[SourceRecord, Batch], sizes: list[int], lost: set[int]
) -> None:
    record, batch = run
    waiting = GaplessRecords()
    ends = [*np.cumsum(sizes).tolist(), len(batch.node)]
    first = 0
    for at, end in enumerate(min(end, len(batch.node)) for end in ends):
        if at not in lost:
            for message in batches("s", first, end, part(batch, first, end)):
                waiting.take(message)
            step = waiting.step(record.nodes)
            assert step is None or len(step.node) == STEP_RECORDS
        first = end


def test_records_that_the_ring_lost_make_a_gap(run: tuple[SourceRecord, Batch]) -> None:
    record, batch = run
    waiting = GaplessRecords()
    waiting.take(RecordBatch("s", 0, 20, 20, pack(part(batch, 0, 20))))
    waiting.take(RecordBatch("s", 20, 40, 15, pack(part(batch, 25, 40))))
    assert waiting.step(record.nodes) is not None  # After the gap in the records there is a complete step.
    assert waiting.count == 15


def decoded(record: SourceRecord, step: Batch) -> list[Span]:
    request = ExportTraceServiceRequest.FromString(
        encode_spans(spans(record, step, Resource({"service.name": "cbtop"}))).SerializeToString()
    )
    return [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]


def test_spans_lie_in_each_other_as_the_records_do(run: tuple[SourceRecord, Batch]) -> None:
    record, batch = run
    assert record.hello is not None
    step = whole_step(batch, record.nodes)
    assert step is not None
    found = decoded(record, step)
    by_id = {span.span_id: span for span in found}
    assert len(by_id) == len(found) == STEP_RECORDS
    assert {span.trace_id for span in found} == {found[0].trace_id}
    assert [span.name for span in found] == [
        "decode",
        *[name for layer in (0, 1) for name in (f"Layer {layer}", "RmsNorm", "QkvProjection", "DownProjection")],
    ]
    for span in found[1:]:
        parent = by_id[span.parent_span_id]
        assert parent.name == "decode" if span.name.startswith("Layer") else parent.name.startswith("Layer")
        assert parent.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= parent.end_time_unix_nano
    assert found[0].parent_span_id == b""
    assert found[0].end_time_unix_nano - found[0].start_time_unix_nano == 100_000
    unix_ns = record.hello.realtime_ns - record.hello.monotonic_ns
    assert found[0].start_time_unix_nano == int(step.start_ns.min()) + unix_ns
    said = {pair.key: pair.value.string_value or pair.value.int_value for pair in found[2].attributes}
    assert said == {
        "source": record.key,
        "kind": "brick",
        "category": "Norm",
        "backend": "numba",
        "elements": 64,
    }
    assert {pair.key: pair.value.int_value for pair in found[0].attributes}["tokens"] == 1


def test_a_step_links_to_the_one_sent_before_it(run: tuple[SourceRecord, Batch]) -> None:
    record, batch = run
    step = whole_step(batch, record.nodes)
    assert step is not None
    resource = Resource({})
    first = spans(record, step, resource)
    second = spans(record, step, resource, first[0].context)
    assert [span.links for span in first] == [()] * STEP_RECORDS
    (link,) = second[0].links
    assert (link.context, dict(link.attributes or {})) == (first[0].context, {"cbtop.link": PREVIOUS})
    assert [span.links for span in second[1:]] == [()] * (STEP_RECORDS - 1)
    assert second[0].context != first[0].context


def later_run(record: SourceRecord, step: Batch, key: str, after_ns: int, program: str = "") -> SourceRecord:
    """Return another process with the nodes of `record`. The process began `after_ns` after the end of `step`."""
    hello = record.hello
    assert hello is not None
    later_ns = int(step.end_ns.max()) + after_ns - hello.monotonic_ns
    hello = replace(
        hello, monotonic_ns=hello.monotonic_ns + later_ns, realtime_ns=hello.realtime_ns + later_ns,
        program=program or hello.program,
    )  # fmt: skip
    return replace(record, key=key, hello=hello)


def linked(found: Sequence[ReadableSpan]) -> list[list[object]]:
    return [[(link.attributes or {})["cbtop.link"] for link in span.links] for span in found]


def test_every_span_links_to_its_place_in_the_previous_run_of_that_program(
    run: tuple[SourceRecord, Batch],
) -> None:
    record, batch = run
    step = whole_step(batch, record.nodes)
    assert step is not None
    assert record.hello is not None
    began = partial(later_run, record, step)
    sent = SentSteps()
    base = sent.trace(record, step, Resource({}))
    assert linked(base) == [[]] * STEP_RECORDS
    sent.sent([(record, base)])
    for other in (began("beside", -1), began("other", 1, "another.py")):
        assert linked(sent.trace(other, step, Resource({}))) == [[]] * STEP_RECORDS
    after = began("after", 1)
    first = sent.trace(after, step, Resource({}))
    assert linked(first) == [[RUN_BEFORE]] * STEP_RECORDS
    assert [span.links[0].context for span in first] == [span.context for span in base]
    sent.sent([(after, first)])
    second = sent.trace(after, step, Resource({}))
    assert linked(second) == [[PREVIOUS, RUN_BEFORE], *[[RUN_BEFORE]] * (STEP_RECORDS - 1)]
    assert [span.links[-1].context for span in second] == [span.context for span in base]
    turned = replace(after, nodes=deepcopy(after.nodes))
    turned.nodes.nodes[:] = [
        replace(node, name="Other") if node.name == "RmsNorm" else node for node in turned.nodes.nodes
    ]
    # Two spans link to no node, because the other process has no RmsNorm.
    assert linked(sent.trace(turned, step, Resource({}))).count([]) == 2


def test_the_steps_of_endless_programs_are_not_kept(run: tuple[SourceRecord, Batch]) -> None:
    record, batch = run
    step = whole_step(batch, record.nodes)
    assert step is not None
    assert record.hello is not None
    sent = SentSteps()
    for number in range(MAX_PROGRAMS + 5):
        one = replace(record, key=str(number), hello=replace(record.hello, program=str(number)))
        sent.sent([(one, sent.trace(one, step, Resource({})))])
    for number, kept in ((4, False), (5, True)):
        later = sent.trace(later_run(record, step, f"later {number}", 1, str(number)), step, Resource({}))
        assert linked(later) == [[RUN_BEFORE] if kept else []] * STEP_RECORDS


def test_the_previous_run_is_kept_for_the_newest_processes(run: tuple[SourceRecord, Batch]) -> None:
    record, batch = run
    step = whole_step(batch, record.nodes)
    assert step is not None
    sent, later = SentSteps(), later_run(record, step, "later", 1)
    sent.sent([(record, sent.trace(record, step, Resource({})))])
    sent.sent([(later, sent.trace(later, step, Resource({})))])
    for number, kept in ((MAX_PROGRAMS - 1, True), (MAX_PROGRAMS, False)):
        for other in range(number):
            sent.trace(replace(record, key=f"{other}"), step, Resource({}))
        assert (RUN_BEFORE in linked(sent.trace(later, step, Resource({})))[1]) == kept


def test_bricks_in_bricks_and_failures_are_seen(tmp_path: Path) -> None:
    clock = Clock()
    profiler = profiler_in(tmp_path, clock)

    def fail_in_the_second() -> None:
        with profiler.step("decode", 1), profiler.brick("Outer"):
            with profiler.brick("Inner"):
                clock.sleep_us(5)
            with profiler.brick("Inner"):
                raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fail_in_the_second()
        clock.sleep_us(1)
    source = source_of(tmp_path)
    record = record_of(source)
    reader = RingReader(source.ring_path)
    step = whole_step(reader.read(final=True), record.nodes)
    reader.close()
    assert step is not None
    found = decoded(record, step)
    names = {span.span_id: span.name for span in found}
    failed = ProtoStatus.STATUS_CODE_ERROR
    assert [(span.name, names.get(span.parent_span_id), span.status.code == failed) for span in found] == [
        ("decode", None, True),
        ("Outer", "decode", True),
        ("Inner", "Outer", False),
        ("Inner", "Outer", True),
    ]


@pytest.mark.parametrize("realtime_ns", [-(1 << 63), (1 << 64) - 1])
def test_a_process_whose_clock_is_impossible_has_no_spans(run: tuple[SourceRecord, Batch], realtime_ns: int) -> None:
    record, batch = run
    assert record.hello is not None
    step = whole_step(batch, record.nodes)
    assert step is not None
    record = replace(record, hello=replace(record.hello, realtime_ns=realtime_ns))
    assert spans(record, step, Resource({})) == []
