"""Real processes to watch: a small instrumented host, the daemon, the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CBTOP = [sys.executable, "-m", "cbtop"]

HOST = """
import sys, time
from cbtop import BrickProfiler, BrickId
profiler = BrickProfiler()
steps = int(sys.argv[1])
while steps:
    with profiler.step("decode", tokens=1):
        for layer in range(2):
            with profiler.layer(layer):
                with profiler.brick(BrickId.RMS_NORM, 64): pass
                with profiler.brick(BrickId.DOWN_PROJECTION, 64): time.sleep(0.0005)
    steps -= 1
"""
FOR_EVER = -1


@contextmanager
def host(steps: int = FOR_EVER) -> Iterator[subprocess.Popen[bytes]]:
    """A process that decodes `steps` steps of one millisecond."""
    with subprocess.Popen([sys.executable, "-c", HOST, str(steps)]) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def daemon(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon of its own, ready to be connected to."""
    with subprocess.Popen([*CBTOP, "daemon", *arguments], stderr=subprocess.PIPE) as process:
        assert process.stderr
        assert b"serving" in process.stderr.readline()
        try:
            yield process
        finally:
            process.terminate()


def cbtop(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end, with no terminal."""
    environment = os.environ | {"PYTHONWARNINGS": "error"}
    return subprocess.run(
        [*CBTOP, *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout_s,
        env=environment,
        check=False,
    )


def snapshot(*arguments: str) -> list[dict[str, Any]]:
    """The sources that `cbtop --headless --once --format json` prints."""
    done = cbtop("--headless", "--once", "--format", "json", *arguments)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["sources"]
    return found


def eventually(true: Callable[[], object], timeout_s: float = 10) -> None:
    """Wait until `true()`; fail when it does not come to pass."""
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(0.02)
