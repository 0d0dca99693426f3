"""An unedited program with a real vLLM under `cbtop run`.

The recorded times of its requests equal the times that vLLM measured.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cbtop

pytestmark = pytest.mark.engines
PROGRAM = Path(__file__).parent / "scripts" / "vllm_requests.py"
REQUESTS, TOKENS = 12, 24
LATER_S = 0.5  # the longest time from the scheduler to the front end for a token, also on a busy machine
DECODES_AGREE_S = 0.1


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, str]:
    """Return the recording, a row (TTFT in s, decode time in s, tokens) for each request, and stderr."""
    assert importlib.util.find_spec("vllm") is not None, "vLLM is not installed here: make engines"
    folder = tmp_path_factory.mktemp("engines")
    recording, times = folder / "run.cbtop", folder / "times.json"
    command = [sys.executable, "-m", "cbtop", "run", "--record", str(recording), "--"]
    ended = subprocess.run(
        [*command, sys.executable, str(PROGRAM), str(times)],
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "XDG_RUNTIME_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return recording, np.array(json.loads(times.read_text())), ended.stderr


def test_each_request_of_vllm_has_the_times_that_vllm_measured(recorded: tuple[Path, np.ndarray, str]) -> None:
    recording, own, _ = recorded
    with cbtop.read(recording) as run:
        table = run.requests()
    assert len(table) == len(own) == REQUESTS
    assert table.column("output_tokens").tolist() == [TOKENS] * REQUESTS
    assert set(table.column("reason")) == {"length"}
    first_s = np.sort(table.column("first_token_us") / 1e6)
    assert (np.sort(own[:, 0]) - first_s >= 0).all()
    assert (np.sort(own[:, 0]) - first_s <= LATER_S).all()
    decode_s = np.sort((table.column("duration_us") - table.column("first_token_us")) / 1e6)
    np.testing.assert_allclose(decode_s, np.sort(own[:, 1]), atol=DECODES_AGREE_S)


def test_the_summary_of_vllm_has_its_latencies(recorded: tuple[Path, np.ndarray, str]) -> None:
    assert "cbtop: engine TTFT p50 " in recorded[2]


def test_steps_of_vllm_prepare_inputs_and_sample(recorded: tuple[Path, np.ndarray, str]) -> None:
    with cbtop.read(recorded[0]) as run:
        bricks, steps = set(run.bricks().column("brick")), run.steps()
    assert {"PrepareInputs", "Sampling", "Detokenize"} <= bricks
    assert np.isin(["decode"], steps.column("phase")).all()
