"""Tests of the command line: its help, and errors for unknown arguments."""

from __future__ import annotations

import errno
import os
import pty
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import cbtop
from cbtop import cli
from cbtop.cli import main
from cbtop.commands import COMMANDS, DEFAULT_COMMAND
from cbtop.reports import DEVICES, SOURCES, VIEWS
from cbtop.reports.text import SECTIONS
from cbtop.text import ascii_signs
from cbtop.tui.views.looks import CATEGORY_LOOKS
from tests.cbtop.help_examples import examples_of
from tests.integration.hosts import DEADLINE_S
from tests.integration.hosts import cbtop as run
from tests.representatives import first_by_default

ROOT = Path(__file__).parents[2]
ENDPOINT = "tcp://localhost:5555"  # This address replaces E1 and E2 in the examples of the help.
GOLDEN_TEXT = "".join(
    file.read_text(encoding="utf-8") for file in (ROOT / "tests/cbtop/tui/views/goldens").glob("[bcghrs]*.txt")
)


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


@pytest.mark.parametrize(
    ("name", "ends"),
    [("run", "-- COMMAND …"), ("check", "[-- COMMAND …]"), ("bisect", "-- COMMAND …"), ("replay", "FILE")],
)
def test_a_usage_line_ends_with_the_command_or_file(name: str, ends: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert capsys.readouterr().out.split("\n\n")[0].endswith(ends)


def test_help_is_as_wide_as_the_terminal_and_names_both_other_forms(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    for name in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        _, description, *_ = capsys.readouterr().out.split("\n\n")
        assert max(map(len, description.split("\n"))) <= 70
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert capsys.readouterr().out.startswith("usage: cbtop COMMAND …\n       cbtop FILE.cbtop …\n       cbtop [-h]")


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)], ids=lambda words: "".join(words) or "cbtop")
def test_help_prints_the_same_as_the_option(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for arguments in (["help", *words], [*words, "--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


def test_a_recording_by_itself_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    recording = str(ROOT / "tests/cbtop/imperfect.cbtop")
    texts = []
    for command in ([], ["replay"]):
        assert main([*command, recording, "--headless", "--source", "27614"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert "REPLAY of imperfect.cbtop" in texts[0]
    assert main(["no-such-file.cbtop", "--headless"]) == 2
    assert "no-such-file.cbtop: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in [*COMMANDS, DEFAULT_COMMAND] if examples_of(name)])
def test_each_example_in_a_commands_help_is_a_valid_command_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(f"cbtop.commands.{name.replace('-', '_')}.run", lambda options: seen.append(options) or 0)
    examples = examples_of(name)
    for words in examples:
        assert main([ENDPOINT if re.fullmatch("E[12]", word) else word for word in words]) == 0
    assert len(seen) == len(examples)


@first_by_default(("name", "others"), [("keys", set()), ("doctor", set()), ("ls", {"top", "replay"})])
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


def loaded_by(*arguments: str) -> set[str]:
    """Run a command line. Return which of the modules that load slowly are loaded at its end."""
    script = (
        f"import contextlib, sys; from cbtop.cli import main\n"
        f"with contextlib.suppress(SystemExit): main({list(arguments)!r})\n"
        "heavy = {'numpy', 'zmq', 'msgpack', 'rich', 'textual', 'psutil', 'pynvml', 'numba', 'cbtop.client.store',"
        " 'cbtop.viewmodels.source'}\n"
        "sys.stderr.write('loaded: ' + ' '.join(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.rpartition("loaded: ")[2].split())


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_who_asks_for_help_or_the_version_waits_for_no_numpy_and_no_zmq(argument: str) -> None:
    assert loaded_by(argument) == set()


def test_a_report_is_printed_without_the_screen(runtime: Path) -> None:
    loaded = loaded_by("--once", "--timeout", "0.1")
    assert "zmq" in loaded
    assert not loaded & {"rich", "textual", "numba"}


@pytest.mark.slow
def test_a_daemon_that_exports_nothing_loads_nothing_of_viewers() -> None:
    assert not loaded_by("daemon", "--help") & {"cbtop.client.store", "cbtop.viewmodels.source"}


@pytest.mark.slow
def test_a_dumb_terminal_gets_text(runtime: Path) -> None:
    ours, theirs = pty.openpty()
    arguments = [sys.executable, "-m", "cbtop", "--timeout", "0.1"]
    environment = os.environ | {"TERM": "dumb"}
    with subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        assert process.wait(DEADLINE_S) == 3
    said = os.read(ours, 1 << 16)
    os.close(ours)
    os.close(theirs)
    assert b"nothing is running" in said
    assert b"\x1b" not in said


def test_the_help_knows_every_section_of_a_report() -> None:
    assert (*SECTIONS, SOURCES, DEVICES) == VIEWS


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_lacks_is_written_in_ascii_of_the_same_width(encoding: str) -> None:
    said = "▏█▌ ─ µs ⣿⡀ ● ✓2 ␣ 注"
    written = said.encode(encoding, ascii_signs.ERRORS).decode(encoding)
    assert written.replace("µ", "u") == "|#| - us #. * +2 _ \\u6ce8"


@pytest.mark.parametrize(
    ("environment", "is_wanted"),
    [
        ({"LC_ALL": "C"}, True),
        ({"LC_ALL": "POSIX", "LANG": "en_US.UTF-8"}, True),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, True),  # Python sets LC_CTYPE to C.UTF-8 if it finds LANG=C.
        # Python has set LC_CTYPE, because the locale in LANG is not installed on this machine.
        ({"LANG": "de_DE.ISO-8859-1", "LC_CTYPE": "C.UTF-8"}, True),
        ({"LC_CTYPE": "C.UTF-8"}, False),  # Python sets LC_CTYPE to C.UTF-8 if it finds no locale.
        ({}, False),
        ({"LC_ALL": "C", "PYTHONUTF8": "1"}, False),
        ({"LC_ALL": "C", "PYTHONIOENCODING": "utf-8"}, False),
        ({"LANG": "de_DE.UTF-8@euro"}, False),
        ({"LANG": "de_DE.utf8"}, False),
        ({"LANG": "C.UTF-8"}, False),
    ],
)
def test_a_locale_without_utf_8_asks_for_ascii_and_none_at_all_for_nothing(
    environment: dict[str, str], *, is_wanted: bool
) -> None:
    assert ascii_signs.are_wanted(environment, is_utf8_mode=True) is is_wanted
    # Without UTF-8 mode, Python uses the encoding of the locale, so the variables do not decide.
    assert not ascii_signs.are_wanted(environment, is_utf8_mode=False)


def test_the_console_of_linux_gets_ascii() -> None:
    for is_utf8_mode in (False, True):
        assert ascii_signs.are_wanted({"TERM": "linux", "LANG": "de_DE.UTF-8"}, is_utf8_mode=is_utf8_mode)
    assert not ascii_signs.are_wanted({"TERM": "linux", "PYTHONIOENCODING": "utf-8"}, is_utf8_mode=False)


def test_an_error_without_a_file_name_does_not_blame_stdout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_options: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("cbtop.commands.doctor.run", fail)
    assert main(["doctor"]) == 1
    assert capfd.readouterr() == ("", "cbtop: Input/output error\n")


NO_MEMORY = """
from cbtop import cli
from cbtop.commands import doctor
def run(_): raise MemoryError
doctor.run = run
cli.main(["doctor"])
"""


@first_by_default(
    ("limit", "arguments", "said"),
    [
        ("-f 1", ["-m", "cbtop", "--help"], "standard output: File too large (ulimit -f allows 1 kB a file)"),
        (
            "-v 4000000",
            ["-c", NO_MEMORY],
            "there is not enough memory for that (ulimit -v allows 4,000,000 kB of addresses)",
        ),
    ],
)
def test_the_limit_that_was_reached_is_said(tmp_path: Path, limit: str, arguments: list[str], said: str) -> None:
    # Without -B, Python may write a file of bytecode that ends at the limit, and fail to read it later.
    shell = ["bash", "-c", f'ulimit {limit}; exec "$@"', "bash", sys.executable, "-B", *arguments]
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(shell, stdout=out, stderr=subprocess.PIPE, text=True, check=False, timeout=DEADLINE_S)
    assert done.stderr == f"cbtop: {said}\n"


def test_the_glyphs_of_categories_are_told_apart_in_ascii_too() -> None:
    glyphs = [look.glyph.encode("ascii", ascii_signs.ERRORS) for look in CATEGORY_LOOKS.values()]
    assert len(set(glyphs)) == len(glyphs)


def test_every_sign_of_ours_has_its_ascii() -> None:
    ours = {
        character
        for folder in ("tui", "reports")
        for file in (ROOT / "cbtop" / folder).rglob("*.py")
        for character in file.read_text(encoding="utf-8")
        if ord(character) > 127
    }
    missing = {sign for sign in ours | set(GOLDEN_TEXT) if ord(sign) > 127 and ord(sign) not in ascii_signs.SIGNS}
    assert missing == set()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nonsense"], "unknown command 'nonsense'; there are demo, run, attach, ls"),
        (["recrod"], "unknown command 'recrod'; did you mean record? there are demo"),
        (["hlep"], "unknown command 'hlep'; did you mean help? there are demo"),
        (["help", "recrod"], "unknown command 'recrod'; did you mean record? there are demo"),
        (["help", "record", "ls"], "unrecognized arguments: ls"),
        (["--fromat", "json"], "unrecognized arguments: --fromat json; did you mean --format?"),
        (["replay", "run.cbtop", "--sped=2"], "unrecognized arguments: --sped=2; did you mean --speed?"),
        (["export", "run.cbtop", "--format", "parket"], "invalid choice: 'parket'; did you mean parquet? (choose"),
        (["contracts", "lnt", "."], "invalid choice: 'lnt'; did you mean lint? (choose from 'lint')"),
        (["12", "--fromat"], "unrecognized arguments: --fromat; did you mean --format?"),
        (["demo", "12"], "unrecognized arguments: 12"),
        (["--once", "nonsense"], "unrecognized arguments: nonsense; commands come first: demo"),
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


def test_a_file_in_place_of_a_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("monday.cbtop", "train.py", "saved"):
        Path(name).touch()
    for word, said in (
        ("monday.cbtp", "monday.cbtp: No such file or directory; did you mean monday.cbtop?"),
        (str(tmp_path / "munday.cbto"), f"did you mean {tmp_path / 'monday.cbtop'}?"),
        ("train.py", "train.py is not a command, but a file; `cbtop run -- python train.py` watches it"),
        ("saved", "saved is not a command, but a file; `cbtop replay saved` shows a recording"),
        ("no/such", "unknown command 'no/such'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([word])
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["replay"], ["export", "--format", "csv"]])
def test_a_missing_recording_is_answered_with_the_nearest(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("monday.cbtop").touch()
    assert main([*command, "mondy.cbtop"]) == 2
    assert "mondy.cbtop: No such file or directory; did you mean monday.cbtop?" in capsys.readouterr().err
    assert main([*command, "another.cbtop"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_a_process_without_cbtop_is_answered_with_attach(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(os.getpid()), "--headless", "--once", "--timeout", "0.1"]) == 3
    assert f"`cbtop attach {os.getpid()}` instruments a Python process that runs" in capsys.readouterr().err


def test_a_pid_is_the_process_to_show(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._in_full(["12", "13", "--once"]) == ["--source=12", "--source=13", "--once"]
    assert main(["4194999", "--headless", "--once", "--timeout", "0.1"]) == 3
    assert main(["--source", "4194999", "--headless", "--once", "--timeout", "0.1"]) == 3
    first, second = capsys.readouterr().err.splitlines()
    assert first == second


def test_an_error_is_one_line_whatever_the_name_that_it_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "no\nsuch\x1b[2Jfile"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert r"no\nsuch\x1b[2Jfile" in said


@pytest.mark.parametrize(
    "arguments",
    [["demo", "--no\nsuch\x1b[2Joption"], ["demo", "--guard", "no\nsuch\x1b[2Joption"], ["no\nsuch\x1b[2Joption"],
     ["demo", "--s=no\nsuch\x1b[2Joption"], ["--timeout", "no\nsuch\x1b[2Joption"]],
)  # fmt: skip
def test_an_argument_that_is_not_known_is_one_line_whatever_it_is(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert r"no\nsuch\x1b[2Joption" in said.splitlines()[0]


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_a_usage_error_is_one_line_and_the_command_that_prints_the_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = " ".join(["cbtop", *([name] if name else [])])
    with pytest.raises(SystemExit, match="2"):
        main([*command.split()[1:], "--no-such-option"])
    error, way_out = capsys.readouterr().err.splitlines()
    assert error.startswith(f"{command}: error: ")
    assert way_out == f"try: {command} --help"


def test_every_public_name_is_there_and_importing_them_loads_nothing_heavy() -> None:
    script = (
        "import sys, cbtop\n"
        "names = {'numpy', 'zmq', 'numba', 'textual', 'rich', 'cupy', 'psutil', 'pynvml'}\n"
        "def heavy(): return {m.split('.')[0] for m in sys.modules} & names\n"
        "# these work on arrays\n"
        "tensors = {'BrickTuner', 'Fingerprints', 'ModelTracer', 'Recording', 'read', 'instrument', 'step'}\n"
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
