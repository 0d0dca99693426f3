"""Tests of sampling functions: which samples count, and that the program notices nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cbtop.profiler.cpu_sampling import CAN_SAMPLE, CODES, key_of_place, sampled_places
from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.messages import Node
from cbtop.protocol.sample_messages import BETWEEN_STEPS, IN_NO_BRICK, CpuSamples, SampledPlace
from cbtop.protocol.vocabulary import WARM_UP, NodeKind, TrainingPart

NODES = [
    Node(1, None, NodeKind.STEP, "decode", label="draft"),
    Node(2, 1, NodeKind.LAYER, "0"),
    Node(3, 2, NodeKind.BRICK, "Linear"),
    Node(4, 1, NodeKind.LAYER, "1", own="Block"),
    Node(5, None, NodeKind.STEP, f"decode{WARM_UP}"),
    Node(6, None, NodeKind.BRICK, "Tokenizer"),
]
compiled = pytest.mark.skipif(not CAN_SAMPLE, reason="the sampler is not compiled here")

# A program that spends its time in `gap` between steps, in `loose` outside of the bricks of a step, and in `brick`.
PROGRAM = """
import os, sys, time
from pathlib import Path
from cbtop.profiler import cpu_sampling
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder

recorder = RingRecorder(Path(sys.argv[1]))
profiler = BrickProfiler(recorder=recorder)
cpu_sampling.begin(recorder, 0.5)

def gap(ms=GAP):
    end = time.perf_counter() + ms / 1e3
    while time.perf_counter() < end:
        pass

def loose():
    end = time.perf_counter() + LOOSE / 1e3
    while time.perf_counter() < end:
        pass

def brick():
    end = time.perf_counter() + BRICK / 1e3
    while time.perf_counter() < end:
        pass

def steps(count):
    for _ in range(count):
        with profiler.step("decode", 1):
            with profiler.brick("Linear"):
                brick()
            loose()
        gap()
"""


def program(body: str, gap: float = 4, loose: float = 4, brick: float = 4) -> str:
    return PROGRAM.replace("GAP", str(gap)).replace("LOOSE", str(loose)).replace("BRICK", str(brick)) + body


def ran(directory: Path, code: str) -> list[SampledPlace]:
    """Run the program, which must print nothing but "ok". Returns the sampled places that it announced last."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(directory)], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
    return said_in(min(directory.glob("*.catalog"), key=os.path.getmtime))


def said_in(catalog: Path) -> list[SampledPlace]:
    said = [message for message in CatalogReader(catalog).read() if isinstance(message, CpuSamples)]
    return list(said[-1].places) if said else []


def names_at(places: list[SampledPlace], name: str) -> dict[str, int]:
    (place,) = [place for place in places if place.name == name]
    return {one.name: one.samples for one in place.functions}


def test_only_untimed_places_of_steps_have_a_name() -> None:
    assert [key_of_place(place, NODES) for place in (0, 1, 2, 4)] == [
        ("", "", BETWEEN_STEPS),
        ("decode", "draft", IN_NO_BRICK),
        ("decode", "draft", IN_NO_BRICK),
        ("decode", "draft", "Block"),
    ]
    assert key_of_place(-CODES[TrainingPart.DATA_WAIT], NODES) == ("", "", "data wait")
    # a brick, a warm-up, a brick outside of steps, a node that is not announced yet
    assert [key_of_place(place, NODES) for place in (3, 5, 6, 7)] == [None] * 4


def test_layers_add_up_and_a_function_has_its_line_with_most_samples() -> None:
    lines = [
        (1, "work", "/x/a.py", 3, "", "", 0, 2, 0),
        (2, "work", "/x/a.py", 5, "", "", 0, 7, 3),
        (2, "get", "/lib/queue.py", 9, "main", "/x/a.py", 1, 1, 1),
        (3, "timed", "/x/a.py", 7, "", "", 0, 9, 0),
    ]
    keys = {place: key for place in (1, 2) if (key := key_of_place(place, NODES))}
    (found,) = sampled_places([(1, 3, 1, 0), (2, 9, 0, 1), (3, 9, 0, 0)], lines, keys)
    assert (found.samples, found.unread, found.own) == (12, 1, 1)
    assert [(one.name, one.line, one.samples, one.asleep) for one in found.functions] == [
        ("work", 5, 9, 3),
        ("get", 9, 1, 1),
    ]
    assert found.functions[1].called_from == "a.py:1 main"


