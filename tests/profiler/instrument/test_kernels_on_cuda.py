"""Kernels on a CUDA device, beside torch.profiler; outputs the same; nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def case(mode: str, directory: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.profiler.instrument.kernels_on_cuda", mode, str(directory)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    print(mode, json.dumps(found, indent=1)[:6000], run.stderr[-1500:])  # noqa: T201
    return found


@pytest.mark.parametrize("mode", ["captured", "eager"])
def test_a_burst_finds_the_kernels_that_torch_profiler_finds(mode: str, tmp_path: Path) -> None:
    found = case(mode, tmp_path)
    burst = found["burst"]
    assert (burst["state"], burst["lost"], burst["left_out"]) == ("DONE", 0, 0)
    assert found["same"]
    assert found["same_after"]
    assert found["same_kernels"]
    ours, theirs = burst["kernels"], found["profiled"]
    assert {name: count for name, (count, _) in ours.items()} == {name: count for name, (count, _) in theirs.items()}
    for name, (_, us) in ours.items():
        assert us == pytest.approx(theirs[name][1], rel=0.1, abs=0.5), name
    assert {"RmsNorm", "QkvProjection", "OutputProjection", "DownProjection", "LmHead"} <= set(burst["bricks"])
    assert burst["unplaced"] == 0
    assert found["left_bytes"] <= 8 << 20


def test_where_torch_profiler_holds_cupti_a_burst_is_refused_and_the_host_goes_on(tmp_path: Path) -> None:
    found = case("captured taken", tmp_path)
    assert found["burst"]["state"] == "TAKEN"
    assert not found["burst"]["kernels"]
