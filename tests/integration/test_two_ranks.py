"""Tests of a tensor-parallel model on two ranks under `cbtop run`.

Its collectives are bricks, and the slow rank is named.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cbtop.viewmodels.straggler import BETWEEN_BRICKS
from tests.integration.hosts import CBTOP, DEADLINE_S, PATIENTLY, cbtop, daemon, eventually

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: make torch")

SLOW_RANK = 1
LAYERS = 2

# A program with two ranks, each with half of every matrix. The slow rank sleeps in its feed-forward network, outside
# any brick. Both ranks run until the given file exists.
PARALLEL = """
import sys, time, torch
import torch.distributed as dist
from pathlib import Path
from torch import nn
from torch.distributed import all_reduce
torch.set_num_threads(1)
torch.manual_seed(7)
class RowParallel(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        all_reduce(x)
        return x
class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(16, 8), nn.Linear(16, 8), RowParallel(8, 16)
    def forward(self, x):
        if dist.get_rank() == slow: time.sleep(0.004)
        return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), Mlp()
    def forward(self, x): return x + self.mlp(self.norm(x))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
    def forward(self, x):
        for layer in self.layers: x = layer(x)
        return x
slow, stop = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo")
model, ends = Model(), torch.zeros(1)
with torch.no_grad():
    while not ends:
        model(torch.ones(1, 16))
        if dist.get_rank() == 0: ends.fill_(stop.exists())
        dist.broadcast(ends, 0)
dist.destroy_process_group()
"""
BY_A_SHELL = """
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$1 WORLD_SIZE=2
shift
RANK=1 "$@" &
RANK=0 "$@"
code=$?
wait
exit $code
"""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@contextmanager
def _running(command: list[str], directory: Path, stop: Path) -> Iterator[list[str]]:
    """Run the command under `cbtop run` in a new session. At the end stop it, and yield its stderr lines."""
    with subprocess.Popen(
        command, cwd=directory, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        said: list[str] = []
        try:
            yield said
            stop.touch()
            said += process.communicate(timeout=DEADLINE_S)[1].splitlines()
            assert process.returncode == 0, said
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _both(*look: str) -> list[dict[str, Any]]:
    """Return both ranks from a report, or an empty list if the report is too short to compare them."""
    done = cbtop("--headless", *look, "--format", "json")
    sources: list[dict[str, Any]] = json.loads(done.stdout)["sources"] if done.returncode == 0 else []
    return sources if len(sources) == 2 and all(source["straggler"] for source in sources) else []


@pytest.mark.slow
@pytest.mark.parametrize("launched", ["by a shell", pytest.param("by torchrun, as a sample", marks=pytest.mark.slow)])
def test_two_ranks_are_one_report_with_collectives_by_layer_and_a_straggler(launched: str, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(PARALLEL)
    stop = tmp_path / "stop"
    main, look = ["main.py", str(SLOW_RANK), str(stop)], ("--once", "--window=all", *PATIENTLY)
    if launched == "by a shell":
        command = ["--overhead", "100%", "--", "sh", "-c", BY_A_SHELL, "sh", str(_free_port()), sys.executable, *main]
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        # Watch for ten seconds, because only some steps are recorded.
        command, look = ["--", sys.executable, *torchrun, *main], ("--duration", "10")
    with daemon(), _running([*CBTOP, "run", "--quiet", "--record", "run.cbtop", *command], tmp_path, stop) as said:
        sources = eventually(lambda: _both(*look))
    assert [line.split(", ")[1] for line in said if line.startswith("cbtop: ")] == ["2 processes"]
    replayed = cbtop("replay", str(tmp_path / "run.cbtop"), "--format", "json")
    recorded = json.loads(replayed.stdout)["sources"]
    assert all(source["steps"]["count"] > 0 for source in recorded)
    for both in (sources, recorded):
        assert sorted((source["rank"], source["world_size"]) for source in both) == [(0, 2), (1, 2)]
    for source in sources:
        straggler = source["straggler"]
        assert (straggler["rank"], straggler["brick"]) == (SLOW_RANK, BETWEEN_BRICKS[0])
        assert straggler["busy_us"] >= LAYERS * 4000
        reduces = [node for node in source["graph"] if node["name"] == "AllReduce"]
        assert len(reduces) == LAYERS
        assert {(node["label"], node["category"]) for node in reduces} == {("2 ranks", "Communication")}
        (brick,) = [brick for brick in source["bricks"] if brick["name"] == "AllReduce"]
        assert brick["elements"] == 16 * brick["count"]
        assert brick["size_bytes"] == 4 * brick["elements"]
        # An all-reduce of n ranks sends 2 (n - 1) / n times the size, which is the size for two ranks.
        assert brick["bytes"] == brick["size_bytes"]


# A model of Hugging Face. Its own plan distributes the weights as DTensors.
PLANNED = """
import sys, torch, transformers
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto").eval()
found = model.generate(torch.ones(1, 5, dtype=torch.long), max_new_tokens=8, do_sample=False)
if dist.get_rank() == 0: print(found.tolist(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed: make torch")
def test_a_model_transformers_spreads_over_two_ranks_shows_its_collectives(
    tmp_path: Path,
) -> None:
    from tests.profiler.instrument.tiny import model_of

    model_of("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "main.py").write_text(PLANNED)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [sys.executable, "-W", "ignore", *torchrun, "main.py", "model"]
    recorded = [*CBTOP, "run", "--overhead", "100%", "--record", "run.cbtop", "--", *program]
    bare, ours = (
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        for command in (program, recorded)
    )
    assert (ours.returncode, ours.stdout) == (bare.returncode, bare.stdout), ours.stderr
    assert bare.stdout.startswith("[["), bare.stderr
    done = cbtop("replay", str(tmp_path / "run.cbtop"), "--headless", "--format", "json", "--phase", "decode")
    sources = json.loads(done.stdout)["sources"]
    assert sorted((source["rank"], source["world_size"]) for source in sources) == [(0, 2), (1, 2)]
    for source in sources:
        counts = {brick["name"]: brick["count"] for brick in source["bricks"]}
        layers, steps = 3, source["steps"]["count"]
        # Each layer has one all-reduce after attention, and another all-reduce after the feed-forward network.
        assert counts["AllReduce"] == 2 * layers * steps
        # These collectives belong to the embedding and the LM head.
        assert {"AllReduce (launch)", "AllGather (launch)", "Wait"} <= counts.keys()
