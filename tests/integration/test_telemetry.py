"""Tests of exports with a real daemon and process: numbers arrive over HTTP and OTLP, also at a real Prometheus."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.integration.hosts import CBTOP, DEADLINE_S, cbtop, eventually, host, snapshot

Series = dict[tuple[str, ...], float]  # values of a metric by phase and brick

# A program with declared work, a budget, a check, and a brick inside another brick. After its steps it stays idle.
RESTING_HOST = """
import sys, time
from cbtop import BrickDefinition, BrickId, BrickProfiler, TokenBudget, Work
from cbtop.protocol.messages import CheckResult
profiler = BrickProfiler()
profiler.announce(CheckResult("RmsNorm", "finite", True, None, None))
work = Work(flops_per_element=128, bytes_per_call=4096, bytes_per_element=4)
down = BrickDefinition.of(BrickId.DOWN_PROJECTION, backend="numba", work=work, budget=TokenBudget(50))
for step in range(int(sys.argv[1])):
    with profiler.step("decode", tokens=2):
        for layer in range(2):
            with profiler.layer(layer):
                with profiler.brick('a "quoted\\\\ name'):
                    with profiler.brick(BrickId.RMS_NORM, 64): pass
                with profiler.brick(down, 64): time.sleep(0.0002)
print("done", flush=True)
while True: time.sleep(float(sys.argv[2]))
"""


@contextmanager
def resting_host() -> Iterator[subprocess.Popen[str]]:
    """Run a process that has recorded 50 steps and stays alive."""
    command = [sys.executable, "-c", RESTING_HOST, "50", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "done\n"
            yield process
        finally:
            process.kill()


@contextmanager
def exporting_daemon(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `cbtop daemon` with `arguments`. Yields the process and the line with its export address."""
    with subprocess.Popen(
        [*CBTOP, "daemon", *arguments], stderr=subprocess.PIPE, text=True, env=os.environ | environment
    ) as process:
        try:
            assert process.stderr
            assert "serving" in process.stderr.readline()
            yield process, process.stderr.readline().strip()
        finally:
            process.terminate()


def get(url: str) -> str:
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        text: str = answer.read().decode()
        return text


def scrape(line: str) -> dict[str, Family]:
    text = ""
    while not text:
        try:
            text = get(line.removeprefix("cbtop daemon: metrics at "))
        except HTTPError as error:
            # Status 503: the exporter has no data from the daemon yet, or has received no data for a while.
            error.close()
            if error.code != 503:
                raise
    return {family.name: family for family in text_string_to_metric_families(text)}


def value_of(families: dict[str, Family], sample: str, **labels: str) -> float:
    """Return the only value of the metric `sample` with these labels."""
    found = [
        float(s.value)
        for family in families.values()
        for s in family.samples
        if s.name == sample and labels.items() <= s.labels.items()
    ]
    assert len(found) == 1, (sample, labels, found)
    return found[0]


@pytest.mark.slow
def test_a_scrape_at_rest_gives_the_numbers_of_the_json_report() -> None:
    with exporting_daemon("--metrics", "0") as (_, line), resting_host() as process:

        def is_complete() -> bool:
            steps = [
                s.value
                for f in scrape(line).values()
                for s in f.samples
                if s.name.endswith("step_duration_seconds_count")
            ]
            return steps == [50]

        eventually(is_complete)
        families = scrape(line)
        (source,) = snapshot()
    here = {"source": source["key"]}
    assert value_of(families, "cbtop_source_info", **here, pid=str(process.pid), program=source["program"]) == 1
    # The state 1 means live. The process would count as idle after two seconds.
    assert value_of(families, "cbtop_source_state", **here) == 1
    assert value_of(families, "cbtop_tokens_total", **here, phase="decode") == source["steps"]["tokens"] == 100
    loss = source["loss"]
    assert value_of(families, "cbtop_records_produced_total", **here) == loss["produced"]
    assert value_of(families, "cbtop_records_received_total", **here) == loss["received"]
    assert sum(s.value for s in families["cbtop_records_dropped"].samples) == loss["dropped"]
    assert value_of(families, "cbtop_check_passed", **here, brick="RmsNorm", assertion="finite") == 1
    assert {row["name"] for row in source["bricks"]} == {'a "quoted\\ name', "RmsNorm", "DownProjection"}
    for row in source["bricks"]:
        brick = here | {"phase": "decode", "brick": row["name"]}
        assert value_of(families, "cbtop_brick_duration_seconds_count", **brick) == row["count"]
        assert value_of(families, "cbtop_brick_duration_seconds_bucket", **brick, le="+Inf") == row["count"]
        assert value_of(families, "cbtop_brick_duration_seconds_sum", **brick) == pytest.approx(
            row["total_inclusive_us"] / 1e6
        )
        assert value_of(families, "cbtop_brick_exclusive_seconds_total", **brick) == pytest.approx(
            row["total_exclusive_us"] / 1e6
        )
        assert value_of(families, "cbtop_brick_elements_total", **brick) == row["elements"]
    down = here | {"brick": "DownProjection", "backend": "numba", "category": "FFN"}
    (row,) = (row for row in source["bricks"] if row["name"] == "DownProjection")
    assert value_of(families, "cbtop_brick_flops_total", **down) == row["flops"]
    assert value_of(families, "cbtop_brick_traffic_bytes_total", **down) == row["bytes"]
    assert value_of(families, "cbtop_brick_budget_seconds", **down) == pytest.approx(row["budget_us_per_token"] / 1e6)


