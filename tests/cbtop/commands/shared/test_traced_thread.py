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

from cbtop.commands.shared import traced_thread
from cbtop.commands.shared.elf_symbols import exported_symbols, mapped_files
from cbtop.commands.shared.traced_thread import TracedThread, in_own_process
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

# Wait for a lock in C code that takes the end of its wait as the lock: a semaphore, and a mutex with priorities.
FOREIGN_LOCKS = {
    "semaphore": """
lock = ctypes.create_string_buffer(64)
def take(): return libc.sem_wait(lock)
def give(): libc.sem_post(lock)
""",
    "mutex": """
lock, kind = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
libc.pthread_mutexattr_init(kind)
libc.pthread_mutexattr_setprotocol(kind, 1)
libc.pthread_mutex_init(lock, kind)
owned, given = threading.Event(), threading.Event()
def own():
    libc.pthread_mutex_lock(lock)
    owned.set()
    given.wait()
    libc.pthread_mutex_unlock(lock)
threading.Thread(target=own).start()
owned.wait()
def take(): return libc.pthread_mutex_lock(lock)
give = given.set
""",
}
FOREIGN = """
import ctypes, sys, threading
libc = ctypes.CDLL(None)
is_given = False
{lock}
def end():
    global is_given
    sys.stdin.read()
    is_given = True
    give()
threading.Thread(target=end).start()
print("begun", flush=True)
print(take(), is_given)
"""
# Is killed while it calls a function in the program with this pid.
KILLED = """
import os, signal, sys, time
from cbtop.commands.shared import traced_thread
from tests.cbtop.commands.shared.test_traced_thread import function

pid, viewer = int(sys.argv[1]), os.getpid()
address = function(pid, "getpid")
returned = traced_thread.TracedThread._returned

def after_the_kill(thread):
    os.kill(viewer, signal.SIGKILL)
    time.sleep(0.2)
    return returned(thread)

def work():
    with traced_thread.TracedThread(pid) as thread:
        assert thread.call(address) == pid
    return 0.0

traced_thread.TracedThread._returned = after_the_kill
print("begun", flush=True)
traced_thread.in_own_process(work)
"""


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
            thread.wake(add)
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


@pytest.mark.parametrize("kind", FOREIGN_LOCKS)
def test_a_wait_for_a_lock_in_other_code_goes_on(kind: str) -> None:
    with program(FOREIGN.format(lock=FOREIGN_LOCKS[kind])) as process:
        until(process.pid, "S")
        for _ in range(5):
            with TracedThread(process.pid) as thread:
                thread.wake(function(process.pid, "Py_AddPendingCall"))
            time.sleep(0.02)
        assert process.communicate()[0] == "0 True\n"


def test_a_program_runs_on_if_the_viewer_is_killed_during_a_call() -> None:
    with program(SUMS, "3") as process:
        with program(KILLED, str(process.pid)) as viewer:
            assert viewer.wait(DEADLINE_S) == -signal.SIGKILL
        assert process.communicate()[0] == "True\n"
        assert process.returncode == 0


def test_a_call_that_computes_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    size_bytes = 1 << 27
    with program(SUMS, "1") as process:
        fill = function(process.pid, "memfrob")  # takes about 0.1 s
        monkeypatch.setattr(traced_thread, "CALL_WITHIN_S", 0.01)
        with TracedThread(process.pid) as thread:
            memory = thread.call(function(process.pid, "mmap"), 0, size_bytes, 3, 0x22, (1 << 64) - 1, 0)
            assert thread.call(fill, memory, size_bytes) == memory
        assert process.communicate()[0] == "True\n"


def test_an_error_in_the_process_that_traces_is_raised_here() -> None:
    def fail() -> float:
        raise CbtopError("no such thread")

    with pytest.raises(CbtopError, match=r"^no such thread$"):
        in_own_process(fail)
    assert in_own_process(lambda: 1.5) == 1.5
