"""Measure how cbtop's faults affect the host process: the p99 of its steps, compared with that of an unwatched host.
Both take turns.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.base import Figure, Ratio

TURN_S = 0.2
TURNS = 40
# The program of the host process. For each line that it reads, it runs steps of the same work for TURN_S and prints
# their p99 time.
HOST = """
import hashlib, sys, time
from cbtop import BrickId, BrickProfiler
profiler, data = BrickProfiler(), bytes(1 << 16)
def turn():
    times, end = [], time.perf_counter() + float(sys.argv[1])
    while time.perf_counter() < end:
        begun = time.perf_counter_ns()
        with profiler.step("decode", tokens=1):
            for layer in range(2):
                with profiler.layer(layer):
                    with profiler.brick(BrickId.RMS_NORM, 64): pass
                    with profiler.brick(BrickId.DOWN_PROJECTION, 64): hashlib.sha256(data).digest()
        times.append(time.perf_counter_ns() - begun)
    return sorted(times)[len(times) * 99 // 100]
turn()
print("up", flush=True)
for line in sys.stdin:
    print(turn(), flush=True)
print(time.monotonic_ns(), flush=True)
"""
VIEWER = "from cbtop.feeds.feed import Feed\nfeed = Feed()\nwhile True: feed.poll(50)"


class Scene:
    """A host process that cbtop watches, with a daemon and a viewer."""

    def __init__(self, directory: Path, running: ExitStack) -> None:
        self.directory = directory
        self._running = running
        self.host = self._start("-c", HOST, str(TURN_S), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.daemon = self.start_daemon()
        self.viewer = self._start("-c", VIEWER)

    def start_daemon(self) -> subprocess.Popen[str]:
        self.daemon = self._start("-m", "cbtop", "daemon", stderr=subprocess.PIPE)
        assert self.daemon.stderr
        self.daemon.stderr.readline()
        return self.daemon

    def _start(self, *arguments: str, **pipes: int) -> subprocess.Popen[str]:
        environment = os.environ | {"CBTOP_RUNTIME_DIR": str(self.directory)}
        process = subprocess.Popen([sys.executable, *arguments], text=True, env=environment, **pipes)  # type: ignore[call-overload]
        self._running.enter_context(process)
        self._running.callback(process.kill)
        return process  # type: ignore[no-any-return]


def nothing(scene: Scene) -> None:
    """Cause no fault: the host is only watched."""


def stop_the_viewer(scene: Scene) -> None:
    scene.viewer.send_signal(signal.SIGSTOP)


def kill_the_viewer(scene: Scene) -> None:
    scene.viewer.kill()


def stop_the_daemon(scene: Scene) -> None:
    scene.daemon.send_signal(signal.SIGSTOP)


def restart_the_daemon(scene: Scene) -> None:
    scene.daemon.kill()
    scene.daemon.wait()
    scene.viewer.kill()
    scene.start_daemon()


def fill_the_directory(scene: Scene) -> None:
    for number in range(500):
        (scene.directory / f"{number}-1-0.ring").write_bytes(b"no ring")


FAULTS: dict[str, Callable[[Scene], None]] = {
    "watched": nothing,
    "viewer stopped": stop_the_viewer,
    "viewer killed": kill_the_viewer,
    "daemon stopped": stop_the_daemon,
    "daemon killed and restarted": restart_the_daemon,
    "500 files that are no rings": fill_the_directory,
}


def run() -> list[Figure]:
    return [figure for name, fault in FAULTS.items() for figure in measured(name, fault)]


def measured(name: str, fault: Callable[[Scene], None]) -> list[Figure]:
    with ExitStack() as running:
        scene = Scene(Path(running.enter_context(tempfile.TemporaryDirectory(prefix="cbtop-"))), running)
        alone = running.enter_context(unwatched())
        for host in (scene.host, alone):
            answer(host)
        fault(scene)
        watched_ns, alone_ns = [], []
        for turn in range(TURNS):
            found = {}
            for host in (scene.host, alone) if turn % 2 else (alone, scene.host):
                found[host] = int(ask(host))
            watched_ns.append(found[scene.host])
            alone_ns.append(found[alone])
        assert scene.host.stdin
        scene.host.stdin.close()
        ended_ns = int(answer(scene.host))
        scene.host.wait()
        left_ms = (time.monotonic_ns() - ended_ns) / 1e6
    p99_us, ratio = statistics.median(watched_ns) / 1e3, Ratio.of(watched_ns, alone_ns)
    return [
        Figure(f"host, {name}: p99 of a step", p99_us, "µs", "unwatched", ratio),
        Figure(f"host, {name}: gone after its own end", left_ms, "ms"),
    ]


@contextmanager
def unwatched() -> Iterator[subprocess.Popen[str]]:
    """Start a host process with a directory of its own that no daemon reads."""
    with tempfile.TemporaryDirectory(prefix="cbtop-") as directory:
        environment = os.environ | {"CBTOP_RUNTIME_DIR": directory}
        command = [sys.executable, "-c", HOST, str(TURN_S)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            yield process
            process.kill()


def ask(host: subprocess.Popen[str]) -> str:
    """Let `host` run steps for one turn. Returns the p99 time of its steps."""
    assert host.stdin
    host.stdin.write("\n")
    host.stdin.flush()
    return answer(host)


def answer(host: subprocess.Popen[str]) -> str:
    assert host.stdout
    return host.stdout.readline()
