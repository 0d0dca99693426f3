"""What a process is: its start time and its pid namespace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cbtop.protocol import process
from cbtop.protocol.process import boot_id, has_mapped, is_suspended, pid_namespace, process_start


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


def test_without_proc_what_is_known_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PROC", str(tmp_path / "none"))
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert (boot_id(), pid_namespace(), has_mapped(os.getpid(), tmp_path)) == ("", None, True)
    assert (process_start(os.getpid()), process_start(child.pid)) == (0, None)
