"""Tests of `cbtop kernels` with real processes, which answer the request and continue to run. Their CUDA is fake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.hosts import CBTOP, DEADLINE_S, eventually

pytest.importorskip("torch", reason="torch is not installed: make torch")

ROOT = Path(__file__).parents[2]
ON_CUDA = """
import sys, threading, time
import pytest
from cbtop import BrickProfiler
from cbtop.profiler.instrument import attach
from tests.profiler.instrument.test_kernel_bursts import World, play, played
world, patch = World(), pytest.MonkeyPatch()
play(world, patch)
model = played.model_of(world)
attach(model, BrickProfiler(clock_ns=world.now_ns))
graph = played.captured(model)
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
steps = 0
while not over.wait(0.01):
    played.replay(world, graph, 1)
    steps += 1
assert world.launched_graphs >= steps and world.owner is None
print("ended")
"""
ON_THE_CPU = """
import sys, threading
import torch
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down_proj = torch.nn.Linear(4, 4)
    def forward(self, rows): return self.down_proj(rows)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
    def forward(self, rows):
        for layer in self.layers: rows = layer(rows)
        return rows
model, rows, over = Model(), torch.ones(2, 4), threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
while not over.wait(0.01): model(rows)
print("ended")
"""


@contextmanager
def host(source: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process until this context ends. Then check that the process ends without an error."""
    with subprocess.Popen(
        [*command, sys.executable, "-c", source], env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
            said, errors = process.communicate(timeout=DEADLINE_S)
            assert (process.returncode, said.splitlines()[-1]) == (0, "ended"), errors
        finally:
            process.kill()


def kernels(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CBTOP, "kernels", "--timeout", f"{DEADLINE_S:g}", *options],
        capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False,
    )  # fmt: skip


@pytest.mark.slow  # test_kernel_bursts.py tests bursts
def test_a_process_that_runs_is_asked_for_its_kernels_twice_and_runs_on(runtime: Path) -> None:
    with host(ON_CUDA) as process:
        eventually(lambda: list(runtime.glob("*.ring")))
        told = kernels("--steps", "4", "--json")
        assert told.returncode == 0, told.stderr
        found = json.loads(told.stdout)
        assert (found["pid"], found["steps"], found["unplaced_launches"]) == (process.pid, 4, 0)
        (phase,) = found["phases"]
        bricks = {brick["brick"]: brick for brick in phase["bricks"]}
        assert {name: (brick["layers"], brick["launches_per_step"]) for name, brick in bricks.items()} == {
            "RmsNorm": (4, 4),
            "DownProjection": (4, 4),
            "Layer": (4, 4),
            "Model": (0, 1),
        }
        assert bricks["DownProjection"]["kernels"][0]["mean_us"] == 20
        again = kernels("--steps", "1")
        assert again.returncode == 0, again.stderr
        assert "decode: 1 step recorded" in again.stdout


@pytest.mark.slow  # The default run skips this test, because test_kernel_bursts.py tests the answer.
def test_under_cbtop_run_a_process_without_a_gpu_refuses_and_runs_on(runtime: Path) -> None:
    with host(ON_THE_CPU, *CBTOP, "run", "--"):
        eventually(lambda: list(runtime.glob("*.ring")))
        told = kernels()
        assert (told.returncode, told.stdout) == (1, "")
        assert "refuses: the model that it runs does not lie on a CUDA device" in told.stderr