@compiled
def test_functions_are_found_where_they_ran_and_none_in_a_brick(tmp_path: Path) -> None:
    places = ran(tmp_path, program("steps(150)\nprint('ok')"))
    between, inside = names_at(places, BETWEEN_STEPS), names_at(places, IN_NO_BRICK)
    assert max(between, key=lambda name: between[name]) == "gap"
    assert max(inside, key=lambda name: inside[name]) == "loose"
    assert "brick" not in {*between, *inside}
    assert "loose" not in between
    assert "gap" not in inside


@compiled
def test_a_program_that_sleeps_is_asleep_in_its_samples(tmp_path: Path) -> None:
    places = ran(tmp_path, program("gap = lambda: time.sleep(.01)\nsteps(120)\nprint('ok')", loose=0, brick=1))
    (between,) = [place for place in places if place.name == BETWEEN_STEPS]
    (longest, *_) = between.functions
    assert longest.name == "<lambda>"
    assert longest.asleep > 3  # not all of them, because after its sleep the thread may wait for a processor


@compiled
def test_time_before_the_first_step_is_not_between_steps(tmp_path: Path) -> None:
    body = f"""
def start():
    end = time.perf_counter() + 0.4
    while time.perf_counter() < end:
        with profiler.step("decode{WARM_UP}", 1):
            pass
        time.sleep(0.02)

start()
steps(140)
print("ok")
"""
    assert "start" not in names_at(ran(tmp_path, program(body)), BETWEEN_STEPS)
    assert "gap" in names_at(said_in(next(tmp_path.glob("*.catalog"))), BETWEEN_STEPS)


@compiled
def test_time_after_the_last_step_is_not_between_steps(tmp_path: Path) -> None:
    body = (
        "def after():\n    end = time.perf_counter() + 1.5\n    while time.perf_counter() < end:\n        pass\n"
        "steps(60)\nafter()\nprint('ok')"
    )
    names = names_at(ran(tmp_path, program(body, loose=0, brick=1)), BETWEEN_STEPS)
    assert "gap" in names
    assert "after" not in names


@compiled
@pytest.mark.parametrize(
    "body",
    [
        # Every handler of the host must run in its own main thread.
        "import signal, threading\nseen = []\n"
        "signal.signal(signal.SIGALRM, lambda *_: seen.append(threading.current_thread()))\n"
        "signal.setitimer(signal.ITIMER_REAL, .005, .005)\nsteps(60)\nsignal.setitimer(signal.ITIMER_REAL, 0)\n"
        "assert seen and set(seen) == {threading.main_thread()}\nprint('ok')",
        "sys.setswitchinterval(1e-6)\nsteps(60)\nassert sys.getswitchinterval() < 1e-5\nprint('ok')",
        # A thread of ours at a fork would be a warning from Python 3.12 on, which is an error here.
        "import threading\nsteps(60)\npid = os.fork()\nif not pid:\n    steps(5)\n    os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\nassert threading.enumerate() == [threading.main_thread()]\n"
        "steps(30)\nprint('ok')",
        "import asyncio\nasync def main():\n    for _ in range(30):\n"
        "        steps(1)\n        await asyncio.sleep(.002)\n"
        "asyncio.run(main())\nprint('ok')",
        "import threading\nworkers = [threading.Thread(target=steps, args=(40,)) for _ in range(3)]\n"
        "[worker.start() for worker in workers]\n[worker.join() for worker in workers]\nprint('ok')",
        "steps(60)\nprint('ok', flush=True)\nos._exit(0)",
        "import gevent\ndef task():\n    for _ in range(20):\n        steps(1)\n        gevent.sleep(.002)\n"
        "gevent.joinall([gevent.spawn(task) for _ in range(3)])\nprint('ok')",
    ],
    ids=["signals", "switch-interval", "fork", "asyncio", "threads", "exit", "gevent"],
)
def test_a_program_runs_and_ends_as_without_sampling(tmp_path: Path, body: str) -> None:
    ran(tmp_path, program(body, gap=2, loose=1, brick=1))


@compiled
def test_a_forked_child_samples_itself(tmp_path: Path) -> None:
    body = (
        "steps(60)\npid = os.fork()\nif not pid:\n    gap.__defaults__ = (6,)\n    steps(250)\n"
        "    recorder.close('done')\n    os._exit(0)\nassert os.waitpid(pid, 0)[1] == 0\nprint('ok')"
    )
    ran(tmp_path, program(body, loose=0, brick=1))
    both = [said_in(catalog) for catalog in tmp_path.glob("*.catalog")]
    assert len(both) == 2
    assert all(names_at(places, BETWEEN_STEPS) for places in both)


@compiled
def test_the_variable_switches_sampling_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBTOP_CPU_SAMPLES", "off")
    assert ran(tmp_path, program("steps(100)\nprint('ok')")) == []
