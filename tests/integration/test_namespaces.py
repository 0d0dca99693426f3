"""A process is alive as long as it is, in whatever pid namespace; forks and execs do not hide its end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cbtop.daemon.source import ALIVE_CHECK_S, Source
from cbtop.protocol.process import pid_namespace
from tests.integration.hosts import HOST, eventually

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child"]


def _refusal() -> str:
    """Why no pid namespace can be made here; empty when one can."""
    if shutil.which("unshare") is None:
        return "there is no unshare(1)"
    done = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


REFUSAL = _refusal()
needs_namespaces = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL or "a pid namespace can be made")


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


def ring_in(directory: Path) -> Path:
    eventually(lambda: list(directory.glob("*.ring")))
    (ring,) = directory.glob("*.ring")
    return ring


def state_after(source: Source, seconds: float) -> str:
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        source.poll()
        time.sleep(0.02)
    return source.state


def is_gone(source: Source) -> bool:
    source.poll()
    return source.state == "gone"


@needs_namespaces
def test_a_process_of_another_pid_namespace_is_live_until_it_is_killed(runtime: Path) -> None:
    with running(*UNSHARE, sys.executable, "-c", HOST, "-1") as outside:
        source = Source(ring_in(runtime))
        assert state_after(source, 3 * ALIVE_CHECK_S) == "live"
        assert source.hello is not None
        assert source.hello.pid == 1
        assert source.hello.pid_namespace != pid_namespace()
        assert source.state_message().received > 0
        outside.kill()  # and unshare(1) takes its child with it
        eventually(lambda: is_gone(source))


@needs_namespaces
def test_two_processes_with_one_pid_each_keep_files_of_their_own(runtime: Path) -> None:
    with running(*UNSHARE, sys.executable, "-c", HOST, "-1"), running(*UNSHARE, sys.executable, "-c", HOST, "-1"):
        eventually(lambda: len(list(runtime.glob("1-*.ring"))) == 2)
        sources = [Source(path) for path in runtime.glob("*.ring")]
        assert [state_after(source, 2 * ALIVE_CHECK_S) for source in sources] == ["live", "live"]
        assert len({source.key for source in sources}) == 2


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(0)", "os.execvp('sleep', ['sleep', '60'])"])
@pytest.mark.parametrize(
    "child",
    ["subprocess.Popen(['sleep', '60'])", "os.fork() or time.sleep(60)"],
    ids=["a child that became another program", "a forked child"],
)
def test_what_a_process_leaves_behind_does_not_pass_for_it(runtime: Path, child: str, end: str) -> None:
    script = f"""
import os, subprocess, time
from cbtop import BrickProfiler
profiler = BrickProfiler()
with profiler.brick("a"): pass
pid = os.getpid()
{child}
time.sleep(0.5)
if os.getpid() == pid: {end}
"""
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        source = Source(ring_in(runtime))
        source.poll()
        assert source.state == "live"
        eventually(lambda: is_gone(source))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
