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
# Computes until stdin ends, and prints the value after every 100 steps.
LOOP = (
    MODEL
    + """
ended = []
threading.Thread(target=lambda: ended.append(sys.stdin.read()), daemon=True).start()
path = list(sys.path)
print("begun", flush=True)
steps = 0
with torch.inference_mode():
    while not ended:
        for _ in range(100):
            x = net(x)
        steps += 100
        print(steps, float(x.sum()).hex(), flush=True)
names = [name for name in vars(sys.modules["__main__"]) if "cbtop" in name]
print(vars(torch.nn.Module)["_compiled_call_impl"], sys.path == path, names, "cbtop" in sys.modules)
"""
)
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
ASLEEP = MODEL + "print('begun', flush=True)\ntime.sleep(3)\nprint('slept', threading.active_count(), flush=True)\n"


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


def test_an_attached_process_is_shown_and_prints_what_it_would_have(runtime: Path) -> None:
    with bare(LOOP) as process:
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
        assert not [name for name in os.listdir(runtime) if name.startswith("attach-")]
        output, errors = process.communicate()
    *values, left = output.splitlines()
    assert (errors, process.returncode) == ("", 0)
    assert values == unwatched(len(values))
    assert left == "None True [] True"


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


def test_a_killed_viewer_leaves_the_process_as_it_was() -> None:
    with bare(LOOP) as process:
        threads = threads_of(process.pid)
        viewer = subprocess.Popen(
            [*CBTOP, "attach", str(process.pid), "--headless", "--timeout", f"{DEADLINE_S:g}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert viewer.stderr is not None
        assert "attached to process" in viewer.stderr.readline()
        viewer.send_signal(signal.SIGKILL)
        viewer.communicate()
        deadline_s = time.monotonic() + DEADLINE_S
        while threads_of(process.pid) > threads and time.monotonic() < deadline_s:
            time.sleep(0.01)
        output, errors = process.communicate()
        assert output.splitlines()[-1] == "None True [] True"
        assert (errors, process.returncode) == ("", 0)


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


def test_a_process_that_runs_no_python_code_in_time_stays_unattached() -> None:
    with bare(ASLEEP) as process:
        refused = cbtop("attach", str(process.pid), "--headless", "--timeout", "0.3")
        assert refused.returncode == 1
        assert refused.stderr == (
            f"cbtop: the main thread of process {process.pid} has run no Python code for 0.3 s, so nothing is "
            "attached: it sleeps or is in a long call; raise --timeout\n"
        )
        assert process.communicate() == ("slept 1\n", "")
        assert process.returncode == 0
