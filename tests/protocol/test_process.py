"""What a process is: its start time and its pid namespace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cbtop.protocol import process
from cbtop.protocol.process import boot_id, has_mapped, pid_namespace, process_start


def test_a_process_knows_its_start_and_its_namespace() -> None:
    assert process_start(os.getpid())
    assert pid_namespace() == os.stat("/proc/self/ns/pid").st_ino


def test_without_proc_what_is_known_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PROC", str(tmp_path / "none"))
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert (boot_id(), pid_namespace(), has_mapped(os.getpid(), tmp_path)) == ("", None, True)
    assert (process_start(os.getpid()), process_start(child.pid)) == (0, None)
