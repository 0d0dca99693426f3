"""`cbtop completion` prints a script that the shell accepts, and that knows every command."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cbtop.commands import COMMANDS
from cbtop.commands.completion import SHELLS
from tests.integration.hosts import cbtop


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_every_command_and_the_shell_accepts_it(shell: str, tmp_path: Path) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed: pip install shtab")
    done = cbtop("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert [name for name in COMMANDS if name not in done.stdout] == []
    assert "headless" in done.stdout
    if shutil.which(shell):
        script = tmp_path / "script"
        script.write_text(done.stdout)
        subprocess.run([shell, "-n", str(script)], check=True)


def test_bash_completes_commands_options_and_files(tmp_path: Path) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed: pip install shtab")
    (tmp_path / "script").write_text(cbtop("completion", "bash").stdout)
    (tmp_path / "run.cbtop").touch()
    asked = """
    source ./script
    answer() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _shtab_cbtop; echo "${COMPREPLY[*]}"; }
    answer cbtop repl
    answer cbtop export --form
    answer cbtop export run.cbtop --format parq
    answer cbtop replay run
    answer cbtop run --report run
    """
    done = subprocess.run(["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:5] == ["replay", "--format", "parquet", "run.cbtop", "run.cbtop"]


def test_without_shtab_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    done = cbtop("completion", "bash")
    expected = "cbtop: cbtop completion needs shtab; pip install 'cbtop[completion]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)
