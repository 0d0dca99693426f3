"""Export metrics and traces by OTLP over HTTP, for OpenTelemetry collectors.

The SDK's own environment variables (OTEL_EXPORTER_OTLP_HEADERS, …) apply.
"""

# The SDK's own instruments accept single measurements, but our data is already summed. So we create the objects of
# the SDK's data model directly.

from __future__ import annotations

import argparse
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cbtop.errors import NoDataError, UsageError
from cbtop.telemetry.metrics import DurationHistogram, Metric, MetricType, Point, Snapshot
from cbtop.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Gauge, Histogram, MetricsData, Sum
    from opentelemetry.sdk.resources import Resource

    from cbtop.telemetry.subscription import Subscription

METAVAR = "http://HOST:4318"
HELP = (
    "send metrics, and one whole step of each process as a trace, to an OpenTelemetry collector, every "
    "$OTEL_METRIC_EXPORT_INTERVAL ms (default: 10000)"
)

INTERVAL_MS = 10_000
LAST_EXPORT_S = 1.0  # When the daemon ends, it waits at most this many seconds for its last export.
# Unit names of OpenTelemetry, which follow UCUM.
UNITS = {
    "": "", "seconds": "s", "bytes": "By", "ratio": "1", "watts": "W", "hertz": "Hz", "celsius": "Cel",
    "bytes_per_second": "By/s",
}  # fmt: skip

_log = logging.getLogger("cbtop.daemon")
_sdk_log = logging.getLogger("opentelemetry")


def address(text: str) -> str:
    """Parse the base address of an OpenTelemetry collector. OTLP appends `/v1/metrics` and `/v1/traces` to it."""
    try:
        parts = urlsplit(text)
        is_one = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        is_one = is_one and not parts.query and not parts.fragment
    except ValueError:
        is_one = False
    if not is_one:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a collector's address, as in http://127.0.0.1:4318")
    return text.rstrip("/")


@contextmanager
def serving(address: str, subscription: Subscription) -> Iterator[str]:
    """Send metrics and traces to `address` at every interval, in two threads. Send metrics once more at the end."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics.export import MetricExportResult
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError as error:
        raise UsageError("--otlp needs the OpenTelemetry SDK: pip install 'cbtop[otlp]'") from error
    # Imported here, so that a daemon without exports does not load the store (see `telemetry.serving`).
    from cbtop.telemetry.otlp_traces import SentSteps
    from cbtop.telemetry.steps import sample_steps

    interval_s = _interval_s(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or str(INTERVAL_MS))
    to_metrics, to_traces = f"{address}/v1/metrics", f"{address}/v1/traces"
    metric_exporter, span_exporter = OTLPMetricExporter(endpoint=to_metrics), OTLPSpanExporter(endpoint=to_traces)
    stop = threading.Event()

    def send_metrics() -> bool | None:
        try:
            data = metrics_data(subscription.snapshot(), time.time_ns())
        except NoDataError as error:
            _log.debug("nothing to send: %s", error)
            return None
        return metric_exporter.export(data) is MetricExportResult.SUCCESS

    sent_steps = SentSteps()

    def send_traces() -> bool | None:
        traces = [
            (record, trace)
            for record, step in sample_steps(subscription.endpoint, subscription.keys, stop)
            if (trace := sent_steps.trace(record, step, _resource()))
        ]
        if not traces:
            return None
        found = [span for _, trace in traces for span in trace]
        is_taken = span_exporter.export(found) is SpanExportResult.SUCCESS
        if is_taken:
            sent_steps.sent(traces)
        return is_taken

    # The SDK logs several lines for each failed export. Hide them, because we log one line ourselves.
    _sdk_log.propagate = _log.isEnabledFor(logging.DEBUG)
    threads = [
        threading.Thread(target=_keep_sending, args=(send, where, interval_s, stop), daemon=True)
        for send, where in ((send_metrics, to_metrics), (send_traces, to_traces))
    ]
    for thread in threads:
        thread.start()
    try:
        yield f"metrics and traces to {address} every {interval_s:g} s"
    finally:
        stop.set()
        deadline_s = time.monotonic() + LAST_EXPORT_S
        for thread in threads:
            thread.join(max(0, deadline_s - time.monotonic()))
        metric_exporter.shutdown()
        span_exporter.shutdown()


def metrics_data(snapshot: Snapshot, now_ns: int) -> MetricsData:
    """Return `snapshot` in the OpenTelemetry SDK's data model, with cumulative points at the time `now_ns` (Unix
    time).
    """
    # Imported here, because the SDK takes a third of a second to load.
    from opentelemetry.sdk.metrics import export
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    metrics = [
        export.Metric(_name(metric), metric.about, UNITS[metric.unit], _data(metric, points, now_ns))
        for metric, points in snapshot.items()
        if points
    ]
    scope = export.ScopeMetrics(InstrumentationScope("cbtop", __version__), metrics, schema_url="")
    return export.MetricsData([export.ResourceMetrics(_resource(), [scope], schema_url="")])


def _keep_sending(send: Callable[[], bool | None], where: str, interval_s: float, stop: threading.Event) -> None:
    """Call `send` at every interval, and once more when `stop` is set.

    `send` returns whether the collector accepted the data, or None without data. A change between accepted and
    rejected is logged.
    """
    said = _Said()
    _sdk_log.addHandler(said)
    was_taken, is_last = True, False
    while not is_last:
        is_last = stop.wait(interval_s)
        said.line = ""
        is_taken = send()
        if is_taken is not None and is_taken != was_taken and not stop.is_set():
            _log.warning("%s %s", where, "accepts data again" if is_taken else f"accepts no data: {said.line}")
            was_taken = is_taken


def _resource() -> Resource:
    from opentelemetry.sdk.resources import Resource

    return Resource.create({"service.name": "cbtop", "service.version": __version__})


def _name(metric: Metric) -> str:
    """Return the name of a metric in OTLP, such as `cbtop.brick.duration` for cbtop_brick_duration.

    OTLP names have no suffixes, because a collector adds them when it converts names to OpenMetrics.
    """
    return metric.name.replace("_", ".") + (".info" if metric.kind is MetricType.INFO else "")


def _data(metric: Metric, points: list[Point], now_ns: int) -> Sum | Gauge | Histogram:
    from opentelemetry.sdk.metrics import export

    def attributes(point: Point) -> dict[str, str]:
        return dict(zip(metric.labels, point.labels, strict=True))

    cumulative = export.AggregationTemporality.CUMULATIVE
    if metric.kind is MetricType.HISTOGRAM:
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
                if isinstance(value := point.value, DurationHistogram)
            ],
            cumulative,
        )
    # Floats are exact up to 2^53, and can hold the larger sums of forged numbers.
    numbers = [
        export.NumberDataPoint(attributes(point), point.since_ns, now_ns, float(point.value))
        for point in points
        if not isinstance(point.value, DurationHistogram)
    ]
    return (
        export.Sum(numbers, cumulative, is_monotonic=True)
        if metric.kind is MetricType.COUNTER
        else export.Gauge(numbers)
    )


def _interval_s(text: str) -> float:
    try:
        value_ms = float(text)
    except ValueError:
        value_ms = math.nan
    if not 0 < value_ms < math.inf:
        raise UsageError(f"OTEL_METRIC_EXPORT_INTERVAL is {text!r}; expected milliseconds above zero")
    return value_ms / 1e3


class _Said(logging.Handler):
    """Stores the first warning that the SDK has logged in this thread since `line` was cleared. It is the reason of a
    failed export.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.line = ""
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.line = self.line or record.getMessage()
