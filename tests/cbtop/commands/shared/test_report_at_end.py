"""`cbtop run --report` writes an HTML report when the command has ended, and keeps its output and its exit code."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.commands.shared.report_at_end import _next_to_pass_on
from tests.cbtop.reports.test_html import parsed
from tests.integration.hosts import CBTOP, DEADLINE_S, eventually
from tests.representatives import first_by_default

PROGRAM = """
import sys
from cbtop import BrickProfiler

profiler = BrickProfiler()
for _ in range(50):
    with profiler.step("decode", tokens=1), profiler.layer(0), profiler.brick("Mine", elements=1):
        pass
print("mine")
sys.exit(7)
"""

STEPS = PROGRAM.replace("sys.exit(7)", "")


def run(*options: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    words = [*CBTOP, "run", *options, "--", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_the_report_is_named_last_the_recording_is_there_and_the_code_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, recording = tmp_path / "run.html", tmp_path / "run.cbtop"
    done = run("--record", str(recording), "--report", str(report), command=[sys.executable, "-c", PROGRAM])
    assert (done.returncode, done.stdout) == (7, "mine\n")
    assert done.stderr.splitlines()[-1] == f"cbtop: report: {report}"
    assert f"cbtop: {recording}: " in done.stderr
    document = report.read_text(encoding="utf-8")
    parsed(document)
    assert "decode: 50 steps" in document
    assert "Mine</td>" in document
    assert sorted(os.listdir(tmp_path)) == ["run.cbtop", "run.html"]
    assert main(["export", str(recording), "--format", "html"]) == 0
    assert "decode: 50 steps" in capsys.readouterr().out


def test_the_report_has_processes_of_runs_inside_and_none_of_other_runs(tmp_path: Path) -> None:
    report, other, inner, mine = (tmp_path / name for name in ("run.html", "other.py", "inner.py", "mine.py"))
    for program in (other, inner, mine):
        program.write_text(STEPS)
    script = (
        f"CBTOP_RUNS='run-1-2-3' {sys.executable} {other}; "
        f"{shlex.join([*CBTOP, 'run', '--quiet', '--', sys.executable, str(inner)])}; exec {sys.executable} {mine}"
    )
    assert run("--report", str(report), command=["sh", "-ec", script]).returncode == 0
    document = report.read_text(encoding="utf-8")
    assert "mine.py, pid" in document
    assert "inner.py, pid" in document
    assert "other.py" not in document


def test_a_signal_ends_both_and_without_steps_there_is_no_report(tmp_path: Path) -> None:
    report = tmp_path / "run.html"
    done = run("--report", str(report), command=["sh", "-c", "kill -TERM $$"])
    assert done.returncode == -signal.SIGTERM
    assert done.stderr == f"cbtop: {report} is not written: no process of the command has recorded a step\n"
    assert not report.exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no disk that is always full")
def test_where_nothing_can_be_printed_the_report_is_written(tmp_path: Path) -> None:
    report = tmp_path / "run.html"
    words = [*CBTOP, "run", "--report", str(report), "--", sys.executable, "-c", PROGRAM]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=full, timeout=DEADLINE_S, check=False)
    assert done.returncode == 7
    assert "decode: 50 steps" in report.read_text(encoding="utf-8")


@first_by_default("options", [["--report"], ["--record"], ["--quiet", "--report"]], 2)
def test_with_a_closed_stderr_the_command_runs_and_keeps_its_code(tmp_path: Path, options: list[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.replace("sys.exit(7)", "sys.exit(7 if sys.stderr is None else 1)"))
    file = tmp_path / ("run.html" if "--report" in options else "run.cbtop")
    line = shlex.join([*CBTOP, "run", *options, str(file), "--", sys.executable, str(script)])
    done = subprocess.run(f"{line} 2>&-", shell=True, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (7, b"mine\n")
    assert eventually(lambda: file.stat().st_size)
    assert sorted(os.listdir(tmp_path)) == sorted([file.name, "script.py"])


COUNTER = """
import signal, sys
from threading import Event

seen, ended = [], Event()
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, lambda number, _: seen.append(number))
signal.signal(signal.SIGUSR1, lambda *_: ended.set())
print("ready", flush=True)
ended.wait()
sys.exit(len(seen))
"""


@pytest.mark.parametrize("ignores_ended", [False, True])
def test_signals_of_processes_are_passed_on_to_the_command(tmp_path: Path, ignores_ended: bool) -> None:
    words = [*CBTOP, "run", "--report", str(tmp_path / "run.html"), "--", sys.executable, "-c", COUNTER]
    usual = signal.signal(signal.SIGCHLD, signal.SIG_IGN) if ignores_ended else signal.SIG_DFL
    try:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGCHLD, usual)
    with process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1):
            process.send_signal(number)
        assert process.wait(DEADLINE_S) == 3


def test_ctrl_c_reaches_the_command_once(tmp_path: Path) -> None:
    words = [*CBTOP, "run", "--report", str(tmp_path / "run.html"), "--", sys.executable, "-c", COUNTER]
    child, terminal = pty.fork()
    if not child:
        os.execvp(words[0], words)
    try:
        with open(os.dup(terminal), "rb", buffering=0) as output:
            shown = b""
            while b"ready" not in shown:
                shown += output.read(1)
        os.write(terminal, b"\x03")  # Ctrl-C
        time.sleep(1)  # until a second one would have arrived
        os.kill(child, signal.SIGUSR1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    finally:
        os.close(terminal)


def test_without_the_sender_only_signals_of_no_terminal_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "sigwaitinfo")
    passed = iter([signal.SIGINT, signal.SIGCHLD, signal.SIGTERM])
    monkeypatch.setattr(signal, "sigwait", lambda _: next(passed))
    assert [_next_to_pass_on() for _ in range(3)] == [None, None, signal.SIGTERM]


@pytest.mark.parametrize(
    ("name", "said"),
    [("there.html", "there.html exists: choose another name"), ("no/run.html", "No such file or directory")],
)
def test_a_file_that_cannot_be_created_ends_it_before_the_command(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "there.html").write_text("mine")
    done = run("--report", str(tmp_path / name), command=["touch", str(tmp_path / "ran")])
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "there.html").read_text() == "mine"


def test_the_screen_and_a_report_at_the_end_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--watch", "--report", "run.html", "--", "true"]) == 2
    assert "--report and --watch exclude each other" in capsys.readouterr().err
