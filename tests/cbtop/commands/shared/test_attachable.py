from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from shutil import which

import pytest

from cbtop.commands.shared import attachable as checks
from cbtop.commands.shared.attachable import attachable, not_permitted
from cbtop.errors import CbtopError, UsageError
from tests.cbtop.commands.shared.test_traced_thread import program, until
from tests.integration.hosts import host

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="cbtop attaches on Linux for x86-64"
)
WAIT = "import sys; print('begun', flush=True); sys.stdin.read()"


def refused(pid: int) -> str:
    with pytest.raises(CbtopError) as refusal:
        attachable(pid)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_a_python_without_torch_is_told_how_to_start() -> None:
    with program(WAIT) as process:
        assert refused(process.pid) == (
            f"process {process.pid} has not loaded torch; attach once it has, or start it by `cbtop run`"
        )


def test_a_python_with_the_library_of_torch_is_attachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "TORCH", "libc.so")
    with program(WAIT) as process:
        found = attachable(process.pid)
    assert set(found.functions) == {"Py_IsInitialized", "Py_AddPendingCall", "PyRun_SimpleString", "mmap"}


def test_a_program_that_is_no_python_is_named() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert "(sleep) is no Python process" in refused(process.pid)
        finally:
            process.kill()


def test_a_process_that_is_watched_already_is_named_with_its_view() -> None:
    with host() as process:
        said = ""
        while "watched already" not in said:  # its ring opens at its first record
            said = refused(process.pid)
        assert said == f"process {process.pid} is watched already: cbtop {process.pid}"


def test_an_ended_process_that_nobody_has_waited_for_is_refused() -> None:
    with subprocess.Popen(["true"]) as process:
        until(process.pid, "Z")
        assert f"process {process.pid} has ended" in refused(process.pid)


def test_a_suspended_process_is_told_how_to_continue() -> None:
    with program(WAIT) as process:
        os.kill(process.pid, signal.SIGSTOP)
        until(process.pid, "T")
        assert f"kill -CONT {process.pid}" in refused(process.pid)


def test_a_thread_is_refused_with_the_command_for_its_process() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        with pytest.raises(UsageError, match=f"cbtop attach {os.getpid()}$"):
            attachable(thread.native_id or 0)
    finally:
        ended.set()
        thread.join()


def test_this_process_and_one_that_does_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="is this cbtop"):
        attachable(os.getpid())
    largest = int(Path("/proc/sys/kernel/pid_max").read_text())
    assert f"there is no process {largest}" in refused(largest)


@pytest.mark.skipif(
    os.geteuid() != 0 or which("setpriv") is None, reason="only root may start another user's process"
)
def test_a_process_of_another_user_is_refused_with_the_command_for_that_user() -> None:
    command = ["setpriv", "--reuid", "65534", "--clear-groups", "sleep", "60"]
    with subprocess.Popen(command) as process:
        try:
            while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
                pass
            assert re.search(r"belongs to user (\S+): sudo -u \1 cbtop attach", refused(process.pid))
        finally:
            process.kill()


@pytest.mark.parametrize("disposition", ["signal.signal(signal.SIGSEGV, signal.SIG_IGN)",
                                         "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGSEGV])"])  # fmt: skip
def test_a_process_that_does_not_see_its_faults_is_refused(disposition: str) -> None:
    with program(f"import signal; {disposition}; {WAIT}") as process:
        assert "SIGSEGV" in refused(process.pid)


@pytest.mark.parametrize(("word", "version"), [(None, "older than 3.11"), (0x30E01F0, "3.14")])
def test_a_python_that_cbtop_does_not_support_is_named(
    word: int | None, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks.ExportedSymbols, "number", lambda *_: word)
    with program(WAIT) as process:
        assert f"runs Python {version}; cbtop supports" in refused(process.pid)


@pytest.mark.parametrize(
    ("scope", "way_out"),
    [
        ("0", "--cap-add SYS_PTRACE"),
        ("1", "kernel.yama.ptrace_scope=0"),
        ("3", "by `cbtop run`"),
        (None, "SYS_PTRACE"),
    ],
)
def test_a_kernel_that_permits_no_tracing_is_told_with_the_way_out(
    scope: str | None, way_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "SCOPE", tmp_path / "ptrace_scope")
    if scope is not None:
        (tmp_path / "ptrace_scope").write_text(f"{scope}\n")
    assert way_out in not_permitted(42)
