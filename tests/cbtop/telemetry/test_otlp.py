"""Tests of the export in OTLP: the official protobufs read it.

The export has the same numbers as the export in OpenMetrics, with the units and times of OTLP.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE, Metric

from cbtop.errors import UsageError
from cbtop.protocol.endpoint import default_endpoint
from cbtop.telemetry import metrics, otlp
from cbtop.telemetry.metrics import METRICS, DurationHistogram, MetricType, Point, Snapshot
from cbtop.telemetry.snapshot import BOUNDS_NS, snapshot
from cbtop.telemetry.subscription import Subscription
from tests.cbtop.recorded import decode_run
from tests.cbtop.telemetry.test_snapshot import NOW_NS, store_on_gpus

UNITS = {
    "seconds": "s", "bytes": "By", "": "", "ratio": "1", "watts": "W", "hertz": "Hz", "celsius": "Cel",
    "bytes_per_second": "By/s",
}  # fmt: skip


def sent(found: Snapshot) -> dict[str, Metric]:
    """Decode an export as a collector does. Return its metrics by name."""
    encoded = encode_metrics(otlp.metrics_data(found, NOW_NS)).SerializeToString()
    request = ExportMetricsServiceRequest.FromString(encoded)
    (resource,) = request.resource_metrics
    assert ("service.name", "cbtop") in attributes(resource.resource.attributes).items()
    (scope,) = resource.scope_metrics
    return {metric.name: metric for metric in scope.metrics}


def attributes(pairs: list[KeyValue]) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in pairs}


def test_every_point_arrives_with_its_kind_unit_and_times(tmp_path: Path) -> None:
    found = snapshot(store_on_gpus(decode_run(tmp_path)), NOW_NS)
    arrived = sent(found)
    assert len(arrived) == sum(bool(points) for points in found.values()) > 10
    for metric in (metric for metric in METRICS if found[metric]):
        name = metric.name.replace("_", ".") + (".info" if metric.kind is MetricType.INFO else "")
        there = arrived[name]
        assert there.unit == UNITS[metric.unit]
        assert there.description == metric.about
        data = getattr(
            there, {MetricType.COUNTER: "sum", MetricType.HISTOGRAM: "histogram"}.get(metric.kind, "gauge")
        )
        if metric.kind in (MetricType.COUNTER, MetricType.HISTOGRAM):
            assert data.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
        assert len(data.data_points) == len(found[metric])
        for here, point in zip(data.data_points, found[metric], strict=True):
            assert attributes(here.attributes) == dict(zip(metric.labels, point.labels, strict=True))
            assert here.time_unix_nano == NOW_NS
            if not isinstance(point.value, DurationHistogram):
                assert here.as_double == point.value
                continue
            assert here.start_time_unix_nano == point.since_ns
            assert (here.count, [*here.bucket_counts]) == (sum(point.value.counts), [*point.value.counts])
            assert [*here.explicit_bounds] == [bound_ns / 1e9 for bound_ns in BOUNDS_NS]
            assert here.sum == point.value.total_ns / 1e9
            assert (here.min, here.max) == (point.value.min_ns / 1e9, point.value.max_ns / 1e9)


def test_sums_beyond_64_bits_do_not_stop_the_others() -> None:
    found: Snapshot = {metrics.BRICK_ELEMENTS: [Point(("s", "p", "b", "c", ""), 1 << 70, 0)]}
    assert sent(found)["cbtop.brick.elements"].sum.data_points[0].as_double == 1 << 70


@pytest.mark.parametrize("text", ["http://127.0.0.1:4318", "https://collector", "http://[::1]:4318/"])
def test_an_address_is_a_collectors_base(text: str) -> None:
    assert otlp.address(text) == text.rstrip("/")


@pytest.mark.parametrize(
    "text", ["", "4318", "127.0.0.1:4318", "ftp://x", "http://", "http://x:y", "http://[", "http://x?y"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a collector's address"):
        otlp.address(text)


def test_an_interval_that_is_none_is_named(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "soon")
    with (
        Subscription(default_endpoint()) as subscription,
        pytest.raises(UsageError, match="OTEL_METRIC_EXPORT_INTERVAL is 'soon'; expected milliseconds"),
        otlp.serving("http://127.0.0.1:1", subscription),
    ):
        pass