# A program that executes each line of stdin and confirms it on stdout.
OBEDIENT_HOST = """
import sys
from cbtop import BrickProfiler
profiler = BrickProfiler()
for line in sys.stdin:
    if line == "step\\n":
        with profiler.step("decode", tokens=1), profiler.brick("Outer"):
            begin_ns = profiler.elapsed_ns()
            with profiler.brick("Inner"): pass
            profiler.record_deferred("Late", begin_ns)
    elif line == "end\\n":
        break
    else:
        getattr(profiler, line.strip())()
    print("done", flush=True)
"""


# The default run skips this test, because tests/cbtop/telemetry/test_counters.py tests the same, with simulated
# processes.
@pytest.mark.slow
def test_no_counter_goes_down_while_processes_are_reset_end_and_are_killed() -> None:
    seen: dict[tuple[str, ...], float] = {}

    def look(line: str) -> None:
        families = scrape(line).values()
        growing = [s for f in families if f.type in ("counter", "histogram") for s in f.samples]
        now = {(s.name, *map(str, sorted(s.labels.items()))): float(s.value) for s in growing}
        assert not {at: (value, now[at]) for at, value in seen.items() if now.get(at, value) < value}
        seen.update(now)

    with exporting_daemon("--metrics", "0") as (_, line):
        for last in ("end", "kill", "end"):
            command = [sys.executable, "-c", OBEDIENT_HOST]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdin
                assert process.stdout
                for said in ("step", "step", "finalize", "step", "reset", "step", "step", "finalize"):
                    process.stdin.write(f"{said}\n")
                    process.stdin.flush()
                    assert process.stdout.readline() == "done\n"
                    look(line)

                def tokens(of: str = f":{process.pid}:") -> list[float]:
                    look(line)
                    return [v for at, v in seen.items() if at[0] == "cbtop_tokens_total" and of in str(at)]

                eventually(lambda tokens=tokens: tokens() == [5])
                process.kill() if last == "kill" else process.communicate("end\n")
            look(line)


