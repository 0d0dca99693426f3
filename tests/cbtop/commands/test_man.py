"""`cbtop man` prints a page with every command and option, in the language of man."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cbtop.commands import COMMANDS
from tests.integration.hosts import cbtop


@pytest.fixture(scope="module")
def page() -> str:
    done = cbtop("man")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_page_has_every_command_and_its_options(page: str) -> None:
    assert re.findall(r"^\.SS cbtop (.*)$", page, re.MULTILINE) == [name.replace("-", "\\-") for name in COMMANDS]
    signatures = [
        "--headless",
        "-i, --interval SEC",
        "--format {text,json,html}",
        "--guard [WHAT]",
        "-o, --output FILE",
    ]
    for signature in signatures:
        assert f".B {signature}\n" in page.replace("\\-", "-"), signature
    assert "beside" not in re.findall(r"^\.B (.*)$", page, re.MULTILINE)
    assert "seconds to wait for data (default: 5)" in page
    assert "%(default)s" not in page


def test_lines_that_begin_with_a_dot_are_requests_of_the_page(page: str) -> None:
    requests = {line.split()[0] for line in page.splitlines() if line.startswith(".")}
    assert requests == {".TH", ".SH", ".SS", ".TP", ".PP", ".B", ".I", ".br", ".nf", ".fi"}
    assert not [line for line in page.splitlines() if line.startswith("'")]


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed")
def test_man_shows_the_page(page: str, tmp_path: Path) -> None:
    (tmp_path / "cbtop.1").write_text(page, encoding="utf-8")
    environment = {"MANWIDTH": "100", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        ["man", "--warnings", "-E", "UTF-8", "-l", str(tmp_path / "cbtop.1")],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    assert done.stderr == ""
    assert "watch only this process" in done.stdout
