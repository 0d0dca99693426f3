"""Tests of traces (what a model computed): from a traced process to text and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbtop.client.store import Store
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.messages import Goodbye, SourceCatalog, TraceAnomaly, TraceNumber, TraceSummary
from cbtop.reports import REPORTS
from cbtop.reports.text import SECTIONS
from cbtop.viewmodels.source import SourceView, source_view
from cbtop.viewmodels.traces import NamedNumber, TraceRow, trace_views
from tests.cbtop.recorded import Clock, profiler_in, record_of, source_of

KV = TraceSummary(
    "MLT-05", "kv", "the cache", 3, (TraceNumber("", "evictions", 2.0), TraceNumber("", "hits", None)), ()
)
LAYERS = TraceSummary(
    "MLT-01", "activations", "each layer's output", 1204,
    (TraceNumber("", "passes", 12.0), TraceNumber("layer 0", "mean", -1.5e-7), TraceNumber("layer 0", "nan", 0.0),
     TraceNumber("layer 1", "mean", 0.25)),
    (TraceAnomaly("layer 1 output: 3 NaN"),),
)  # fmt: skip


@pytest.fixture
def view(runtime: Path) -> SourceView:
    """Return the view of a process that has ended after two traces."""
    profiler = profiler_in(runtime, Clock())
    with profiler.step("decode", tokens=1):
        pass
    for summary in (KV, TraceSummary("MLT-01", "activations", "older", 1, (), ()), LAYERS):
        profiler.announce(summary)
    return source_view(record_of(source_of(runtime)))


def test_the_latest_summary_of_each_trace_is_shown_in_the_order_of_their_ids(view: SourceView) -> None:
    assert [(trace.trace, trace.forwards) for trace in view.traces] == [("MLT-01", 1204), ("MLT-05", 3)]
    layers, kv = view.traces
    assert layers.rows[0] == TraceRow("layer 0", (NamedNumber("mean", -1.5e-7), NamedNumber("nan", 0.0)))
    assert kv.totals == (NamedNumber("evictions", 2.0), NamedNumber("hits", None))
    assert layers.anomalies == ("layer 1 output: 3 NaN",)


def test_a_keyframe_holds_only_the_latest_summary_of_each_trace(runtime: Path) -> None:
    profiler = profiler_in(runtime, Clock())
    for _ in range(20):
        profiler.announce(KV)
        profiler.announce(LAYERS)
    source = source_of(runtime)
    source.poll()
    keyframe = source.snapshot()[0]
    assert isinstance(keyframe, SourceCatalog)
    assert [message for message in keyframe.messages if isinstance(message, TraceSummary)] == [KV, LAYERS]


def test_the_text_says_every_number_and_every_anomaly(view: SourceView) -> None:
    assert SECTIONS["trace"](view).splitlines() == [
        "MLT-01 activations, 1,204 passes traced: each layer's output",
        "passes 12",
        "             mean  nan",
        "layer 0  -1.5e-07    0",
        "layer 1      0.25  n/a",
        "anomaly: layer 1 output: 3 NaN",
        "",
        "MLT-05 kv, 3 passes traced: the cache",
        "evictions    2",
        "hits       n/a",
        "no anomalies",
    ]


def test_the_json_holds_the_traces_whole(view: SourceView) -> None:
    (source,) = json.loads(REPORTS["json"]([view], []))["sources"]
    layers, kv = source["traces"]
    assert (layers["trace"], layers["forwards"], layers["totals"]) == ("MLT-01", 1204, {"passes": 12.0})
    assert layers["rows"][1] == {"name": "layer 1", "numbers": {"mean": 0.25}}
    assert (kv["totals"], kv["rows"], kv["anomalies"]) == ({"evictions": 2.0, "hits": None}, [], [])


def test_a_process_without_traces_has_no_trace_section_but_has_an_answer(runtime: Path) -> None:
    with profiler_in(runtime, Clock()).brick("a"):
        pass
    plain = source_view(record_of(source_of(runtime)))
    assert "trace" not in REPORTS["text"]([plain], list(SECTIONS))
    assert "trace: n/a (none has come)" in REPORTS["text"]([plain], ["trace"])


def test_a_message_of_another_kind_inside_a_summary_is_passed_over() -> None:
    hostile = TraceSummary("MLT-01", "x", "", 1, (Goodbye("x"),), (Goodbye("x"),))  # type: ignore[arg-type]
    (view,) = trace_views([hostile])
    assert (view.totals, view.rows, view.anomalies) == ((), (), ())


@pytest.mark.parametrize("message", [LAYERS, TraceNumber("", "x", 1.0), TraceAnomaly("x")])
def test_a_trace_outside_a_catalog_is_refused(message: TraceSummary | TraceNumber | TraceAnomaly) -> None:
    with pytest.raises(DecodeError, match="outside a catalog"):
        Store().apply(message)
