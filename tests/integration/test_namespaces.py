"""Tests of whether a process counts as alive: exactly as long as it lives, in any pid namespace.

The tests include processes after fork and exec.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, product
from pathlib import Path

import pytest

from cbtop.daemon.liveness import ALIVE_CHECK_S
from cbtop.daemon.source import Source
from cbtop.protocol.ended import runs
from cbtop.protocol.process import pid_namespace, process_start
from tests.integration.hosts import HOST, eventually
from tests.representatives import each_value_once, first_by_default

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child"]


IN_ANOTHER_TIME = ["unshare", "--time", "--monotonic", "100000", "--boottime", "100000", "--fork", "--kill-child"]


def _refusal(command: list[str]) -> str:
    """Return why `command` cannot create a namespace here, or an empty string if it can."""
    if shutil.which("unshare") is None:
        return "there is no unshare(1)"
    done = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


REFUSAL, REFUSAL_OF_TIME = _refusal(UNSHARE), _refusal(IN_ANOTHER_TIME)
needs_namespaces = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL or "a pid namespace can be made")
needs_times = pytest.mark.skipif(bool(REFUSAL_OF_TIME), reason=REFUSAL_OF_TIME or "a time namespace can be made")


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


class Watched:
    """A process as a daemon sees it, with a fake clock.

    Before each poll, the clock advances to the daemon's next check of whether the process lives.
    """

    def __init__(self, ring: Path) -> None:
        ticks = count(0, 1.5 * ALIVE_CHECK_S)
        self.source = Source(ring, clock_s=lambda: next(ticks))

    def state_after(self, checks: int) -> str:
        for _ in range(checks):
            self.source.poll()
        return self.source.state


def is_gone(source: Source) -> bool:
    source.poll()
    return source.state == "gone"


@needs_namespaces
def test_a_process_of_another_pid_namespace_is_live_until_it_is_killed(runtime: Path) -> None:
    with running(*UNSHARE, sys.executable, "-c", HOST, "-1") as outside:
        watched = Watched(ring_in(runtime))
        source = watched.source
        assert watched.state_after(checks=5) == "live"
        eventually(lambda: source.poll() or source.state_message().received > 0)
        assert source.hello is not None
        assert source.hello.pid == 1
        assert source.hello.pid_namespace != pid_namespace()
        outside.kill()  # If unshare(1) is killed, its child is killed, too.
        eventually(lambda: is_gone(source))


@needs_namespaces
def test_two_processes_with_one_pid_each_keep_files_of_their_own(runtime: Path) -> None:
    with running(*UNSHARE, sys.executable, "-c", HOST, "-1"), running(*UNSHARE, sys.executable, "-c", HOST, "-1"):
        eventually(lambda: len(list(runtime.glob("1-*.ring"))) == 2)
        found = [Watched(path) for path in runtime.glob("*.ring")]
        assert [watched.state_after(checks=5) for watched in found] == ["live", "live"]
        assert len({watched.source.key for watched in found}) == 2


@needs_times
@pytest.mark.parametrize("locked", [True, False], ids=["locked", "without its lock"])
def test_a_process_of_another_time_namespace_is_live_until_killed(runtime: Path, locked: bool) -> None:
    without = "os.closerange(3, 100); " if not locked else ""
    script = (
        "import os, sys, time; from cbtop import BrickProfiler; profiler = BrickProfiler()\n"
        f"with profiler.brick('a'): pass\n{without}sys.stdin.read()"
    )
    with subprocess.Popen([*IN_ANOTHER_TIME, sys.executable, "-c", script], stdin=subprocess.PIPE) as outside:
        try:
            watched = Watched(ring_in(runtime))
            source = watched.source
            eventually(lambda: source.poll() or source.state_message().received > 0)
            assert watched.state_after(checks=5) == "live"
            pid, start = source.ring_path.stem.split("-")[:2]
            assert process_start(int(pid)) not in (None, int(start))
            assert runs(source.ring_path)
            outside.kill()
            eventually(lambda: is_gone(source))
            assert not runs(source.ring_path)
        finally:
            outside.kill()


@first_by_default(
    ("child", "end"),
    each_value_once(
        product(
            (
                "subprocess.Popen(['sleep', '3600'])",
                "os.fork() or time.sleep(3600)",
            ),  # After exec, the process with this pid runs another program.
            ("os.kill(os.getpid(), 9)", "os._exit(0)", "os.execvp('sleep', ['sleep', '3600'])"),
        )
    ),
)
def test_what_a_process_leaves_behind_does_not_pass_for_it(runtime: Path, child: str, end: str) -> None:
    script = f"""
import os, subprocess, sys, time
from cbtop import BrickProfiler
profiler = BrickProfiler()
with profiler.brick("a"): pass
pid = os.getpid()
{child}
sys.stdin.readline()
{end}
"""
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stdin=subprocess.PIPE)
    try:
        source = Source(ring_in(runtime))
        source.poll()
        assert source.state == "live"
        assert process.stdin
        process.stdin.write(b"\n")
        process.stdin.close()
        eventually(lambda: is_gone(source))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
