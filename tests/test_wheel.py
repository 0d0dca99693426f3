"""Tests of `make wheel`: the command finds missing files and commands that fail. The tests build no wheel."""

from __future__ import annotations

import sys
import tomllib
import zipfile
from pathlib import Path

from tests.links import ROOT
from tests.wheel import failure, missing, source_files


def test_a_file_that_the_wheel_lacks_is_found(tmp_path: Path) -> None:
    present = sorted(source_files())
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        for name in present[1:]:
            archive.writestr(name, "")
    assert missing(tmp_path / "a.whl") == present[:1]


def test_data_files_are_in_folders_of_packages() -> None:
    """A folder without `__init__.py` looks like an unlisted package to setuptools, which then warns."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert set(tools["package-data"]) <= set(tools["packages"])
    assert [pattern for patterns in tools["package-data"].values() for pattern in patterns if "/" in pattern] == []
    assert "cbtop/telemetry/grafana-dashboard.json" in set(source_files())


def test_a_command_fails_by_its_exit_code_or_without_its_text(tmp_path: Path) -> None:
    def tried(program: str) -> str:
        return failure([sys.executable, "-c", program], "yes", tmp_path)

    assert tried("print('yes')") == ""
    assert "expected 'yes'\nno" in tried("print('no')")
    assert "exit code 3" in tried("print('yes'); raise SystemExit(3)")
