"""Verdicts on the queue of a real vLLM. A setting that is too small gets its verdict, the healthy twin none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.runs import record

pytestmark = pytest.mark.engines
OF_QUEUES = {"cache-too-small", "batch-of-one", "queue-at-limit"}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("healthy", set()),
        ("few sequences", {"queue-at-limit"}),
        ("one sequence", {"batch-of-one"}),
        ("small cache", {"cache-too-small"}),
    ],
)
def test_a_queue_of_vllm_gets_the_verdict_of_its_cause(tmp_path: Path, case: str, expected: set[str]) -> None:
    run = record(tmp_path, "vllm_cases.py", case)
    command = [sys.executable, "-m", "cbtop", "replay", str(run.recording), "--headless", "--format", "json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    served = [source for source in report["sources"] if source["serving"] is not None]
    assert {one["id"] for source in served for one in source["verdicts"]} & OF_QUEUES == expected
    serving, own = served[0]["serving"], json.loads(run.written.read_text())
    assert serving["schedules"]["max_running"] == own["max_num_seqs"]
    assert serving["schedules"]["mean_requests"] <= own["max_num_seqs"]
    assert sum(request["preemptions"] for request in serving["requests"]) == own["preemptions"]
    assert (own["preemptions"] > 0) == (case == "small cache")
