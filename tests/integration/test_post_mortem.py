"""Tests of what a killed process was doing.

The running node is exact if the process wrote this node down. Otherwise the running node is labelled as derived.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.daemon.post_mortem import post_mortem
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.ring import FIRST_SLOT_WORD, SLOT_WORDS
from cbtop.protocol.sample_messages import BETWEEN_STEPS, CpuSamples, SampledFunction, SampledPlace
from tests.integration.hosts import DEADLINE_S, HOST, cbtop, eventually
from tests.representatives import first_by_default

DIES = """
import os, sys, threading
from cbtop import BrickId, BrickProfiler
profiler, bricks = BrickProfiler(), int(sys.argv[1])
while True:
    with profiler.step("decode", tokens=1):
        for layer in range(3):
            with profiler.layer(layer):
                for brick in (BrickId.RMS_NORM, BrickId.QKV_PROJECTION, BrickId.DOWN_PROJECTION):
                    with profiler.brick(brick, 64):
                        bricks -= 1
                        if not bricks:
                            os.kill(os.getpid(), 9)
"""
NAMES = ("RmsNorm", "QkvProjection", "DownProjection")


def compiled() -> bool:
    return BrickProfiler(enabled=False).implementation != "python"


def autopsy(*arguments: str) -> list[dict[str, Any]]:
    done = cbtop("post-mortem", "--format", "json", *arguments)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "cbtop.post-mortem/1"
    found: list[dict[str, Any]] = document["processes"]
    return found


@first_by_default("python", [False, True], 2, ids=["compiled", "python"])
@first_by_default("bricks", [14, 1234, *(pytest.param(bricks, marks=pytest.mark.slow) for bricks in (10, 45, 46))], 2)
def test_the_brick_a_killed_process_was_in_is_named(bricks: int, python: bool) -> None:
    if not python and not compiled():
        pytest.skip("no compiled hot path here")
    environment = os.environ | ({"CBTOP_PURE_PYTHON": "1"} if python else {})
    process = subprocess.Popen([sys.executable, "-c", DIES, str(bricks)], env=environment)
    process.wait()
    (found,) = autopsy()
    layer, brick = divmod((bricks - 1) % 9, 3)
    (unfinished,) = found["in_flight"]
    assert unfinished["path"] == f"decode → Layer {layer} → {NAMES[brick]}"
    assert unfinished["provenance"] == ("derived" if python else "measured")
    assert (found["pid"], found["state"]) == (process.pid, "gone")
    assert len(found["steps"]) == min(10, (bricks - 1) // 9)
    assert isinstance(found["sampled"], list)
    if not python:
        assert unfinished["thread_id"] == process.pid
        assert unfinished["began_s"] == pytest.approx(found["last_record_s"], abs=DEADLINE_S)
    text = cbtop("post-mortem", str(process.pid)).stdout
    assert f"Layer {layer} → {NAMES[brick]} [{unfinished['provenance']}]" in text
    assert "GONE (no goodbye" in text


@pytest.mark.slow
def test_a_process_that_ended_by_itself_was_in_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", HOST, "5"]) as process:
        process.wait()
    (found,) = autopsy(str(process.pid))
    assert (found["state"], found["reason"], found["in_flight"]) == ("ended", "exit", [])
    assert [step["path"] for step in found["steps"]] == ["decode"] * 5
    assert "nothing that is known of" in cbtop("post-mortem").stdout


def test_json_has_the_functions_that_were_sampled_before_the_end(runtime: Path) -> None:
    function = SampledFunction("encode", "tok.py", 88, 60, 0)
    place = SampledPlace("", "", BETWEEN_STEPS, 100, 2, 0, (function,))
    recorder = RingRecorder(runtime)
    profiler = BrickProfiler(recorder=recorder)
    with profiler.step("decode", tokens=1):
        pass
    recorder.announce(CpuSamples(0, 10**9, 1, 0, (place,)))
    (sampled,) = autopsy(str(os.getpid()))[0]["sampled"]
    assert (sampled["place"], sampled["samples"]) == (BETWEEN_STEPS, 100)
    assert (sampled["functions"][0]["name"], sampled["functions"][0]["percent"]) == ("encode", 60.0)


@pytest.mark.slow
def test_the_newest_of_several_has_bricks_and_the_others_a_line() -> None:
    for steps in ("5", "6"):
        subprocess.run([sys.executable, "-c", HOST, steps], check=True)
    first, second = autopsy()
    text = cbtop("post-mortem").stdout
    assert text.startswith(f"python -c, pid {first['pid']} on ")
    assert f"\npython -c, pid {second['pid']} on " in text
    assert text.count("last 5 records") == 1
    assert re.search(r"^DownProjection +FFN +\d", text, re.MULTILINE)
    assert text.endswith("\nthe rest: --view all\n")
    assert len(text.splitlines()) <= 60
    whole = cbtop("post-mortem", "--view", "all").stdout
    assert whole.count("last 5 records") == 2
    assert "DownProjection  FFN" not in whole


def test_a_process_that_hangs_tells_what_each_thread_is_stuck_in(runtime: Path) -> None:
    if not compiled():
        pytest.skip("no compiled hot path here")
    profiler = BrickProfiler(recorder=RingRecorder(runtime))
    let_go, stuck = threading.Event(), threading.Barrier(3)

    def hang(name: str) -> None:
        with profiler.brick(name):
            stuck.wait()
            let_go.wait()

    threads = [threading.Thread(target=hang, args=(name,)) for name in ("AllReduce", "MoeRouter")]
    for thread in threads:
        thread.start()
    stuck.wait()
    (found,) = autopsy(str(os.getpid()))
    assert {each["path"] for each in found["in_flight"]} == {"AllReduce", "MoeRouter"}
    assert {each["thread_id"] for each in found["in_flight"]} == {thread.native_id for thread in threads}
    assert found["state"] == "live"
    let_go.set()
    for thread in threads:
        thread.join()
    eventually(lambda: autopsy(str(os.getpid()))[0]["in_flight"] == [])
    assert cbtop("post-mortem").returncode == 3  # Without a pid, post-mortem ignores processes that still run.


def test_with_nothing_left_it_says_so() -> None:
    done = cbtop("post-mortem")
    assert (done.returncode, done.stdout) == (3, "")
    assert "no process of yours has left a record" in done.stderr


@given(words=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=12), at=st.integers(1, 600))
def test_a_ring_that_lies_is_no_crash(words: list[int], at: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("lies")
    recorder = RingRecorder(directory, 1 << 12)
    profiler = BrickProfiler(recorder=recorder)
    for _ in range(3):
        with profiler.step("decode", tokens=1), profiler.brick("a"):
            pass
    (ring,) = directory.glob("*.ring")
    with ring.open("r+b") as file:
        for offset in (8 * FIRST_SLOT_WORD, 4096 + 8 * (at % 24), 8 * (FIRST_SLOT_WORD + SLOT_WORDS * (at % 60))):
            file.seek(offset)
            file.write(struct.pack(f"<{len(words)}q", *words))
    found = post_mortem(ring)
    assert found.pid == os.getpid()
    profiler.close()
