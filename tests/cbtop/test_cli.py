"""The command line explains itself, and refuses what it does not know."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import cbtop
from cbtop.cli import main
from cbtop.commands import COMMANDS, DEFAULT_COMMAND
from tests.integration.hosts import cbtop as run

ROOT = Path(__file__).parents[2]


def test_the_version_is_the_packages() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"cbtop {cbtop.__version__}\n")


def test_help_lists_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    for name, line in COMMANDS.items():
        assert f"{name:<13}{line}" in text
    assert "exit codes: 0 data seen" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert f"usage: cbtop {name}" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "others"), [("keys", set()), ("doctor", set()), ("ls", {"top", "replay"})])
def test_a_command_loads_no_other_that_it_has_no_use_for(name: str, others: set[str]) -> None:
    script = (
        f"import contextlib, sys; from cbtop.cli import main\n"
        f"with contextlib.suppress(SystemExit): main([{name!r}, '--help'])\n"
        "sys.stderr.write(' '.join(m for m in sys.modules if m.startswith('cbtop.commands.')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {module.removeprefix("cbtop.commands.") for module in done.stderr.split()}
    known = {command.replace("-", "_") for command in COMMANDS} | {DEFAULT_COMMAND}
    assert loaded & known == {name} | others


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nonsense"], "unrecognized arguments: nonsense"),
        (["--headless", "--timeout", "abc"], "'abc' is not a time"),
        (["--timeout", "nan"], "'nan' is not a time"),
        (["demo", "--steps", "x"], "'x' is not a number from 1 on"),
        (["demo", "--steps", "0"], "'0' is not a number from 1 on"),
        (["--interval", "9"], "'9' is not between 0.25 and 5"),
        (["daemon", "--bind", "udp://0.0.0.0:5555"], "tcp://HOST:PORT is wanted"),
    ],
)
def test_what_is_not_known_is_named_and_ends_with_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert complaint in capsys.readouterr().err


def test_every_public_name_is_there_and_importing_them_loads_nothing_heavy() -> None:
    script = (
        "import sys, cbtop\n"
        "names = {'numpy', 'zmq', 'numba', 'textual', 'rich', 'cupy', 'psutil', 'pynvml'}\n"
        "def heavy(): return {m.split('.')[0] for m in sys.modules} & names\n"
        "tensors = {'Fingerprints', 'ModelTracer'}  # these work on arrays\n"
        "compiled = {'measure_ceilings'}  # and this one is compiled\n"
        "assert all(getattr(cbtop, name) is not None for name in set(cbtop.__all__) - tensors - compiled)\n"
        "print(sorted(heavy()))\n"
        "assert all(getattr(cbtop, name) is not None for name in tensors)\n"
        "print(sorted(heavy()))\n"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n['numpy']\n"


def test_the_packages_that_are_shipped_are_those_on_disk() -> None:
    linked = ("compute", "profiler", "protocol")

    def name(init: Path) -> str:
        return ".".join(init.parent.relative_to(ROOT).parts)

    found = {f"cbtop.{name(init)}" for top in linked for init in (ROOT / top).rglob("__init__.py")}
    inside = (ROOT / "cbtop").rglob("__init__.py")
    found |= {name(init) for init in inside if init.relative_to(ROOT / "cbtop").parts[0] not in linked}
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(pyproject["tool"]["setuptools"]["packages"]) == found
