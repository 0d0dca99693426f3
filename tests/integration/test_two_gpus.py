"""Tests of two tensor-parallel ranks on two GPUs with NCCL.

Numbers are equal, collectives are bricks, and the slow rank is named. NVLink is tested, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from tests.integration.hosts import CBTOP, cbtop, daemon, eventually  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices"),
]

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SLOW_RANK, LAYERS = 1, 2
MOST_S = 120  # Time limit in s. A process that hangs on a device would never end.
MOST_OF_NVLINK = 2e12  # bytes per second; more than all links of any GPU can carry

# A program that prints what each rank computes: without cbtop, while attached, and after it was detached. The program
# runs eagerly and with a graph.
COMPARED = """
import json, sys, torch
import torch.distributed as dist
import cbtop
from benchmarks.gpu.tensor_parallel import TOY, Rank
from cbtop.profiler.instrument import trouble
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import MAX_NODE
from cbtop.protocol.vocabulary import NodeKind
from tests.profiler.memory import Memory
dist.init_process_group("nccl")
with torch.no_grad():
    rank = Rank(TOY)
    memory = Memory()
    def replayed(captured):
        graph, logits = captured
        logits.zero_()
        graph.replay()
        torch.cuda.synchronize()
        return logits.clone()
    def is_reduce(said):
        return isinstance(said, Node) and said.kind is NodeKind.BRICK and said.name.startswith("AllReduce")
    def reduced():
        nodes = {said.id for said in memory.said if is_reduce(said)}
        return sum(tag & MAX_NODE in nodes for tag, *_ in memory.records)
    bare, bare_graph = rank.step().clone(), rank.captured()
    expected = replayed(bare_graph)
    profiler = cbtop.BrickProfiler(recorder=memory)
    attachment = cbtop.attach(rank.model, profiler)
    ours = rank.step().clone()
    attached_graph = rank.captured()
    profiler.finalize()
    before = reduced()
    replays = [torch.equal(expected, replayed(attached_graph)) for _ in range(20)]  # some of them stamped
    profiler.finalize()
    found = {
        "eager": torch.equal(bare, ours),
        "differs from nothing": bool(bare.abs().sum() > 0),
        "graph, attached": all(replays),
        "collectives of the graph are bricks": reduced() > before,
        "nothing said": not trouble.first_said() or trouble.first_said(),
        "bare graph, while attached": torch.equal(expected, replayed(bare_graph)),
    }
    attachment.detach()
    found |= {
        "eager, detached": torch.equal(bare, rank.step()),
        "graph, detached": torch.equal(expected, replayed(attached_graph)),
        "bricks": [
            [said.name, said.label, said.backend, said.work.size_bytes(1, TOY.hidden)]
            for said in memory.said
            if is_reduce(said)
        ],
    }
    print(rank.rank, "reduces in replays:", reduced() - before, "said:", trouble.first_said(), file=sys.stderr)
    with open(f"{sys.argv[1]}-{rank.rank}", "w") as file: json.dump(found, file)
del bare_graph, attached_graph  # NCCL waits for graphs that hold its kernels
dist.barrier()
dist.destroy_process_group()
"""

# A program that replays a graph with collectives and ends in the given way. If it hangs at its end without cbtop, it
# may also hang with cbtop.
ENDS = """
import sys, torch
import torch.distributed as dist
from benchmarks.gpu.tensor_parallel import TOY, Rank
how, attached = sys.argv[1:]
dist.init_process_group("nccl")
with torch.no_grad():
    rank = Rank(TOY)
    if attached == "attached":
        import cbtop
        profiler = cbtop.BrickProfiler(sample_every=2)
        attachment = cbtop.attach(rank.model, profiler)
    graph, logits = rank.captured()
    for _ in range(20): graph.replay()
    torch.cuda.synchronize()
    if attached == "attached":
        from cbtop.profiler.instrument import captured_graphs
        assert any(one.is_stamped for one in captured_graphs.graphs.values())
if how == "deletes its graph": del graph
if how == "resets its graph": graph.reset()
if how != "ends without a word":
    dist.barrier()
    dist.destroy_process_group()
print("ended")
"""

# A program that decodes until the given file exists. The slow rank multiplies more often.
DECODES = """
import sys, torch
import torch.distributed as dist
from pathlib import Path
from benchmarks.gpu.tensor_parallel import TOY, Rank
dist.init_process_group("nccl")
with torch.no_grad():
    rank, ends = Rank(TOY), torch.zeros(1, device="cuda")
    if rank.rank == int(sys.argv[1]): rank.slow_down(100)
    while not ends:
        rank.step()
        if rank.rank == 0: ends.fill_(Path(sys.argv[2]).exists())
        dist.broadcast(ends, 0)
dist.destroy_process_group()
"""


# A program that calls and captures a model on the second device while the first device is the current one.
ELSEWHERE = """
import json, sys, torch
import cbtop
from benchmarks.gpu.lean import Engine, Lean
from cbtop.profiler.instrument import trouble
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import MAX_NODE
from cbtop.protocol.vocabulary import NodeKind
from tests.profiler.memory import Memory
torch.set_grad_enabled(False); torch.set_default_dtype(torch.bfloat16)
def lean(index):
    torch.manual_seed(0)
    with torch.device("cuda", index):
        return Lean(batch=1, hidden=1024, inner=2048, heads=8, layers=3, context=64, vocabulary=1000).eval()
memory = Memory()
profiler = cbtop.BrickProfiler(recorder=memory, sample_every=2)
here, there = lean(0), lean(1)
words, at = torch.ones((16, 1), dtype=torch.long), torch.zeros(1, dtype=torch.long)
def called(model, index):
    found = [model(words[:1].to(f"cuda:{index}"), at.to(f"cuda:{index}")).clone() for _ in range(12)]
    torch.cuda.synchronize(index)
    return found[-1]
