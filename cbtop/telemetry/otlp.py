"""OTLP over HTTP, for OpenTelemetry collectors. The SDK's own variables (OTEL_EXPORTER_OTLP_HEADERS, …) apply."""

# The SDK's instruments measure; ours is measured already. So its data model is filled in directly: a histogram that
# goes through an instrument would have to be taken apart into calls, which nobody has any more.

from __future__ import annotations

import argparse
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cbtop.errors import NoDataError, UsageError
from cbtop.telemetry.link import Link
from cbtop.telemetry.metrics import Durations, Kind, Metric, Point, Snapshot
from cbtop.version import __version__

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import Gauge, Histogram, MetricsData, Sum

METAVAR = "http://HOST:4318"
HELP = "send metrics to an OpenTelemetry collector, every $OTEL_METRIC_EXPORT_INTERVAL ms (default: 10000)"

INTERVAL_MS = 10_000
LAST_EXPORT_S = 1.0  # at its end the daemon sends once more, and waits no longer than this
UNITS = {"": "", "seconds": "s", "bytes": "By"}  # UCUM, as OpenTelemetry wants them

_log = logging.getLogger("cbtop.daemon")
_sdk_log = logging.getLogger("opentelemetry")


def address(text: str) -> str:
    """The base address of a collector, to which OTLP appends `/v1/metrics`."""
    try:
        parts = urlsplit(text)
        is_one = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        is_one = is_one and not parts.query and not parts.fragment
    except ValueError:
        is_one = False
    if not is_one:
        raise argparse.ArgumentTypeError(f"{text!r}: a collector's address is wanted, as in http://127.0.0.1:4318")
    return text.rstrip("/")


@contextmanager
def exporting(address: str, link: Link) -> Iterator[str]:
    """Send a snapshot of `link` to `address` at every interval, in a thread, and a last one at the end."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    except ImportError as error:
        raise UsageError("--otlp needs the OpenTelemetry SDK: pip install 'cbtop[otlp]'") from error
    interval_s = _interval_s(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or str(INTERVAL_MS))
    endpoint = f"{address}/v1/metrics"
    exporter = OTLPMetricExporter(endpoint=endpoint)
    stop = threading.Event()
    thread = threading.Thread(target=_run, args=(exporter, endpoint, link, interval_s, stop), daemon=True)
    thread.start()
    try:
        yield f"metrics to {endpoint} every {interval_s:g} s"
    finally:
        stop.set()
        thread.join(LAST_EXPORT_S)
        exporter.shutdown()


def metrics_data(snapshot: Snapshot, now_ns: int) -> MetricsData:
    """`snapshot` in the SDK's data model: cumulative, with `now_ns` (Unix time) as the time of every point."""
    # The SDK takes a third of a second to load; only who exports pays for it.
    from opentelemetry.sdk.metrics import export
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    metrics = [
        export.Metric(_name(metric), metric.about, UNITS[metric.unit], _data(metric, points, now_ns))
        for metric, points in snapshot.items()
        if points
    ]
    scope = export.ScopeMetrics(InstrumentationScope("cbtop", __version__), metrics, schema_url="")
    resource = Resource.create({"service.name": "cbtop", "service.version": __version__})
    return export.MetricsData([export.ResourceMetrics(resource, [scope], schema_url="")])


def _run(exporter: OTLPMetricExporter, endpoint: str, link: Link, interval_s: float, stop: threading.Event) -> None:
    from opentelemetry.sdk.metrics.export import MetricExportResult

    said = _Said()
    _sdk_log.addHandler(said)
    _sdk_log.propagate = _log.isEnabledFor(logging.DEBUG)  # else several lines at every failure: we say it once
    is_taken, is_last = True, False
    while not is_last:
        is_last = stop.wait(interval_s)
        try:
            data = metrics_data(link.snapshot(), time.time_ns())
        except NoDataError as error:
            _log.debug("nothing to send: %s", error)
            continue
        said.line = ""
        was_taken, is_taken = is_taken, exporter.export(data) is MetricExportResult.SUCCESS
        if is_taken != was_taken and not is_last:
            _log.warning("%s %s", endpoint, "takes metrics again" if is_taken else f"takes no metrics: {said.line}")


def _name(metric: Metric) -> str:
    """`cbtop.brick.duration` for cbtop_brick_duration: turned back, it has the suffixes of OpenMetrics."""
    return metric.name.replace("_", ".") + (".info" if metric.kind is Kind.INFO else "")


def _data(metric: Metric, points: list[Point], now_ns: int) -> Sum | Gauge | Histogram:
    from opentelemetry.sdk.metrics import export

    def attributes(point: Point) -> dict[str, str]:
        return dict(zip(metric.labels, point.labels, strict=True))

    cumulative = export.AggregationTemporality.CUMULATIVE
    if metric.kind is Kind.HISTOGRAM:
        return export.Histogram(
            [
                export.HistogramDataPoint(
                    attributes=attributes(point),
                    start_time_unix_nano=point.since_ns,
                    time_unix_nano=now_ns,
                    count=sum(value.counts),
                    sum=value.total_ns / 1e9,
                    bucket_counts=value.counts,
                    explicit_bounds=[bound_ns / 1e9 for bound_ns in value.bounds_ns],
                    min=value.min_ns / 1e9,
                    max=value.max_ns / 1e9,
                )
                for point in points
                if isinstance(value := point.value, Durations)
            ],
            cumulative,
        )
    # As doubles: exact up to 2^53, and no sum of hostile numbers is too large to encode.
    numbers = [
        export.NumberDataPoint(attributes(point), point.since_ns, now_ns, float(point.value))
        for point in points
        if not isinstance(point.value, Durations)
    ]
    return (
        export.Sum(numbers, cumulative, is_monotonic=True) if metric.kind is Kind.COUNTER else export.Gauge(numbers)
    )


def _interval_s(text: str) -> float:
    try:
        value_ms = float(text)
    except ValueError:
        value_ms = math.nan
    if not 0 < value_ms < math.inf:
        raise UsageError(f"OTEL_METRIC_EXPORT_INTERVAL is {text!r}; milliseconds above zero are wanted")
    return value_ms / 1e3


class _Said(logging.Handler):
    """Keeps the first warning of the SDK's since `line` was emptied: it says why an export failed."""

    line = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.line = self.line or record.getMessage()
