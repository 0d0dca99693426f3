"""Real processes to watch: a small instrumented host, the daemon, the command line."""

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

DEADLINE_S = 300.0  # a machine may be slow and busy: only what hangs takes so long
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

# The command line, which says on stderr whenever it looks and there is a step to be seen.
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


def cbtop(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end, with no terminal, and in this process: to start one takes half a second."""
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
    """The same in a process of its own, whose output those it starts share."""
    return subprocess.run(
        [*CBTOP, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=DEADLINE_S,
        env=os.environ | {"PYTHONWARNINGS": "error"}, check=False,
    )  # fmt: skip


def once_answered(monkeypatch: pytest.MonkeyPatch, unanswered: int = 0) -> None:
    """Let --timeout of what prints once begin only when all daemons but `unanswered` have said what there is."""
    real = top._wait_for_data

    def wait(feed: Feed, options: argparse.Namespace) -> None:
        eventually(lambda: feed.poll(20) or len(feed.links.unanswered) == unanswered)
        real(feed, options)

    monkeypatch.setattr(top, "_wait_for_data", wait)


def snapshot(*arguments: str) -> list[dict[str, Any]]:
    """The sources that `cbtop --headless --once --format json` prints."""
    done = cbtop("--headless", "--once", "--window=all", *PATIENTLY, "--format", "json", *arguments)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["sources"]
    return found


def wait_until_seen(viewer: subprocess.Popen[Any]) -> None:
    """Until a viewer started with `SEEING` has what it would print, and watches on."""
    assert viewer.stderr
    seen = 0
    while seen < 3:  # the first ends the wait for data
        line = viewer.stderr.readline()
        assert line, "it ended"
        seen += b"seen" in line if isinstance(line, bytes) else "seen" in line


@contextmanager
def nobody() -> Iterator[str]:
    """An address where nobody answers, and nobody else can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{held.getsockname()[1]}"


def eventually(true: Callable[[], Any]) -> Any:
    """What `true()` gives as soon as that is true; fail when it does not come to pass."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (found := true()):
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(0.02)
    return found
