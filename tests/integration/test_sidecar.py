"""Tests of `profiler.serve`, which starts a daemon next to a program.

The daemon does no harm and ends with the program.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cbtop.feeds.feed import Feed
from cbtop.protocol.vocabulary import SourceStatus
from tests.integration.hosts import DEADLINE_S, HOST, eventually

SERVING = HOST.replace("profiler = BrickProfiler()\n", "profiler = BrickProfiler()\nprofiler.serve(sys.argv[2])\n")

# A program that calls `profiler.serve` and runs until it has read a line from stdin.
WAITING = """
import sys
from cbtop import BrickProfiler
profiler = BrickProfiler(); profiler.serve(sys.argv[1])
sys.stdin.readline(); print('went on')
"""


@pytest.fixture
def address(runtime: Path) -> str:
    """Return the path of a socket for the daemon. Another test could take a port."""
    return f"ipc://{runtime / 'sidecar.sock'}"


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@contextmanager
def started(*command: str, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a program that is always killed when the test ends. Its daemon ends with it."""
    with subprocess.Popen([sys.executable, "-c", *command], **options) as host:
        try:
            yield host
        finally:
            host.kill()


@pytest.mark.parametrize(
    "end", [signal.SIGKILL, *(pytest.param(end, marks=pytest.mark.slow) for end in (signal.SIGTERM, signal.SIGINT))]
)
def test_viewers_watch_through_it_and_it_ends_with_its_host(address: str, end: signal.Signals) -> None:
    with started(SERVING, "-1", address, stderr=subprocess.PIPE) as host, Feed([address]) as feed:
        eventually(lambda: feed.poll(50) or ((view := feed.view()) and view.steps))
        (sidecar,) = children_of(host.pid)
        host.send_signal(end)
        assert host.wait(DEADLINE_S) == -end
        eventually(lambda: feed.poll(50) or ((view := feed.view()) and view.state is not SourceStatus.LIVE))
        eventually(lambda: not is_running(sidecar))


@pytest.mark.slow
def test_whoever_reads_the_hosts_output_does_not_wait_for_the_sidecar(address: str) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with started(WAITING, address, **pipes, text=True) as host, Feed([address]) as feed:
        eventually(lambda: feed.poll(50) or not feed.links.unanswered)
        (sidecar,) = children_of(host.pid)
        os.kill(sidecar, signal.SIGSTOP)  # Stop the sidecar, so that it cannot end before its host.
        try:
            assert host.communicate("\n", timeout=DEADLINE_S)[0] == "went on\n"
            assert is_running(sidecar)
        finally:
            os.kill(sidecar, signal.SIGCONT)
        eventually(lambda: not is_running(sidecar))


@pytest.mark.slow
def test_an_address_that_is_taken_is_said_and_the_host_goes_on() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with started(WAITING, address, **pipes, text=True) as host:
            assert host.stderr
            assert address in host.stderr.readline()
            assert host.communicate("\n", timeout=DEADLINE_S) == ("went on\n", "")


def test_a_host_that_cannot_start_processes_is_told_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from cbtop.profiler.profiler import BrickProfiler

    def no_more(*_: object, **__: object) -> None:
        raise OSError(11, os.strerror(11))

    monkeypatch.setattr(subprocess, "Popen", no_more)
    BrickProfiler().serve("tcp://127.0.0.1:5555")
    (said,) = caplog.messages
    assert said == f"cbtop serves nothing at tcp://127.0.0.1:5555: [Errno 11] {os.strerror(11)}"
