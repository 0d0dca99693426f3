"""The fixture of tests that run pairs of programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.programs import Run


@pytest.fixture
def run(tmp_path: Path, runtime: Path) -> Run:
    """Return an object that runs a script as `faulty` or `healthy`."""
    return Run(tmp_path)
