"""OpenMetrics over HTTP, for Prometheus and whatever else scrapes."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from cbtop.errors import CbtopError, NoDataError, UsageError
from cbtop.telemetry.metrics import Durations, Kind, Metric, Snapshot
from cbtop.telemetry.subscription import Subscription

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

METAVAR = "[HOST:]PORT"
HELP = "serve OpenMetrics over HTTP, on 127.0.0.1 unless HOST is given"

DEFAULT_HOST = "127.0.0.1"
MAX_CONNECTIONS = 8
SLOW_S = 5.0  # a scraper that takes longer to ask, or to take the answer, is cut off

_log = logging.getLogger("cbtop.daemon")


def address(text: str) -> str:
    """HOST:PORT, with brackets around an IPv6 host; a bare PORT is on 127.0.0.1. PORT 0 is any that is free."""
    host, colon, port = text.rpartition(":")
    host = host if colon else DEFAULT_HOST
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: PORT or HOST:PORT is wanted, as in 9464 or 127.0.0.1:9464")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise argparse.ArgumentTypeError(f"{text!r}: an IPv6 address stands in brackets, as in [::1]:9464")
    return f"{host}:{port}"


@contextmanager
def serving(address: str, subscription: Subscription) -> Iterator[str]:
    """Serve every GET on `address`, each in a thread, from snapshots that `link` makes."""
    try:
        import prometheus_client  # noqa: F401 - an extra
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
    """`snapshot` as prometheus-client knows it."""
    from prometheus_client import CollectorRegistry

    found = CollectorRegistry(auto_describe=True)  # so that ?name[]= finds them
    found.register(_Collected(snapshot))
    return found


class _Collected:
    def __init__(self, snapshot: Snapshot) -> None:
        self._families = [_family(metric, snapshot) for metric in snapshot]

    def collect(self) -> Iterable[Family]:
        return self._families


def _family(metric: Metric, snapshot: Snapshot) -> Family:
    # prometheus-client is an extra, and takes a tenth of a second to load.
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
    )

    points = snapshot[metric]
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.about, labels=metric.labels, unit=metric.unit)
        for point in points:
            if isinstance(point.value, Durations):
                histogram.add_metric(point.labels, _buckets(point.value), point.value.total_ns / 1e9)
        return histogram
    if metric.kind is Kind.INFO:
        info = InfoMetricFamily(metric.name, metric.about)
        for point in points:
            info.add_metric((), dict(zip(metric.labels, point.labels, strict=True)))
        return info
    of = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = of(metric.name, metric.about, labels=metric.labels, unit=metric.unit)
    for point in points:
        if not isinstance(point.value, Durations):
            family.add_metric(point.labels, point.value)
    return family


def _buckets(value: Durations) -> list[tuple[str, float]]:
    bounds = [repr(bound_ns / 1e9) for bound_ns in value.bounds_ns]
    return [*zip([*bounds, "+Inf"], accumulate(value.counts), strict=True)]


class _Server(ThreadingMixIn, WSGIServer):
    """Bounded in threads and in time: who asks slowly, or too often, harms nobody else."""

    daemon_threads = True  # the daemon's end waits for no scraper

    def __init__(self, address: str, subscription: Subscription) -> None:
        host, _, port = address.rpartition(":")
        (self.address_family, _, _, _, where), *_ = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((str(where[0]), int(where[1])), _Handler)
        self.set_app(_app(subscription))

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("metrics, asked by %s", client_address, exc_info=sys.exception())


class _Handler(WSGIRequestHandler):
    timeout = SLOW_S

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)


def _app(subscription: Subscription) -> Callable[..., Iterable[bytes]]:
    from prometheus_client import make_wsgi_app

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            snapshot = subscription.snapshot()
        except NoDataError as error:  # a scrape that fails is seen; old numbers that pass for new ones are not
            start_response("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{error}\n".encode()]
        answer: Iterable[bytes] = make_wsgi_app(registry(snapshot))(environ, start_response)
        return answer

    return app
