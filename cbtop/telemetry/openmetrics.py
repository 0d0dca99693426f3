"""Serve metrics as OpenMetrics over HTTP, for Prometheus and other scrapers."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from cbtop.errors import CbtopError, NoDataError, UsageError
from cbtop.telemetry.metrics import DurationHistogram, Metric, MetricType, Snapshot

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

    from cbtop.telemetry.subscription import Subscription

METAVAR = "[HOST:]PORT"
HELP = "serve OpenMetrics over HTTP, on 127.0.0.1 unless HOST is given"

DEFAULT_HOST = "127.0.0.1"
MAX_CONNECTIONS = 32  # At most this many connections are open. Each has its own thread.
SLOW_S = 5.0  # Maximum seconds for a request and its response. A slower scraper is disconnected.

_log = logging.getLogger("cbtop.daemon")


def address(text: str) -> str:
    """Parse HOST:PORT, with brackets around an IPv6 host. PORT alone means 127.0.0.1. PORT 0 means any free port."""
    host, colon, port = text.rpartition(":")
    host = host if colon else DEFAULT_HOST
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: expected PORT or HOST:PORT, as in 9464 or 127.0.0.1:9464")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise argparse.ArgumentTypeError(f"{text!r}: write an IPv6 address in brackets, as in [::1]:9464")
    return f"{host}:{port}"


@contextmanager
def serving(address: str, subscription: Subscription) -> Iterator[str]:
    """Serve HTTP on `address`. Every GET gets a snapshot of `subscription`. Each request has its own thread."""
    try:
        import prometheus_client  # noqa: F401 - an optional dependency
    except ImportError as error:
        raise UsageError("--metrics needs prometheus-client: pip install 'cbtop[metrics]'") from error
    try:
        server = _Server(address, subscription)
    except OSError as error:
        raise CbtopError(f"--metrics {address}: {error.strerror or error}") from error
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="cbtop-metrics", daemon=True)
    thread.start()
    host, port = server.server_address[:2]
    shown = f"[{host!s}]" if server.address_family == socket.AF_INET6 else str(host)
    line = f"metrics at http://{shown}:{port}/metrics"
    if not ipaddress.ip_address(str(host)).is_loopback:
        line += "\ncbtop daemon: whoever reaches this machine can read them: there is no password"
    try:
        yield line
    finally:
        server.shutdown()
        server.server_close()


def registry(snapshot: Snapshot) -> CollectorRegistry:
    """Return `snapshot` as a registry of the library prometheus-client."""
    from prometheus_client import CollectorRegistry

    # Clients may request some metrics by ?name[]=. Such a request fails without auto_describe.
    found = CollectorRegistry(auto_describe=True)
    found.register(_Collected(snapshot))
    return found


class _Collected:
    def __init__(self, snapshot: Snapshot) -> None:
        self._families = [_family(metric, snapshot) for metric in snapshot]

    def collect(self) -> Iterable[Family]:
        return self._families


def _family(metric: Metric, snapshot: Snapshot) -> Family:
    # Import here, because prometheus-client is optional and takes a tenth of a second to load.
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
    )

    points = snapshot[metric]
    if metric.kind is MetricType.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.about, labels=metric.labels, unit=metric.unit)
        for point in points:
            if isinstance(point.value, DurationHistogram):
                histogram.add_metric(point.labels, _buckets(point.value), point.value.total_ns / 1e9)
        return histogram
    if metric.kind is MetricType.INFO:
        info = InfoMetricFamily(metric.name, metric.about)
        for point in points:
            info.add_metric((), dict(zip(metric.labels, point.labels, strict=True)))
        return info
    of = CounterMetricFamily if metric.kind is MetricType.COUNTER else GaugeMetricFamily
    family = of(metric.name, metric.about, labels=metric.labels, unit=metric.unit)
    for point in points:
        if not isinstance(point.value, DurationHistogram):
            family.add_metric(point.labels, point.value)
    return family


def _buckets(value: DurationHistogram) -> list[tuple[str, float]]:
    bounds = [repr(bound_ns / 1e9) for bound_ns in value.bounds_ns]
    return [*zip([*bounds, "+Inf"], accumulate(value.counts), strict=True)]


class _Server(ThreadingMixIn, WSGIServer):
    """An HTTP server with limits on threads and time. A slow or silent client does not affect others.

    At the limit of connections, the oldest connection without a complete request is closed. If all have a complete
    request, the new one is closed.
    """

    daemon_threads = True  # The daemon does not wait for the threads of scrapers when it ends.
    request_queue_size = 128

    def __init__(self, address: str, subscription: Subscription) -> None:
        host, _, port = address.rpartition(":")
        (self.address_family, _, _, _, where), *_ = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self._since_s: dict[Any, float] = {}  # maps each connection to the time when it was opened
        self._asked: set[Any] = set()  # network connections that have sent a complete request
        super().__init__((str(where[0]), int(where[1])), _Handler)
        self.set_app(_app(subscription))

    def process_request(self, request: Any, client_address: Any) -> None:
        self._since_s[request] = time.monotonic()
        if len(self._since_s) > MAX_CONNECTIONS:
            self._cut_off(next(other for other in list(self._since_s) if other not in self._asked))
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def has_asked(self, request: Any) -> None:
        """Remember that the client of the connection `request` has sent a complete request."""
        self._asked.add(request)

    def service_actions(self) -> None:
        """Disconnect clients that are too slow. socketserver calls this ten times a second."""
        for request, since_s in list(self._since_s.items()):
            if time.monotonic() - since_s > SLOW_S:
                self._cut_off(request)

    def _cut_off(self, request: Any) -> None:
        self._forget(request)
        with suppress(OSError):  # The connection's thread may have closed the socket already.
            request.shutdown(socket.SHUT_RDWR)

    def _forget(self, request: Any) -> None:
        self._since_s.pop(request, None)
        self._asked.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("metrics, asked by %s", client_address, exc_info=sys.exception())


class _Handler(WSGIRequestHandler):
    server: _Server

    def parse_request(self) -> bool:
        is_whole = super().parse_request()
        if is_whole:
            self.server.has_asked(self.connection)
        return is_whole

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)


def _app(subscription: Subscription) -> Callable[..., Iterable[bytes]]:
    from prometheus_client import make_wsgi_app

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            snapshot = subscription.snapshot()
        except NoDataError as error:
            # Without current data, let the scrape fail. Users notice a failure, but not old values.
            start_response("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{error}\n".encode()]
        answer: Iterable[bytes] = make_wsgi_app(registry(snapshot))(environ, start_response)
        return answer

    return app