@pytest.mark.slow
def test_a_daemon_that_serves_other_hosts_with_keys_exports_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CBTOP_KEYS_DIR", str(tmp_path / "keys"))
    for command in (
        ("new", "daemon"),
        ("new", "somebody"),
        ("allow", "somebody", str(tmp_path / "keys/somebody.key")),
    ):
        assert cbtop("keys", *command).returncode == 0
    command = [*CBTOP, "daemon", "--bind", "tcp://0.0.0.0:0", "--metrics", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process, resting_host():
        try:
            assert process.stderr
            line = next(line for line in process.stderr if "metrics at " in line).strip()

            def tokens() -> list[float]:
                families = scrape(line).values()
                return [s.value for family in families for s in family.samples if s.name == "cbtop_tokens_total"]

            eventually(lambda: tokens() == [100])
        finally:
            process.terminate()


class CollectorStub(HTTPServer):
    """A stand-in for a collector: an HTTP server that receives OTLP and stores the requests.

    The server answers with the code `status`.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Take)
        self.requests: list[ExportMetricsServiceRequest] = []
        self.traces: list[ExportTraceServiceRequest] = []
        self.status = 200
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def value_of(self, name: str, brick: str) -> float | None:
        """Return the newest value of a metric for one brick."""
        for resource in self.requests[-1].resource_metrics if self.requests else ():
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                for point in (metric.sum if metric.HasField("sum") else metric.histogram).data_points:
                    at = {pair.key: pair.value.string_value for pair in point.attributes}
                    if (metric.name, at.get("brick")) == (name, brick):
                        return float(point.count if metric.HasField("histogram") else point.as_double)
        return None


class _Take(BaseHTTPRequestHandler):
    server: CollectorStub

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/x-protobuf"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/traces":
            self.server.traces.append(ExportTraceServiceRequest.FromString(body))
        else:
            assert self.path == "/v1/metrics"
            self.server.requests.append(ExportMetricsServiceRequest.FromString(body))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(ExportMetricsServiceResponse().SerializeToString())

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def collector() -> Iterator[CollectorStub]:
    with CollectorStub() as stub:
        yield stub
        stub.shutdown()


def test_a_collector_receives_the_numbers_of_the_json_report(collector: CollectorStub) -> None:
    with (
        exporting_daemon("--otlp", collector.address, OTEL_METRIC_EXPORT_INTERVAL="100") as (_, line),
        resting_host(),
    ):
        assert line == f"cbtop daemon: metrics and traces to {collector.address} every 0.1 s"
        eventually(lambda: collector.value_of("cbtop.brick.duration", "RmsNorm") == 100)
        (source,) = snapshot()
        for row in source["bricks"]:
            assert collector.value_of("cbtop.brick.duration", row["name"]) == row["count"]
            assert collector.value_of("cbtop.brick.exclusive", row["name"]) == pytest.approx(
                row["total_exclusive_us"] / 1e6
            )


# The default run skips this test, because tests/cbtop/telemetry/test_traces.py tests the contents of traces.
@pytest.mark.slow
def test_a_collector_receives_whole_steps_as_traces(collector: CollectorStub) -> None:
    with (
        exporting_daemon("--otlp", collector.address, OTEL_METRIC_EXPORT_INTERVAL="100"),
        host() as running,
    ):
        eventually(lambda: len(collector.traces) > 2)
    for request in collector.traces:
        ((spans,),) = ([scope.spans for scope in resource.scope_spans] for resource in request.resource_spans)
        assert len({span.trace_id for span in spans}) == 1
        names = {span.span_id: span.name for span in spans}
        assert [(names.get(span.parent_span_id), span.name) for span in spans] == [
            (None, "decode"),
            *[("decode", "Layer 0"), ("Layer 0", "RmsNorm"), ("Layer 0", "DownProjection")],
            *[("decode", "Layer 1"), ("Layer 1", "RmsNorm"), ("Layer 1", "DownProjection")],
        ]
        assert all(f":{running.pid}:" in span.attributes[0].value.string_value for span in spans)
        assert abs(spans[0].start_time_unix_nano - time.time_ns()) < 1e9 * DEADLINE_S
        (down,) = (s for s in spans if s.name == "DownProjection" and names[s.parent_span_id] == "Layer 1")
        assert down.end_time_unix_nano - down.start_time_unix_nano > 500_000  # The brick sleeps for at least 500 µs.


@pytest.mark.slow
def test_at_its_end_the_daemon_sends_what_it_knows_once_more(collector: CollectorStub) -> None:
    with (
        exporting_daemon("--metrics", "0", "--otlp", collector.address, OTEL_METRIC_EXPORT_INTERVAL="3600000") as (
            process,
            line,
        ),
        resting_host(),
    ):
        # all tokens have arrived
        eventually(lambda: [s.value for s in scrape(line)["cbtop_tokens"].samples] == [100])
        assert collector.requests == []
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert collector.value_of("cbtop.brick.duration", "RmsNorm") == 100


@pytest.mark.slow
def test_a_collector_that_refuses_is_named_once_and_once_when_it_accepts(collector: CollectorStub) -> None:
    collector.status = 404
    with exporting_daemon("--otlp", collector.address, OTEL_METRIC_EXPORT_INTERVAL="50") as (process, _):
        eventually(lambda: len(collector.requests) > 5)
        collector.status = 200
        seen = len(collector.requests)
        eventually(lambda: len(collector.requests) > seen + 5)
        process.terminate()
        assert process.stderr
        said = process.stderr.read().splitlines()
    assert len(said) == 2
    assert re.search(r"/v1/metrics accepts no data: Failed to export .*404", said[0])
    assert said[1].endswith("/v1/metrics accepts data again")


@contextmanager
def black_hole() -> Iterator[str]:
    """Yield the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
def test_a_dead_endpoint_or_slow_scraper_delays_neither_daemon_nor_its_exit() -> None:
    with (
        black_hole() as address,
        exporting_daemon("--metrics", "0", "--otlp", address, OTEL_METRIC_EXPORT_INTERVAL="50") as (process, line),
        host() as running,
    ):
        at = urllib.parse.urlsplit(line.removeprefix("cbtop daemon: metrics at "))
        with socket.create_connection((at.hostname, at.port or 0)) as slow:
            slow.sendall(b"GET /metrics HTTP/1.0\r\n")  # an incomplete request
            eventually(lambda: any(s.value > 20 for s in scrape(line)["cbtop_tokens"].samples))
            (before,) = snapshot()
            assert before["pid"] == running.pid
            eventually(lambda: snapshot()[0]["steps"]["count"] > before["steps"]["count"])
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "address", "module", "extra"),
    [
        ("--metrics", "0", "prometheus_client", "cbtop[metrics]"),
        pytest.param("--otlp", "http://127.0.0.1:4318", "opentelemetry", "cbtop[otlp]", marks=pytest.mark.slow),
    ],
)
def test_an_extra_that_is_missing_is_named_in_one_line(option: str, address: str, module: str, extra: str) -> None:
    script = f"import sys; sys.modules[{module!r}] = None; from cbtop.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, "daemon", option, address], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"pip install '{extra}'" in done.stderr


