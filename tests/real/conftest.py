"""The fixture `run` for tests of pairs of programs: a faulty program with a known problem, and a healthy program."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.programs import Run


@pytest.fixture
def run(tmp_path: Path, runtime: Path) -> Run:
    """Return an object that runs a script of the folder `scripts` in its faulty or healthy variant."""
    return Run(tmp_path)
