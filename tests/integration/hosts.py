"""Starts real processes for tests: a small program with cbtop (a host), the daemon, and the command line."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import pytest

from cbtop.cli import main
from cbtop.commands import top
from cbtop.feeds.feed import Feed

# Time limit of all waits in tests. Even a slow, busy machine is faster, so a test that reaches it hangs.
DEADLINE_S = 300.0
PATIENTLY = ("--timeout", f"{DEADLINE_S:g}")

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

# A viewer: the command line, changed so that it writes a line to stderr when it has read new data with steps.
SEEING = """
import sys
from cbtop.cli import main
from cbtop.feeds.feed import Feed
poll = Feed.poll
def poll_and_say(feed, timeout_ms=0):
    poll(feed, timeout_ms)
    if not feed.links.unanswered and (view := feed.view()) and view.steps and view.bricks:
        print("seen", file=sys.stderr, flush=True)
Feed.poll = poll_and_say
sys.exit(main())
"""


@contextmanager
def host(steps: int = FOR_EVER) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that decodes `steps` steps of 1 ms each. By default it does not end."""
    with subprocess.Popen([sys.executable, "-c", HOST, str(steps)]) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def daemon(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a daemon process that is ready for connections."""
    with subprocess.Popen([*CBTOP, "daemon", *arguments], stderr=subprocess.PIPE) as process:
        assert process.stderr
        assert b"serving" in process.stderr.readline()
        try:
            yield process
        finally:
            process.terminate()


def cbtop(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line without a terminal in this process. A new process would take half a second."""
    said = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with redirect_stdout(said[0]), redirect_stderr(said[1]):
        try:
            code = main(list(arguments))
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    out, err = (text.buffer.getvalue().decode() for text in said)  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(["cbtop", *arguments], code, out, err)


def cbtop_apart(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a new process. Processes that it starts share its output."""
    return subprocess.run(
        [*CBTOP, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=DEADLINE_S,
        env=os.environ | {"PYTHONWARNINGS": "error"}, check=False,
    )  # fmt: skip


def once_answered(monkeypatch: pytest.MonkeyPatch, unanswered: int = 0) -> None:
    """Begin the countdown of `--timeout` only when all daemons, except `unanswered` of them, have answered."""
    real = top._wait_for_data

    def wait(feed: Feed, options: argparse.Namespace) -> None:
        eventually(lambda: feed.poll(20) or len(feed.links.unanswered) == unanswered)
        real(feed, options)

    monkeypatch.setattr(top, "_wait_for_data", wait)


def snapshot(*arguments: str) -> list[dict[str, Any]]:
    """Return the processes in the output of `cbtop --headless --once --format json`."""
    done = cbtop("--headless", "--once", "--window=all", *PATIENTLY, "--format", "json", *arguments)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["sources"]
    return found


def wait_until_seen(viewer: subprocess.Popen[Any]) -> None:
    """Wait until a viewer that was started with `SEEING` shows data and goes on to watch."""
    assert viewer.stderr
    seen = 0
    while seen < 3:  # The first of three lines only shows that the wait for data is over.
        line = viewer.stderr.readline()
        assert line, "it ended"
        seen += b"seen" in line if isinstance(line, bytes) else "seen" in line


@contextmanager
def nobody() -> Iterator[str]:
    """Yield an address that no process listens on. The address stays bound, so no other process can use it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{held.getsockname()[1]}"


def eventually(true: Callable[[], Any]) -> Any:
    """Wait until `true()` returns a true value, and return it. Fail after `DEADLINE_S`."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (found := true()):
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(0.02)
    return found
