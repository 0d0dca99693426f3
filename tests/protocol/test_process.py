"""Tests of the start time and the pid namespace of a process, which tell whether a pid was reused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cbtop.protocol import process
from cbtop.protocol.process import boot_id, has_mapped, is_running, is_suspended, pid_namespace, process_start


def test_a_process_knows_its_start_and_its_namespace() -> None:
    assert process_start(os.getpid())
    assert pid_namespace() == os.stat("/proc/self/ns/pid").st_ino


def test_a_process_that_a_signal_has_stopped_is_suspended_until_it_goes_on() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not is_suspended(child.pid)
        child.send_signal(signal.SIGSTOP)
        while not is_suspended(child.pid):
            time.sleep(0.01)
        child.send_signal(signal.SIGCONT)
        while is_suspended(child.pid):
            time.sleep(0.01)
        child.kill()
    assert not is_suspended(child.pid)


@pytest.mark.parametrize(
    ("start", "time_namespace", "runs"),
    [
        (400, "ours", True),
        (900, "ours", False),  # Another process has this pid now.
        (900, "another", True),  # Start times differ between time namespaces, so this may be the same process.
        (900, "hidden", False),
        (900, "none", False),
        (None, "another", False),
    ],
)
def test_start_times_identify_processes_except_in_another_time_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int | None, time_namespace: str, runs: bool
) -> None:
    monkeypatch.setattr(process, "_PROC", str(tmp_path))
    for name in ("self", "7"):
        (tmp_path / name / "ns").mkdir(parents=True)
    (tmp_path / "self" / "stat").touch()
    if time_namespace != "none":  # The file is missing, as before Linux 5.6, which had no time namespaces.
        (tmp_path / "self" / "ns" / "time").touch()
    if time_namespace == "ours":
        os.link(tmp_path / "self" / "ns" / "time", tmp_path / "7" / "ns" / "time")
    elif time_namespace == "another":
        (tmp_path / "7" / "ns" / "time").touch()
    if start is not None:
        (tmp_path / "7" / "stat").write_text(f"7 (a b) S {'0 ' * 18}{start} 0")
    assert is_running(7, 400) == runs


def test_without_proc_what_is_known_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PROC", str(tmp_path / "none"))
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert (boot_id(), pid_namespace(), has_mapped(os.getpid(), tmp_path)) == ("", None, True)
    assert (process_start(os.getpid()), process_start(child.pid)) == (0, None)
