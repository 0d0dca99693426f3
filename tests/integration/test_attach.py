"""`cbtop attach` with real processes that were started without cbtop. Their output is that of unwatched ones."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hosts import CBTOP, DEADLINE_S, cbtop

pytest.importorskip("torch", reason="torch is not installed: make torch")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="cbtop attaches on Linux for x86-64"
)

MODEL = """
import sys, threading, time, torch
torch.manual_seed(0)
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
    def forward(self, x):
        return x + self.down_proj(torch.relu(self.up_proj(x)))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x / x.norm()
net, x = Net(), torch.randn(4, 32)
"""
# Computes until stdin ends, and prints the value after every 100 steps. For each line of stdin, and at the end, the
# program prints what an attachment could have left behind.
LOOP = (
    MODEL
    + """
asked = []
def listen():
    asked.extend("state" for _ in sys.stdin)
    asked.append("end")
threading.Thread(target=listen, daemon=True).start()
path = list(sys.path)
print("begun", flush=True)
steps, question = 0, None
while question != "end":
    with torch.inference_mode():
        for _ in range(100):
            x = net(x)
    steps += 100
    print(steps, float(x.sum()).hex(), flush=True)
    question = asked.pop(0) if asked else None
    if question:
        names = [name for name in vars(sys.modules["__main__"]) if "cbtop" in name]
        call = vars(torch.nn.Module)["_compiled_call_impl"]
        print("left", call, sys.path == path, names, "cbtop" in sys.modules, flush=True)
"""
)
NOTHING_LEFT = "left None True [] True"
# The main thread waits for a thread that computes.
JOINED = (
    MODEL
    + """
def work():
    with torch.inference_mode():
        while True:
            net(x)
thread = threading.Thread(target=work, daemon=True)
thread.start()
print("begun", flush=True)
thread.join()
"""
)
# Greenlets of gevent instead of threads. Prints whether the main thread has loaded cbtop.
GREENLETS = (
    "from gevent import monkey\nmonkey.patch_all()\n"
    + MODEL
    + """
import gevent
native_id = monkey.get_original("_thread", "get_native_id")
loaded_in = []
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "cbtop.profiler.instrument.attachment":
            loaded_in.append(native_id())
sys.meta_path.insert(0, Finder())
ended = []
gevent.get_hub().threadpool.spawn(lambda: ended.append(sys.stdin.read()))
print("begun", flush=True)
with torch.inference_mode():
    while not ended:
        net(x)
        gevent.sleep(0.001)
print(len(loaded_in), native_id() in loaded_in)
"""
)
# A mapped file stands for torch, because `cbtop attach` only looks for the name of torch's library.
ASLEEP = """
import mmap, sys, threading, time
with open(LIBRARY, "rb") as file:
    library = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("begun", flush=True)
time.sleep(3)
print("slept", threading.active_count(), flush=True)
"""


@contextmanager
def bare(source: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", source]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        try:
            yield process
        finally:
            process.kill()


def test_an_attached_process_prints_the_same_also_if_its_viewer_is_killed(runtime: Path) -> None:
    values = []
    with bare(LOOP) as process:
        threads = threads_of(process.pid)
        for overhead in ("3%", "100%"):  # detached once, it can be attached again
            shown = cbtop(
                "attach", str(process.pid), "--headless", "--duration", "1", "--format", "json", "--timeout",
                f"{DEADLINE_S:g}", "--overhead", overhead,
            )  # fmt: skip
            assert shown.returncode == 0, shown.stderr
            assert f"process {process.pid} runs on without cbtop" in shown.stderr
            (source,) = json.loads(shown.stdout)["sources"]
            assert source["pid"] == process.pid
            assert {brick["name"] for brick in source["bricks"]} >= {"UpProjection", "DownProjection"}
            values += printed_until_it_tells_what_is_left(process)
        assert not [name for name in os.listdir(runtime) if name.startswith("attach-")]
        kill_a_viewer_of(process)
        deadline_s = time.monotonic() + DEADLINE_S
        while threads_of(process.pid) > threads and time.monotonic() < deadline_s:
            time.sleep(0.01)
        values += printed_until_it_tells_what_is_left(process)
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.close()
        output, errors = process.stdout.read(), process.stderr.read()
        process.wait(DEADLINE_S)
    *last, left = output.splitlines()
    assert (left, errors, process.returncode) == (NOTHING_LEFT, "", 0)
    values += last
    assert values == unwatched(len(values))


def printed_until_it_tells_what_is_left(process: subprocess.Popen[str]) -> list[str]:
    """Return the values that the loop has printed, and check that no attachment has left anything in the process."""
    assert process.stdin
    assert process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    values = []
    while not (line := process.stdout.readline()).startswith("left"):
        assert line
        values.append(line.rstrip("\n"))
    assert line == f"{NOTHING_LEFT}\n"
    return values


def kill_a_viewer_of(process: subprocess.Popen[str]) -> None:
    """Attach a viewer in a process of its own, and kill it."""
    viewer = subprocess.Popen(
        [*CBTOP, "attach", str(process.pid), "--headless", "--timeout", f"{DEADLINE_S:g}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert viewer.stderr is not None
    assert "attached to process" in viewer.stderr.readline()
    viewer.send_signal(signal.SIGKILL)
    viewer.communicate()


def unwatched(lines: int) -> list[str]:
    """Return the first lines that the loop prints if nothing watches it."""
    program: dict[str, Any] = {}
    exec(MODEL, program)
    net, x, found = program["net"], program["x"], []
    with program["torch"].inference_mode():
        for line in range(1, lines + 1):
            for _ in range(100):
                x = net(x)
            found.append(f"{100 * line} {float(x.sum()).hex()}")
    return found


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def test_a_model_in_another_thread_is_shown_while_the_main_thread_waits() -> None:
    with bare(JOINED) as process:
        shown = cbtop("attach", str(process.pid), "--headless", "--duration", "1", "--timeout", f"{DEADLINE_S:g}")
        assert shown.returncode == 0, shown.stderr
        assert "DownProjection" in shown.stdout


def test_under_gevent_a_thread_of_the_system_loads_cbtop() -> None:
    pytest.importorskip("gevent")
    with bare(GREENLETS) as process:
        shown = cbtop("attach", str(process.pid), "--headless", "--duration", "1", "--timeout", f"{DEADLINE_S:g}")
        assert shown.returncode == 0, shown.stderr
        assert "DownProjection" in shown.stdout
        assert process.communicate() == ("1 False\n", "")


def test_a_process_that_runs_no_python_code_in_time_stays_unattached(tmp_path: Path) -> None:
    library = tmp_path / "libtorch_python.so"
    library.write_bytes(b"x")
    with bare(ASLEEP.replace("LIBRARY", repr(str(library)))) as process:
        refused = cbtop("attach", str(process.pid), "--headless", "--timeout", "0.3")
        assert refused.returncode == 1
        assert refused.stderr == (
            f"cbtop: the main thread of process {process.pid} has run no Python code for 0.3 s, so nothing is "
            "attached: it sleeps or is in a long call; raise --timeout\n"
        )
        assert process.communicate() == ("slept 1\n", "")
        assert process.returncode == 0
