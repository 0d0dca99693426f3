"""Fixes the machine's pace (how long fixed work takes) in processes of `cbtop check` that a test starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Python imports this file when it starts. The file replaces the measurement of the machine's pace.
CUSTOMIZED = """
import sys

if "check" in sys.orig_argv:
    from cbtop.commands.shared import machine_pace
    from cbtop.comparison.runs import Pace

    machine_pace.machine_pace = lambda: Pace(1_000.0, 5_000.0)
"""


def set_steady_pace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the pace that processes measure if they start from now on.

    Python imports a replacement of the measurement from `folder` when it starts.
    """
    (folder / "sitecustomize.py").write_text(CUSTOMIZED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, sys.path)]))
