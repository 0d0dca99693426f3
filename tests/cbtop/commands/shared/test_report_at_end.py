"""`cbtop run --report` writes an HTML report when the command has ended, and keeps its output and its exit code."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cbtop.cli import main
from tests.cbtop.reports.test_html import parsed
from tests.integration.hosts import CBTOP, DEADLINE_S, eventually

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


def test_the_report_is_named_last_and_the_command_keeps_its_code(tmp_path: Path) -> None:
    report = tmp_path / "run.html"
    done = run("--report", str(report), command=[sys.executable, "-c", PROGRAM])
    assert (done.returncode, done.stdout) == (7, "mine\n")
    assert done.stderr.splitlines()[-1] == f"cbtop: report: {report}"
    document = report.read_text(encoding="utf-8")
    parsed(document)
    assert "decode: 50 steps" in document
    assert "Mine</td>" in document
    assert os.listdir(tmp_path) == ["run.html"]


def test_with_record_there_is_the_recording_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, recording = tmp_path / "run.html", tmp_path / "run.cbtop"
    done = run("--record", str(recording), "--report", str(report), command=[sys.executable, "-c", PROGRAM])
    assert done.returncode == 7
    assert done.stderr.splitlines()[-1] == f"cbtop: report: {report}"
    assert f"cbtop: {recording}: " in done.stderr
    assert main(["export", str(recording), "--format", "html"]) == 0
    assert "decode: 50 steps" in capsys.readouterr().out


def test_the_report_has_no_process_that_another_run_has_started(tmp_path: Path) -> None:
    report, other, mine = tmp_path / "run.html", tmp_path / "other.py", tmp_path / "mine.py"
    other.write_text(STEPS)
    mine.write_text(STEPS)
    script = f"CBTOP_RUNS='run-1-2-3' {sys.executable} {other}; exec {sys.executable} {mine}"
    assert run("--report", str(report), command=["sh", "-c", script]).returncode == 0
    document = report.read_text(encoding="utf-8")
    assert "mine.py, pid" in document
    assert "other.py" not in document


def test_the_report_has_processes_of_a_run_inside_of_the_run(tmp_path: Path) -> None:
    report, inner = tmp_path / "run.html", tmp_path / "inner.py"
    inner.write_text(STEPS)
    done = run("--report", str(report), command=[*CBTOP, "run", "--quiet", "--", sys.executable, str(inner)])
    assert done.returncode == 0
    assert "inner.py, pid" in report.read_text(encoding="utf-8")


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


@pytest.mark.parametrize("options", [["--report"], ["--record"], ["--quiet", "--report"]])
def test_with_a_closed_stderr_the_command_runs_and_keeps_its_code(tmp_path: Path, options: list[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.replace("sys.exit(7)", "sys.exit(7 if sys.stderr is None else 1)"))
    file = tmp_path / ("run.html" if "--report" in options else "run.cbtop")
    line = shlex.join([*CBTOP, "run", *options, str(file), "--", sys.executable, str(script)])
    done = subprocess.run(f"{line} 2>&-", shell=True, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (7, b"mine\n")
    assert eventually(lambda: file.stat().st_size)
    assert sorted(os.listdir(tmp_path)) == sorted([file.name, "script.py"])


def test_a_signal_is_passed_on_to_the_command(tmp_path: Path) -> None:
    script = "trap 'exit 5' USR1; echo ready; while :; do sleep 0.05; done"
    words = [*CBTOP, "run", "--report", str(tmp_path / "run.html"), "--", "sh", "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)  # the terminal sends it to the command, so it is not passed on
        process.send_signal(signal.SIGUSR1)
        assert process.wait(DEADLINE_S) == 5


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
