"""Tests of a model on two ranks, as `cbtop demo --backend cuda --gpus 2` starts them: one screen names the slow rank.

The ranks decode on the CPU here, and named pipes replace NCCL. All other code is the same as on GPUs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cbtop.compute.demo_model import TINY, write_model
from cbtop.protocol.process import process_start
from tests.integration.hosts import DEADLINE_S, cbtop, daemon, eventually
from tests.integration.test_terminal import Terminal, family

pytestmark = pytest.mark.slow  # each rank loads Numba

SLOW_RANK = 1
# A program that runs `cbtop` with threads instead of GPUs. One rank sleeps in a brick.
ON_PIPES = """
import sys, time
from pathlib import Path
sys.path.insert(0, ROOT)
from cbtop.cli import main
from cbtop.commands import demo
from cbtop.compute import places
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.int8 import model_to_run
from cbtop.compute.decoder.ranks import Rank, part_of
from tests.compute.linked import PipeLink
class OnRank(places.OnCpu):
    def __init__(self, options):
        super().__init__(options)
        self.label, self.guard, one = "pipes", None, options.rank
        assert one.of_first(lambda: b"id") == b"id"
        self.rank = Rank(one.number, one.count, PipeLink(one.number, one.count, Path(__file__).parent))
    def model(self, path):
        return part_of(model_to_run(path), self.rank)
    def decoder(self, model, profiler, context):
        decoder = Decoder(model, "numba", 1, profiler, context, rank=self.rank)
        for brick in decoder.bricks.places() if self.rank.number == SLOW_RANK else ():
            if brick.spec.name == "DownProjection":
                quick, = brick.implementations
                brick.implementations = (lambda *given, quick=quick: (time.sleep(0.004), quick(*given)),)
        return decoder
    def ceilings(self, model, progress):
        return ()
places.OnGpu = OnRank
plain = demo._command
demo._command = lambda options: [sys.executable, __file__, *plain(options)[3:]]
sys.exit(main())
"""


@pytest.fixture
def demo(tmp_path: Path) -> list[str]:
    """Return the command of a demo that decodes a tiny model on two ranks and shows both ranks."""
    model, script = tmp_path / "tiny.gguf", tmp_path / "cbtop_on_pipes.py"
    write_model(model, TINY, lambda *_: None)
    root = str(Path(__file__).parents[2])
    script.write_text(f"ROOT, SLOW_RANK = {root!r}, {SLOW_RANK}\n{ON_PIPES}")
    gpus = ["--backend", "cuda", "--gpus", "2"]
    return [sys.executable, str(script), "demo", *gpus, "--model", str(model), "--threads", "1"]


@contextmanager
def decoding(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def both() -> list[dict[str, Any]]:
    """Return the two ranks from a report, or an empty list if the report is too short to compare them."""
    done = cbtop("--headless", "--duration", "3", "--window=all", "--format", "json")
    sources: list[dict[str, Any]] = json.loads(done.stdout)["sources"] if done.returncode == 0 else []
    found = sorted(sources, key=lambda one: one["rank"])
    return found if len(found) == 2 and all(one["straggler"] for one in found) else []


def test_two_ranks_are_one_report_that_names_the_slow_one_and_end_together(
    demo: list[str],
) -> None:
    with daemon(), decoding([*demo, "--serve-only"]) as process:
        first, last = eventually(both)
        for rank, source in enumerate((first, last)):
            assert (source["rank"], source["world_size"], source["layers"]) == (rank, 2, 1)
            assert (source["straggler"]["rank"], source["straggler"]["brick"]) == (SLOW_RANK, "DownProjection")
            exchanges = {one["name"]: one for one in source["bricks"] if one["category"] == "Communication"}
            assert set(exchanges) == {"Broadcast", "Recv" if rank else "Send"}
            for name, one in exchanges.items():
                assert one["size_bytes"] == one["bytes"] == one["elements"] * (8 if name == "Broadcast" else 4)
            layers = [node["name"] for node in source["graph"] if node["kind"] == "layer"]
            assert layers == [str(rank)]
            assert source["books"]["close"]
        assert first["straggler"]["others_wait"]
        os.kill(last["pid"], signal.SIGKILL)
        said = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, *said) == (
            1, "", "cbtop: rank 1 was killed by signal 9 (Killed); the others are ended\n",
        )  # fmt: skip
        assert process_start(first["pid"]) is None


def test_a_report_of_both_is_printed_once_their_steps_are_done(demo: list[str]) -> None:
    with decoding([*demo, "--headless", "--steps", "70", "--format", "json"]) as process:
        said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    found = json.loads(said)["sources"]
    assert [(one["rank"], one["state"], one["steps"]["count"]) for one in found] == [
        (0, "ended", 70),
        (1, "ended", 70),
    ]


def test_the_straggler_is_named_and_a_killed_rank_leaves_a_clean_terminal(
    demo: list[str],
) -> None:
    screen = Terminal(demo)
    try:
        screen.wait_for("straggler:", f"rank {SLOW_RANK} is")
        started = family(screen.process)[1:]
        (slow,) = [one for one in started if one.environ().get("RANK") == str(SLOW_RANK)]
        slow.kill()
        assert screen.exit_code() == 1
        assert screen.is_clean
        assert f"cbtop: rank {SLOW_RANK} was killed by signal 9 (Killed); the others are ended" in screen.read()
        eventually(lambda: not any(one.is_running() for one in started))
    finally:
        for process in family(screen.process):
            process.kill()
        screen.process.wait()
        screen.close()
