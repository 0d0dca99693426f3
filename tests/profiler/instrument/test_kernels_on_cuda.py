"""Tests of recorded kernels on a CUDA device. The kernels agree with torch.profiler, and outputs are equal.

Nothing is left after recording.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hosts import CBTOP, DEADLINE_S

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


def test_a_burst_is_refused_and_the_host_goes_on_if_torch_holds_cupti(tmp_path: Path) -> None:
    found = case("captured taken", tmp_path)
    assert found["burst"]["state"] == "TAKEN"
    assert not found["burst"]["kernels"]


HOSTS = {
    "replays": """
import time, torch
from benchmarks.gpu.lean import Engine, Lean
torch.manual_seed(0); torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = Lean(hidden=1024, inner=2048, heads=8, layers=4, context=64, vocabulary=1000)
engine = Engine(model, 1).capture()
found = []
for _ in range(1000):
    engine.step()
    found.append(float(engine.scores.float().sum()))
    time.sleep(0.02)
assert len(set(found[1:])) == 1, set(found)
""",
    "generate": """
import time, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
sizes = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, vocab_size=1000)
model = LlamaForCausalLM(LlamaConfig(**sizes)).to("cuda", torch.bfloat16).eval()
words = torch.randint(0, 1000, (1, 16), device="cuda")
found = set()
begun_s = time.monotonic()
while time.monotonic() - begun_s < 20:
    found.add(tuple(model.generate(words, max_new_tokens=16, do_sample=False)[0].tolist()))
assert len(found) == 1
""",
}


@pytest.mark.parametrize("host", HOSTS)
def test_a_process_under_cbtop_run_is_asked_by_the_command_and_runs_on(host: str, tmp_path: Path) -> None:
    (tmp_path / "host.py").write_text(HOSTS[host])
    root = Path(__file__).parents[3]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    running = subprocess.Popen(
        [*CBTOP, "run", "--", sys.executable, "host.py"],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline_s = time.monotonic() + 60
        while True:
            asked = subprocess.run(
                [*CBTOP, "kernels", "--steps", "3", "--timeout", "30", "--json"],
                env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_S,
            )  # fmt: skip
            is_late = time.monotonic() > deadline_s or running.poll() is not None
            if asked.returncode == 0 or is_late:
                break
            time.sleep(0.5)
        shown = subprocess.run(
            [*CBTOP, "kernels", "--steps", "2", "--timeout", "30"],
            env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_S,
        )  # fmt: skip
        print(shown.stdout, shown.stderr)  # noqa: T201
    finally:
        said, errors = running.communicate(timeout=DEADLINE_S)
    print(said[-1500:], errors[-1500:])  # noqa: T201
    assert asked.returncode == 0, asked.stderr
    found = json.loads(asked.stdout)
    assert (found["steps"], found["lost_records"], found["left_out_launches"]) == (3, 0, 0)
    bricks = {brick["brick"]: brick for phase in found["phases"] for brick in phase["bricks"]}
    assert {"RmsNorm", "DownProjection", "LmHead"} <= set(bricks)
    for kernel in bricks["DownProjection"]["kernels"]:
        assert kernel["registers"] > 0
        assert kernel["min_us"] <= kernel["mean_us"] <= kernel["max_us"]
    assert shown.returncode == 0, shown.stderr
    assert running.returncode == 0, errors
