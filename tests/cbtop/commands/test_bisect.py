"""Tests of `cbtop bisect` with real git repositories, worktrees and processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.commands.bisect import estimate
from tests.cbtop.commands.made_repository import (
    AS_FAST,
    BENCH,
    GUILTY,
    SLOWER,
    MadeRepository,
    bench_repository,
    made_repository,
    state_of_checkout,
)
from tests.representatives import first_by_default

COMMAND = ("--", sys.executable, "bench.py")
BROKEN = "raise SystemExit('no bench today')\n"
DEADLINE_S = 600.0  # This bisection takes up to 120 s on a busy machine.


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a new folder for temporary files, so that the test sees the worktrees in it. Returns the folder."""
    found = tmp_path / "tmp"
    found.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(found))
    monkeypatch.setenv("TMPDIR", str(found))
    return found


def bisect(*arguments: object) -> int:
    return main(["bisect", *map(str, arguments)])


@contextmanager
def dirty(repository: MadeRepository) -> Iterator[None]:
    """Change the user's checkout in every way. Check afterwards that these changes are still there."""
    (repository.at / "bench.py").write_text("raise SystemExit('uncommitted')\n")
    (repository.at / "staged.py").write_text("1\n")
    repository.git("add", "staged.py")
    (repository.at / "untracked.py").write_text("2\n")
    hook = repository.at / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {repository.at}/hooked\n")
    hook.chmod(0o755)
    before = state_of_checkout(repository)
    yield
    assert state_of_checkout(repository) == before


