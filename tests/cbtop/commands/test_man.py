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


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_a_command_has_its_name_usage_options_and_examples(name: str) -> None:
    done = cbtop("man", name)
    text, shown = done.stdout.replace("\\-", "-"), cbtop(name, "--help").stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert f".SH NAME\ncbtop-{name} - {COMMANDS[name]}\n.SH SYNOPSIS\ncbtop {name}" in text
    described = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", shown, re.MULTILINE)) - {"--help", "--version", "--debug"}
    assert [option for option in described if not re.search(rf"^\.B .*{option}\b", text, re.MULTILINE)] == []
    assert ("examples:" in text) == ("examples:" in shown)


def test_the_page_of_an_unknown_command_is_refused_with_the_nearest_one() -> None:
    done = cbtop("man", "rnu")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown command 'rnu'; did you mean run?" in done.stderr


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed")
@pytest.mark.parametrize(
    ("arguments", "text"), [([], "watch only this process"), (["run"], "cbtop-run"), (["keys"], "cbtop(1)")]
)
def test_man_shows_the_page(arguments: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "cbtop.1").write_text(cbtop("man", *arguments).stdout, encoding="utf-8")
    environment = {"MANWIDTH": "100", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        ["man", "--warnings", "-E", "UTF-8", "-l", str(tmp_path / "cbtop.1")],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    assert done.stderr == ""
    assert text in done.stdout
