"""Tests of the export in OpenMetrics: the official parser reads it.

Slow or silent clients do not block the server.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from urllib.error import HTTPError

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from cbtop.daemon.daemon import DaemonInside
from cbtop.errors import CbtopError
from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.messages import Heartbeat, Message
from cbtop.telemetry import metrics, openmetrics, serving
from cbtop.telemetry import subscription as subscription_module
from cbtop.telemetry.metrics import METRICS, DurationHistogram, Point, Snapshot
from cbtop.telemetry.snapshot import BOUNDS_NS, snapshot
from cbtop.telemetry.subscription import Subscription
from tests.cbtop import made_machines
from tests.cbtop.recorded import decode_run
from tests.cbtop.telemetry.test_snapshot import NOW_NS, store_of, store_on_gpus
from tests.integration.hosts import DEADLINE_S, eventually

PAGE = Path(__file__).parents[3] / "docs/metrics.md"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def parsed(found: Snapshot) -> dict[str, Family]:
    text = generate_latest(openmetrics.registry(found)).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def names_of(found: Snapshot) -> set[str]:
    """Return the names of all samples in the exported text."""
    return {sample.name for family in parsed(found).values() for sample in family.samples}


def test_the_official_parser_reads_every_metric_with_its_type_and_unit(tmp_path: Path) -> None:
    found = snapshot(store_on_gpus(decode_run(tmp_path)), NOW_NS)
    families = parsed(found)
    assert len(families) == len(METRICS)
    for metric in METRICS:
        family = families[f"{metric.name}_{metric.unit}" if metric.unit else metric.name]
        assert (family.type, family.unit, family.documentation) == (metric.kind, metric.unit, metric.about)
        for point in found[metric]:
            labels = dict(zip(metric.labels, point.labels, strict=True))
            samples = [s for s in family.samples if labels.items() <= s.labels.items()]
            if not isinstance(point.value, DurationHistogram):
                assert [s.value for s in samples] == [point.value]
                continue
            at_most = {s.labels["le"]: s.value for s in samples if s.name.endswith("_bucket")}
            assert [*at_most.values()] == [sum(point.value.counts[: n + 1]) for n in range(len(point.value.counts))]
            assert [float(le) for le in at_most] == [*(ns / 1e9 for ns in BOUNDS_NS), float("inf")]
            assert {s.value for s in samples if s.name.endswith("_sum")} == {point.value.total_ns / 1e9}
            assert {s.value for s in samples if s.name.endswith("_count")} == {sum(point.value.counts)}


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.text('\\\n"{},=# '), min_size=5, max_size=5))
def test_names_that_users_choose_come_through_whatever_is_in_them(labels: list[str]) -> None:
    found: Snapshot = {metrics.BRICK_FAILED: [Point(tuple(labels), 3, 0)]}
    (sample,) = parsed(found)["cbtop_brick_failed"].samples
    assert sample.labels == dict(zip(metrics.BRICK_FAILED.labels, labels, strict=True))
    assert sample.value == 3


def test_a_histogram_without_bounds_still_counts() -> None:
    value = DurationHistogram((), (2,), 12_000, 5_000, 7_000)
    found: Snapshot = {metrics.STEP_DURATION: [Point(("s", "decode"), value, 0)]}
    samples = {s.name.rpartition("_")[2]: s.value for s in parsed(found)["cbtop_step_duration_seconds"].samples}
    assert samples == {"bucket": 2, "count": 2, "sum": 12e-6}


def test_every_metric_that_the_dashboard_asks_for_exists(tmp_path: Path) -> None:
    record = decode_run(tmp_path)
    known = names_of(snapshot(store_of(record), NOW_NS))
    # The recorded run has no budget, and no daemon that reports a state.
    known |= {"cbtop_brick_budget_seconds", "cbtop_source_state"}
    known |= {f"cbtop_records_{what}_total" for what in ("produced", "received", "dropped")}
    board = json.loads((files("cbtop.telemetry") / "grafana-dashboard.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [variable["query"] for variable in board["templating"]["list"]]
    assert len(asked) > 15
    for query in asked:
        assert set(re.findall(r"cbtop_\w+", query)) <= known


def test_devices_are_exported_by_uuid_and_unknown_or_old_values_are_not() -> None:
    def of(*said: Message) -> dict[str, dict[tuple[str, ...], float]]:
        found = snapshot(made_machines.store_of(*said), NOW_NS)
        return {
            metric.name: {point.labels: point.value for point in points if isinstance(point.value, float | int)}
            for metric, points in found.items()
        }

    gpu, process = (made_machines.GPU.uuid, "gpu"), made_machines.source().source
    found = of(made_machines.source(), made_machines.NVML, made_machines.CPU)
    assert found["cbtop_device_utilization"][gpu] == pytest.approx(0.37)
    assert found["cbtop_device_power"] == {gpu: made_machines.GPU.power_watts}
    assert found["cbtop_device_clock"][gpu] == 1.98e9
    assert set(found["cbtop_device_sent"]) == {(*gpu, "pcie")}  # This GPU has no figure for NVLink.
    assert found["cbtop_device_slowed"] == {}
    assert found["cbtop_source_device_memory"] == {(process, gpu[0]): 782_237_696}
    assert found["cbtop_source_cpu"][(process,)] == pytest.approx(0.41, abs=0.001)
    assert {labels[:2] for labels in found["cbtop_device"]} == {gpu, ("cpu", "cpu")}
    slowed = of(made_machines.eight())["cbtop_device_slowed"]
    assert slowed == {("GPU-5", "gpu", by): 1 for by in ("power cap", "heat (hardware)")}
    late = Heartbeat(made_machines.NVML.monotonic_ns + 4_000_000_000, ())
    old = of(made_machines.source(), made_machines.NVML, made_machines.CPU, late)
    assert not any(points for name, points in old.items() if "device" in name or name == "cbtop_source_cpu")


def test_the_page_lists_every_metric_by_the_name_it_is_scraped_by() -> None:
    listed = set(re.findall(r"^\| `(cbtop_\w+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    suffix = {metrics.MetricType.COUNTER: "_total", metrics.MetricType.INFO: "_info"}
    assert listed == {
        metric.name + (f"_{metric.unit}" if metric.unit else "") + suffix.get(metric.kind, "") for metric in METRICS
    }


@pytest.mark.parametrize(
    ("text", "address"),
    [("9464", "127.0.0.1:9464"), ("0.0.0.0:1", "0.0.0.0:1"), ("[::1]:0", "[::1]:0"), ("box:65535", "box:65535")],
)
def test_an_address_without_a_host_is_on_loopback(text: str, address: str) -> None:
    assert openmetrics.address(text) == address


@pytest.mark.parametrize("text", ["", ":9464", "0.0.0.0", "65536", "::1:9464", "host:", "-1", "²", "http://x:1"])
def test_another_host_has_to_be_named_in_full(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected|in brackets"):
        openmetrics.address(text)


@pytest.fixture
def address(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start a daemon that knows no process and serves metrics. Yields its address."""
    monkeypatch.setattr(subscription_module, "ANSWER_S", DEADLINE_S)
    endpoint = default_endpoint()
    with DaemonInside(endpoint), serving(endpoint, None, {"metrics": "127.0.0.1:0", "otlp": None}) as (line,):
        yield line.removeprefix("metrics at ")