expected = called(there, 1)
attachments = [cbtop.attach(model, profiler) for model in (here, there)]
found = {"eager": torch.equal(expected, called(there, 1)), "beside it": bool(called(here, 0).abs().sum() > 0)}
with torch.cuda.device(1):
    engine = Engine(there, 1).capture()
found["current"] = torch.cuda.current_device() == 0
engine.step(); torch.cuda.synchronize(1)
expected = engine.scores.clone()
for _ in range(40):
    engine.scores.zero_()
    engine.step()
    torch.cuda.synchronize(1)
    found["replays"] = found.get("replays", True) and torch.equal(expected, engine.scores)
called(here, 0)
profiler.finalize()
nodes = {said.id: said for said in memory.said if isinstance(said, Node) and said.kind is NodeKind.BRICK}
seen = [nodes[tag & MAX_NODE].backend for tag, *_ in memory.records if tag & MAX_NODE in nodes]
found["still current"] = torch.cuda.current_device() == 0
found["stamped"] = len(seen) > 100 and not [one for one in seen if "torch on cuda" not in one or "launches" in one]
found["nothing said"] = not trouble.first_said() or trouble.first_said()
for attachment in attachments: attachment.detach()
with open(sys.argv[1], "w") as file: json.dump(found, file)
"""


@contextmanager
def _running(command: list[str], directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the command in a new session. At the end, kill everything that is left of it."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(
        command, cwd=directory, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # End torchrun first, because it ends its workers, which are in other sessions.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                with suppress(ProcessLookupError):  # torchrun has ended
                    os.killpg(process.pid, signal.SIGKILL)


def _ends_well(process: subprocess.Popen[str]) -> None:
    _, said = process.communicate(timeout=MOST_S)
    assert process.returncode == 0, said


def test_two_ranks_compute_the_same_bits_and_their_collectives_are_bricks(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(COMPARED)
    with _running([*TORCHRUN, "main.py", "found"], tmp_path) as process:
        _ends_well(process)
    for rank in (0, 1):
        found: dict[str, Any] = json.loads((tmp_path / f"found-{rank}").read_text())
        bricks = found.pop("bricks")
        assert all(found.values()), found
        assert bricks
        # Each layer has two collectives: after attention, and after the feed-forward network.
        assert len(bricks) % (2 * LAYERS) == 0
        assert {label for _, label, *_ in bricks} == {"2 ranks"}
        # The size is unknown (None) if the collective waited for the host.
        assert {size_bytes for *_, size_bytes in bricks} <= {2 * 256, None}
        assert all(backend.startswith("torch on cuda") for *_, backend, _ in bricks)


def test_ranks_with_graphs_end_with_us_where_they_end_without(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(ENDS)
    ways = ["deletes its graph", "resets its graph", "keeps its graph", "ends without a word"]
    with ExitStack() as stack:
        running = {
            (how, attached): stack.enter_context(_running([*TORCHRUN, "main.py", how, attached], tmp_path))
            for how in ways
            for attached in ("bare", "attached")
        }
        codes, said, end = {}, {}, time.monotonic() + MOST_S / 2
        for key, process in running.items():
            try:
                said[key] = process.communicate(timeout=max(end - time.monotonic(), 0.1))[1]
                codes[key] = process.returncode
            except subprocess.TimeoutExpired:
                codes[key] = None  # the process hangs
    sys.stdout.write(f"{codes}\n")
    assert codes["deletes its graph", "bare"] == 0, said
    for how in ways:
        assert codes[how, "attached"] == codes[how, "bare"], (how, said)


def test_a_model_on_another_device_is_timed_there_and_computes_the_same(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(ELSEWHERE)
    with _running([sys.executable, "main.py", "found"], tmp_path) as process:
        _ends_well(process)
    found = json.loads((tmp_path / "found").read_text())
    assert all(value is True for value in found.values()), found


def test_the_rank_that_multiplies_more_is_named_and_nvlink_shown_or_unknown(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(DECODES)
    stop = tmp_path / "stop"
    command = [*CBTOP, "run", "--overhead", "100%", "--", *TORCHRUN, "main.py", str(SLOW_RANK), str(stop)]

    def look() -> dict[str, Any] | None:
        assert process.poll() is None, process.communicate()[1]
        done = cbtop("--headless", "--duration", "3", "--view", "devices", "--format", "json")
        found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"sources": []}
        named = [source for source in found["sources"] if source["straggler"]]
        return found if len(named) == 2 else None

    with daemon(), _running(command, tmp_path) as process:
        found = eventually(look)
        stop.touch()
        _ends_well(process)
    for source in found["sources"]:
        assert source["straggler"]["rank"] == SLOW_RANK
        assert source["straggler"]["brick"].startswith("DownProjection")
        assert any(brick["name"].startswith("AllReduce") for brick in source["bricks"])
    (machine,) = found["machines"]
    gpus = [device for device in machine["devices"] if device["kind"] == "gpu"]
    assert len(gpus) >= 2
    told = [gpu for gpu in gpus if gpu["nvlink_sent_bytes_per_sec"] is not None]
    for gpu in gpus:
        for figure in ("nvlink_sent_bytes_per_sec", "nvlink_received_bytes_per_sec"):
            if gpu[figure] is None:
                assert gpu["unknown"][figure]
            else:
                assert 0 <= gpu[figure] < MOST_OF_NVLINK
    # The ranks send all the time. So if any GPU reports NVLink data, at least two do.
    assert not told or sum(gpu["nvlink_sent_bytes_per_sec"] > 0 for gpu in told) >= 2
