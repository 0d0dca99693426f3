"""Tests of `cbtop run --record` if the file already exists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_file_that_exists_is_kept_and_run_says_what_to_do(tmp_path: Path) -> None:
    there = tmp_path / "run.cbtop"
    there.write_text("mine")
    command = [sys.executable, "-m", "cbtop", "run", "--record", str(there), "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, there.read_text()) == (2, "mine")
    assert done.stderr == f"cbtop: {there} exists: choose another name, or remove it\n"
