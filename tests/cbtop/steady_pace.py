"""A fixed machine pace for processes of `cbtop check` that a test starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Python imports this file when it starts.
CUSTOMIZED = """
import sys

if "check" in sys.orig_argv:
    from cbtop.commands.shared import machine_pace
    from cbtop.comparison.runs import Pace

    machine_pace.machine_pace = lambda: Pace(1_000.0, 5_000.0)
"""


def set_steady_pace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make processes that start from now on measure the same pace at all times."""
    (folder / "sitecustomize.py").write_text(CUSTOMIZED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, sys.path)]))