def test_the_slower_commit_is_named_and_the_checkout_stays_as_it_was(
    runtime: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    repository, commits = bench_repository(tmp_path / "repository", [AS_FAST, SLOWER])
    monkeypatch.chdir(repository.at)
    with dirty(repository):
        # In a hook, git sets these variables. They must not lead the bisection into another repository.
        with monkeypatch.context() as hook:
            hook.setenv("GIT_INDEX_FILE", str(repository.at / ".git" / "index"))
            hook.setenv("GIT_DIR", str(repository.at / ".git"))
            assert bisect("HEAD~1", "main", *COMMAND) == 4
        said = capfd.readouterr()
        assert said.out.startswith(f"first bad commit: {commits[1][:10]} commit 1\n")
        assert f"breaks {GUILTY}: 1.50" in said.out
        assert "cbtop: 1 commit from GOOD to BAD: 11 to 34 runs, at most 60 min (--limit)\n" in said.err
        assert "so all of them take about " in said.err
        assert list(temporary.iterdir()) == []
        # A second bisection with the same command reuses the stored runs.
        begun_s = time.monotonic()
        assert bisect(commits[0], commits[1], "--format", "json", *COMMAND) == 4
        assert time.monotonic() - begun_s < DEADLINE_S
        said = capfd.readouterr()
        assert "cbtop: 9 runs kept from before (--restart removes them)" in said.err
        assert "recording" not in said.err
    found = json.loads(said.out)
    assert (found["schema"], found["end"], found["runs"]) == ("cbtop.bisect/1", "found", 9)
    assert (found["first_bad"]["name"], found["good"]["name"]) == (commits[1], commits[0])
    assert [one["guilty"] for one in found["broken"]] == [GUILTY] * 3


@pytest.mark.slow
def test_the_estimate_counts_only_runs_that_are_not_kept(
    runtime: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    repository, commits = bench_repository(tmp_path / "repository", [AS_FAST, SLOWER])
    monkeypatch.chdir(repository.at)
    assert bisect(*commits, *COMMAND) == 4
    next(repository.at.glob(".git/cbtop-bisect/*/*/round-3.json")).unlink()
    monkeypatch.setattr(
        "cbtop.commands.bisect.estimate", lambda run_s, low_min, *_: f"{60 * low_min / run_s:.0f} runs"
    )
    assert bisect(*commits, *COMMAND) == 4
    assert "cbtop: 5 runs\n" in capfd.readouterr().err  # The bisection needs 11 runs and 6 are stored, so 5 are left.


@pytest.mark.slow
def test_the_first_of_ten_commits_is_found_with_one_that_does_not_run(
    runtime: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    programs = [AS_FAST] * 5 + [BROKEN] + [AS_FAST] + [SLOWER] * 3
    repository, commits = bench_repository(tmp_path / "repository", programs)
    monkeypatch.chdir(repository.at)
    with dirty(repository):
        assert bisect(commits[0], "HEAD", "--format", "json", *COMMAND) == 4
    said = capfd.readouterr()
    found = json.loads(said.out)
    assert found["first_bad"]["name"] == commits[7]
    assert found["broken"][0]["guilty"] == GUILTY
    verdicts = {one["commit"]["name"]: one["verdict"] for one in found["commits"]}
    assert {verdicts[commit] for commit in commits[7:] if commit in verdicts} == {"bad"}
    assert verdicts.get(commits[5], "skipped") == "skipped"
    assert found["commits"][-1]["base"] == commits[6]
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_commits_that_do_not_build_are_skipped_with_the_builds_last_line(
    runtime: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    repository = made_repository(tmp_path / "repository")
    bench = f"from built import SLOWER\n{BENCH}"
    sources = [AS_FAST, AS_FAST, "", SLOWER, SLOWER]
    commits = [
        repository.commit(f"commit {at}", {"bench.py": bench, "source": f"{text}# {at}\n"})
        for at, text in enumerate(sources)
    ]
    monkeypatch.chdir(repository.at)
    # The build runs in its own environment with its own pip.
    build = 'grep -q SLOWER source || { echo "no source" >&2; exit 7; }; cp source built.py; python -m pip --version'
    assert bisect(commits[0], commits[-1], "--build", build, "--format", "json", "--", "python", "bench.py") == 5
    found = json.loads(capfd.readouterr().out)
    assert (found["end"], [one["name"] for one in found["suspects"]]) == ("range", [commits[3], commits[2]])
    (skipped,) = [one for one in found["commits"] if one["verdict"] == "skipped"]
    assert (skipped["commit"]["name"], skipped["said"]) == (commits[2], "does not build: exit code 7: no source")
    logs = list(Path(found["state"]).glob(f"{commits[0][:10]}.log"))
    (pip,) = [line for line in logs[0].read_text().splitlines() if line.startswith("pip ")]
    assert str(temporary) in pip


@pytest.mark.slow
def test_a_bisection_that_was_interrupted_goes_on_and_leaves_no_worktree(
    runtime: Path, tmp_path: Path, temporary: Path
) -> None:
    repository, commits = bench_repository(tmp_path / "repository", [AS_FAST] * 2 + [SLOWER] * 2)
    command = [sys.executable, "-m", "cbtop", "bisect", commits[0], commits[-1], "--format", "json", *COMMAND]

    @contextmanager
    def started() -> Iterator[subprocess.Popen[str]]:
        path = os.pathsep.join(filter(None, sys.path))
        process = subprocess.Popen(
            command, cwd=repository.at, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(temporary)},
        )  # fmt: skip
        with process:
            try:
                yield process
            finally:
                process.kill()

    with dirty(repository):
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            with started() as process:
                wait_for_rounds(process, repository, 1 if number == signal.SIGINT else 2)
                process.send_signal(number)
                out, err = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == code, err
            assert list(temporary.iterdir()) == []
            if number == signal.SIGINT:
                assert json.loads(out)["end"] == "interrupted"
        # The next bisection removes the worktrees that a killed bisection has left.
        with started() as process:
            wait_for_rounds(process, repository, 3)
            process.kill()
            process.communicate(timeout=DEADLINE_S)
        assert len(list(temporary.iterdir())) == 1
        assert repository.worktrees() > 1
        with started() as process:
            out, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 4, err
        assert list(temporary.iterdir()) == []
    found = json.loads(out)
    assert found["first_bad"]["name"] == commits[2]
    assert "runs kept from before" in err


def wait_for_rounds(process: subprocess.Popen[str], repository: MadeRepository, number: int) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while len(list(repository.at.glob(".git/cbtop-bisect/*/*/round-*.json"))) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until_s
        time.sleep(0.02)
    time.sleep(0.2)  # Wait until the next run has started.


@pytest.mark.slow
def test_a_program_that_hangs_ends_with_the_time(
    runtime: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hangs = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)\n"
    repository, commits = bench_repository(tmp_path / "repository", [AS_FAST, hangs])
    monkeypatch.chdir(repository.at)
    assert bisect(commits[0], commits[1], "--limit", 0.1, *COMMAND) == 5
    assert capfd.readouterr().out.startswith("unfinished: ")
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_bad_commit_that_is_as_fast_as_good_leaves_nothing_to_find(
    runtime: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    repository, commits = bench_repository(tmp_path / "repository", [AS_FAST, SLOWER, AS_FAST])
    monkeypatch.chdir(repository.at)
    assert bisect(commits[0], commits[2], "--rounds", 3, *COMMAND) == 0
    assert re.match(r"nothing to find: BAD compared with GOOD: all \d hold\n", capfd.readouterr().out)


# A program with a real clock. Its Attention brick takes 1.5 times as long in layer 2 as in other layers.
SPINS = """\
import time
from cbtop import BrickProfiler
profiler = BrickProfiler()
for step in range(60):
    with profiler.step("decode", tokens=1):
        for layer in range(3):
            with profiler.layer(layer):
                for brick, us in (("RmsNorm", 200), ("Attention", 400), ("DownProjection", 600)):
                    with profiler.brick(brick):
                        until_s = time.thread_time() + us * SLOWER.get((layer, brick), 1) / 1e6
                        while time.thread_time() < until_s:
                            pass
profiler.close("done")
"""


@pytest.mark.slow
def test_a_brick_that_spins_longer_is_found_in_a_folder_of_the_repository(
    runtime: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    repository = made_repository(tmp_path / "repository")
    commits = [
        repository.commit(f"commit {at}", {"benches/bench.py": f"# {at}\n{program}{SPINS}"})
        for at, program in enumerate([AS_FAST] * 4 + [SLOWER] * 4)
    ]
    monkeypatch.chdir(repository.at / "benches")
    assert bisect(commits[0], "HEAD", "--format", "json", *COMMAND) == 4
    found = json.loads(capfd.readouterr().out)
    assert (found["first_bad"]["name"], found["broken"][0]["guilty"]) == (commits[4], GUILTY)


@first_by_default(
    ("arguments", "code", "said"),
    [
        (("HEAD~1", "HEAD"), 2, "pass the command to measure after --: cbtop bisect GOOD BAD -- python bench.py"),
        (("HEAD", "HEAD", *COMMAND), 2, "GOOD and BAD are the same commit, "),
        (("HEAD", "HEAD~1", *COMMAND), 2, "BAD (HEAD~1) is an ancestor of GOOD (HEAD); swap them"),
        (
            ("side", "HEAD", *COMMAND),
            2,
            "GOOD (side) is not an ancestor of BAD (HEAD); bisect from their merge",
        ),
        (
            ("alone", "HEAD", *COMMAND),
            2,
            "GOOD (alone) is not an ancestor of BAD (HEAD); they have no commit",
        ),
        (("v9", "HEAD", *COMMAND), 2, "git: 'v9' is no revision here"),
        (("HEAD~1", "HEAD", "RmsNorm<=9", *COMMAND), 2, "threshold 'RmsNorm<=9': expected a time"),
        (("HEAD~1", "HEAD", "--", "python", "{}/bench.py"), 2, "is in your checkout, so every commit would run with"),
        (
            ("HEAD~1", "HEAD", "--", sys.executable, "no.py"),
            1,
            "the command ended with exit code 2: there is no",
        ),
        pytest.param(
            ("HEAD~1", "HEAD", "--", "true"),
            3,
            "no process has recorded two steps in it",
            # Not in the default run, because the bisection waits five seconds for a process that records.
            marks=pytest.mark.slow,
        ),
    ],
    3,
)
def test_what_cannot_be_bisected_is_one_line(
    line: MadeRepository, arguments: tuple[str, ...], code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert bisect(*(one.format(line.at) for one in arguments)) == code
    err = capfd.readouterr().err
    assert said in err.splitlines()[-1]
    assert line.worktrees() == 1


@pytest.fixture
def line(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> MadeRepository:
    """Create a short history with a side branch and a branch without a common ancestor."""
    repository, commits = bench_repository(tmp_path / "repository", [AS_FAST, SLOWER])
    repository.git("checkout", "-q", "-b", "side", commits[0])
    repository.commit("side", {})
    repository.git("checkout", "-q", "--orphan", "alone")
    repository.commit("alone", {})
    repository.git("checkout", "-q", "main")
    monkeypatch.chdir(repository.at)
    return repository


def test_outside_of_a_repository_git_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bisect("HEAD~1", "HEAD", *COMMAND) == 2
    assert "cbtop: git: fatal: not a git repository" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("limit_min", "said"),
    [
        (60, "the first run took 8.3 s, so all of them take about 5 to 11 min"),
        (6, "the first run took 8.3 s, so all of them take about 5 to 11 min; --limit 6 may be too short"),
        (
            4,
            "the first run took 8.3 s, so all of them take about 5 to 11 min: --limit 4 is too short; "
            "pass --limit 11, or repeat the command to go on",
        ),
    ],
)
def test_a_limit_that_is_shorter_than_the_estimate_is_named_at_once(limit_min: float, said: str) -> None:
    assert estimate(8.3, 4.4, 10.1, limit_min, "all of them") == said


@pytest.mark.parametrize("words", [("--rounds", "2"), ("--limit", "0"), ("--limit", "x")])
def test_too_few_rounds_and_no_time_are_usage_errors(
    words: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bisect("a", "b", *words, *COMMAND)
    assert words[0] in capfd.readouterr().err