@pytest.mark.parametrize("bad", [["--metrics", ":9464"], ["--metrics", "x"], ["--otlp", "127.0.0.1:4318"]])
def test_an_address_that_is_none_is_refused_before_anything_starts(bad: list[str]) -> None:
    done = cbtop("daemon", *bad)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed (apt install prometheus)")
def test_prometheus_scrapes_it_and_answers_every_question_of_the_dashboard(tmp_path: Path) -> None:
    with exporting_daemon("--metrics", "0") as (_, line), host(), resting_host(), prometheus(tmp_path, line) as api:

        def ask(query: str) -> list[dict[str, Any]]:
            answer = json.loads(get(f"{api}/api/v1/query?query={urllib.parse.quote(query)}"))
            assert answer["status"] == "success", answer
            found: list[dict[str, Any]] = answer["data"]["result"]
            return found

        eventually(lambda: len(ask("rate(cbtop_tokens_total[30s]) > 0")) >= 1)
        board = json.loads((files("cbtop.telemetry") / "grafana-dashboard.json").read_text(encoding="utf-8"))
        variables = {"$__rate_interval": "30s", '"$source"': '".*"', '"$phase"': '".*"'}
        for panel in board["panels"]:
            for target in panel["targets"]:
                query = target["expr"]
                for variable, value in variables.items():
                    query = query.replace(variable, value)
                assert "$" not in query
                eventually(lambda query=query: ask(query))
        (p95,) = ask(
            'histogram_quantile(0.95, rate(cbtop_brick_duration_seconds_bucket{brick="DownProjection"}[30s])) > 0'
        )
        assert float(p95["value"][1]) > 0.0005  # The process sleeps 0.5 ms in each call of DownProjection.
        eventually(lambda: [row["value"][1] for row in ask("up")] == ["1"])


@contextmanager
def prometheus(directory: Path, line: str) -> Iterator[str]:
    """Run a Prometheus that scrapes the address in `line` twice a second. Yields its own address."""
    target = urllib.parse.urlsplit(line.removeprefix("cbtop daemon: metrics at ")).netloc
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
        "scrape_configs": [{"job_name": "cbtop", "static_configs": [{"targets": [target]}]}],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    command = [
        "prometheus",
        f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    api = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return "Ready" in get(f"{api}/-/ready")
        except OSError:
            return False

    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            eventually(is_ready)
            yield api
        finally:
            process.terminate()
