from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cbtop.commands.shared.elf_symbols import exported_symbols, mapped_files
from cbtop.commands.shared.traced_thread import TracedThread
from cbtop.errors import CbtopError
from tests.integration.hosts import DEADLINE_S

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the registers are those of x86-64"
)
# Prints the same sum twice: while this process stops the program again and again, and after that.
SUMS = """
import sys
def total():
    found = 0.0
    for number in range(2_000_000):
        found += number ** 0.5
    return found
print("begun", flush=True)
sums = {total() for _ in range(int(sys.argv[1]))}
sys.stdin.read()
print(sums == {total()})
"""
SLEEP = """
import signal, sys, time
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append("signal"))
print("begun", flush=True)
begun = time.monotonic()
time.sleep(0.5)
print("slept", time.monotonic() - begun >= 0.5, *seen)
"""
LOCKED = "import _thread\nlock = _thread.allocate_lock(); lock.acquire(); print('begun', flush=True); lock.acquire()"


@contextmanager
def program(source: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-X", "faulthandler", "-c", source, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        try:
            yield process
        finally:
            process.kill()


def function(pid: int, name: str) -> int:
    """Return the address of a function of the C library or of Python in the process `pid`."""
    for file in mapped_files(pid):
        if file.name.startswith(("python", "libpython", "libc.so", "ld-musl")):
            found = exported_symbols(file).addresses
            if name in found:
                return found[name]
    raise AssertionError(name)


def until(pid: int, state: str) -> None:
    """Wait until the process is in this state, as /proc shows it: S sleeps, T is suspended."""
    deadline_s = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_program_computes_the_same_while_it_is_stopped_and_called() -> None:
    with program(SUMS, "6") as process:
        initialized = function(process.pid, "Py_IsInitialized")
        for _ in range(40):
            with TracedThread(process.pid) as thread:
                assert thread.call(initialized) == 1
        assert process.communicate()[0] == "True\n"


def test_a_sleep_lasts_as_long_and_a_signal_meanwhile_arrives_after() -> None:
    with program(SLEEP) as process:
        with TracedThread(process.pid) as thread:
            os.kill(process.pid, signal.SIGUSR1)
            assert thread.call(function(process.pid, "getpid")) == process.pid
        assert process.communicate()[0] == "slept True signal\n"
        assert process.returncode == 0


def test_a_call_that_does_not_return_is_given_up() -> None:
    with program(SUMS, "2") as process:
        with pytest.raises(CbtopError, match="try again"), TracedThread(process.pid) as thread:
            thread.call(function(process.pid, "pause"))
        assert process.communicate()[0] == "True\n"


def test_a_call_that_fails_is_named_and_the_program_runs_on() -> None:
    with program(SUMS, "2") as process:
        with pytest.raises(CbtopError, match="failed by signal 11"), TracedThread(process.pid) as thread:
            thread.call(function(process.pid, "atoi"), 8)
        assert process.communicate()[0] == "True\n"


def test_a_thread_that_waits_for_a_lock_runs_pending_calls_if_woken(tmp_path: Path) -> None:
    source = f"open({str(tmp_path / 'ran')!r}, 'w').close()\0".encode()
    with program(LOCKED) as process:
        add, run = (function(process.pid, name) for name in ("Py_AddPendingCall", "PyRun_SimpleString"))
        until(process.pid, "S")
        with TracedThread(process.pid) as thread:
            page = thread.call(function(process.pid, "mmap"), 0, 4096, 3, 0x22, (1 << 64) - 1, 0)
            thread.write(page, source)
            assert thread.call(add, run, page) == 0
            thread.wake()
        deadline_s = time.monotonic() + DEADLINE_S
        while not (tmp_path / "ran").exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert (tmp_path / "ran").exists()
        assert process.poll() is None


def test_a_suspended_process_is_refused_and_stays_suspended() -> None:
    with program(SLEEP) as process:
        os.kill(process.pid, signal.SIGSTOP)
        until(process.pid, "T")
        with pytest.raises(CbtopError, match=f"kill -CONT {process.pid}"), TracedThread(process.pid):
            raise AssertionError
        until(process.pid, "T")
        os.kill(process.pid, signal.SIGCONT)
        assert process.communicate()[0] == "slept True\n"


def test_a_thread_that_another_process_traces_is_not_permitted() -> None:
    tracer = """
import sys
from cbtop.commands.shared.traced_thread import TracedThread
with TracedThread(int(sys.argv[1])):
    print("begun", flush=True)
    sys.stdin.read()
"""
    with program(SUMS, "1") as process, program(tracer, str(process.pid)) as debugger:
        with pytest.raises(PermissionError), TracedThread(process.pid):
            raise AssertionError
        debugger.communicate()
        assert process.communicate()[0] == "True\n"


def test_signals_of_this_process_wait_until_the_thread_runs_again() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        with program(SUMS, "1") as process:
            with TracedThread(process.pid):
                signal.raise_signal(signal.SIGUSR1)
                assert not seen
            assert seen == [signal.SIGUSR1]
            assert process.communicate()[0] == "True\n"
    finally:
        signal.signal(signal.SIGUSR1, before)