def scrape(address: str, accept: str = OPENMETRICS) -> tuple[str, str]:
    with urllib.request.urlopen(
        urllib.request.Request(address, headers={"Accept": accept}), timeout=DEADLINE_S
    ) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_the_format_is_the_one_that_is_asked_for(address: str) -> None:
    kind, text = scrape(address)
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    kind, text = scrape(address, "*/*")
    assert kind.startswith("text/plain; version=0.0.4")
    assert "# EOF" not in text


def test_only_some_metrics_can_be_asked_for(address: str) -> None:
    _, text = scrape(f"{address}?name[]=cbtop_left_out")
    assert {family.name for family in text_string_to_metric_families(text)} == {"cbtop_left_out"}


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").removesuffix("/metrics").split(":")
    return socket.create_connection((host, int(port)))


def is_closed(connection: socket.socket) -> bool:
    """Return whether this end has noticed that the server closed the connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.slow
def test_connections_that_ask_nothing_hold_nobody_up_however_many_they_are(address: str) -> None:
    # The first request also starts threads that do not belong to any connection, so count threads only afterwards.
    scrape(address)
    before = threading.active_count()
    silent = [connect(address) for _ in range(10 * openmetrics.MAX_CONNECTIONS)]
    try:
        for _ in range(3):
            assert "cbtop_daemon_info" in scrape(address)[1]
        eventually(lambda: threading.active_count() <= before + openmetrics.MAX_CONNECTIONS)
        eventually(lambda: is_closed(silent[0]))  # the oldest connection was closed
    finally:
        for connection in silent:
            connection.close()


def test_connections_that_ask_byte_by_byte_are_cut_off_and_hold_nobody_up(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [connect(address) for _ in range(openmetrics.MAX_CONNECTIONS)]
    monkeypatch.setattr(openmetrics, "SLOW_S", 1.0)

    def drip(connection: socket.socket) -> bool:
        """Send one more byte of an endless request. Returns whether the server has closed the connection."""
        with suppress(ConnectionError):
            connection.send(b"G")
        return is_closed(connection)

    try:
        assert "cbtop_daemon_info" in scrape(address)[1]
        eventually(lambda: sum(map(drip, slow)) == len(slow))
    finally:
        for connection in slow:
            connection.close()


@pytest.mark.slow
def test_who_asks_and_does_not_read_the_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmetrics, "SLOW_S", 1.0)
    asked = threading.Event()

    def app(_environ: object, start_response: Callable[..., object]) -> list[bytes]:
        start_response("200 OK", [])
        asked.set()
        return [bytes(64 << 20)]  # Ask for more than fits into the socket buffers of both ends.

    monkeypatch.setattr(openmetrics, "_app", lambda _subscription: app)
    with serving(default_endpoint(), None, {"metrics": "127.0.0.1:0"}) as (line,):
        before = threading.active_count()
        with connect(line.removeprefix("metrics at ")) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert asked.wait(DEADLINE_S)
            # The thread of the request ends when its client has gone.
            eventually(lambda: threading.active_count() == before)


def test_without_a_daemon_a_scrape_fails_instead_of_serving_nothing(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription_module, "ANSWER_S", 0.1)
    with serving(default_endpoint(), None, {"metrics": "127.0.0.1:0"}) as (line,):
        with pytest.raises(HTTPError) as caught:
            scrape(line.removeprefix("metrics at "))
        with caught.value as answer:
            assert (answer.code, answer.read()) == (503, b"the daemon has not answered yet\n")


def test_other_hosts_are_served_with_a_warning_and_a_taken_port_is_named(runtime: Path) -> None:
    with (
        Subscription(default_endpoint()) as subscription,
        openmetrics.serving("0.0.0.0:0", subscription) as line,
    ):
        assert "no password" in line
        port = re.findall(r":(\d+)/", line)[0]
        with (
            pytest.raises(CbtopError, match=f"--metrics 127.0.0.1:{port}: Address already in use"),
            openmetrics.serving(f"127.0.0.1:{port}", subscription),
        ):
            pass
