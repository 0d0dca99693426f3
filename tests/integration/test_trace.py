"""Tests of `cbtop demo --trace`: the demo's process records what its model computed, and the report shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbtop.compute.demo_model import TINY, write_model
from cbtop.profiler.traces import TRACES
from tests.integration.hosts import cbtop


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_model(path, TINY, lambda *_: None)
    return str(path)


@pytest.mark.slow
def test_all_traces_of_a_run_are_reported_and_its_books_still_balance(model: str) -> None:
    done = cbtop("demo", "--model", model, "--headless", "--steps", "40", "--trace", "all", "--format", "json")
    assert done.returncode == 0, done.stderr
    (source,) = json.loads(done.stdout)["sources"]
    assert {trace["name"]: trace["trace"] for trace in source["traces"]} == TRACES
    assert {trace["forwards"] for trace in source["traces"]} == {3}  # Three of the steps were traced: 1, 17 and 33.
    assert [trace["anomalies"] for trace in source["traces"]] == [[]] * 5
    (own,) = [row for row in source["bricks"] if row["name"] == "Trace"]
    assert own["category"] == "Other"
    books = source["books"]
    assert books["wall_us"] == pytest.approx(books["bricks_us"] + books["gaps_us"] + books["unattributed_us"])
    assert sum(row["total_exclusive_us"] for row in source["bricks"]) == pytest.approx(books["bricks_us"])


@pytest.mark.slow  # The default run skips this test, because tests/compute/test_tracing.py tests the same.
def test_only_what_was_asked_for_is_traced_and_shown(model: str) -> None:
    done = cbtop("demo", "--model", model, "--headless", "--steps", "3", "--trace", "kv,logits", "--view", "trace")
    assert done.returncode == 0, done.stderr
    shown = [line.split(",")[0] for line in done.stdout.splitlines() if line.startswith("MLT-")]
    assert shown == ["MLT-03 logits", "MLT-05 kv"]
    assert "step time:" not in done.stdout


def test_an_unknown_trace_is_a_usage_error_that_lists_those_there_are() -> None:
    done = cbtop("demo", "--headless", "--trace", "kv,weights")
    assert done.returncode == 2
    assert "no trace 'weights'; there are activations, attention, logits, quant, kv, or all" in done.stderr
