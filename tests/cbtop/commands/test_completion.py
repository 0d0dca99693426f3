"""`cbtop completion` prints a script that the shell accepts, and that knows every command."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

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


TYPED = {
    "repl": "replay",
    "export --form": "export --format",
    "export --format parq": "export --format parquet",
    "export run.cbtop --format parq": "export run.cbtop --format parquet",
    "replay ru": "replay run.cbtop",
    "run --report ru": "run --report run.cbtop",
    "keys li": "keys list",
    "--form": "--format",
}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_commands_options_and_files(tmp_path: Path) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed: pip install shtab")
    (tmp_path / "functions").mkdir()
    (tmp_path / "functions/_cbtop").write_text(cbtop("completion", "zsh").stdout)
    (tmp_path / "run.cbtop").touch()
    answers = tmp_path / "answers"
    (tmp_path / ".zshrc").write_text(
        "fpath=(~/functions $fpath); autoload -U compinit; compinit -u -D; "
        f'cbtop() {{ print -r -- "$*" >> {answers} }}; cbtop ready\n'
    )
    with on_terminal(["zsh", "-d", "-i"], tmp_path) as keyboard:
        for count, typed in enumerate(["", *TYPED]):
            if typed:
                keyboard.write(f"cbtop {typed}\t\r".encode())
            deadline_s = time.monotonic() + 30
            while not (answers.exists() and len(answers.read_text().splitlines()) > count):
                assert time.monotonic() < deadline_s, typed
                time.sleep(0.02)
    assert [line.rstrip() for line in answers.read_text().splitlines()] == ["ready", *TYPED.values()]


@contextmanager
def on_terminal(command: list[str], home: Path) -> Iterator[BinaryIO]:
    """Run a program on a terminal of its own. Yields its keyboard."""
    ours, theirs = pty.openpty()
    env = {"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb"}
    with open(ours, "r+b", buffering=0) as keyboard:
        with subprocess.Popen(
            command, cwd=home, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        ) as program:
            os.close(theirs)
            reader = threading.Thread(target=read_until_closed, args=[keyboard])
            reader.start()
            try:
                yield keyboard
            finally:
                program.kill()
        reader.join()


def read_until_closed(screen: BinaryIO) -> None:
    """Read what a program prints, so that it does not wait for its terminal."""
    with suppress(OSError):  # Linux reports the end of a terminal as an error
        while screen.read(1 << 16):
            pass


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_commands_options_and_files(tmp_path: Path) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed: pip install shtab")
    (tmp_path / "script").write_text(cbtop("completion", "fish").stdout)
    (tmp_path / "run.cbtop").touch()
    asked = "source script; for typed in $argv; complete -C $typed; end"
    done = subprocess.run(
        ["fish", "--no-config", "-c", asked, *(f"cbtop {typed}" for typed in TYPED)],
        cwd=tmp_path, env=os.environ | {"HOME": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [line.partition("\t")[0] for line in done.stdout.splitlines()] == [
        completed.rpartition(" ")[2] for completed in TYPED.values()
    ]


def test_without_shtab_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    done = cbtop("completion", "bash")
    expected = "cbtop: cbtop completion needs shtab; pip install 'cbtop[completion]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)
