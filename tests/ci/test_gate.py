"""Tests of action.yml and its script in a repository of two commits, with the variables of a GitHub runner."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml

from tests.cbtop.steady_pace import CUSTOMIZED
from tests.representatives import first_by_default

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "ci/gate.sh"
INPUT = re.compile(r"\bGATE_[A-Z]+")
# A program with a fake clock. Its version in the second commit is slower if SLOWER is set.
BENCH = """
from cbtop import BrickProfiler

SLOWER = False
now_ns = 1_000_000
profiler = BrickProfiler(clock_ns=lambda: now_ns)
for step in range(40):
    with profiler.step("decode", tokens=1):
        for layer in range(3):
            with profiler.layer(layer):
                for brick, us in (("RmsNorm", 10), ("Attention", 40), ("DownProjection", 80)):
                    is_planted = SLOWER and (layer, brick) == (2, "Attention")
                    with profiler.brick(brick):
                        now_ns += round(us * 1000 * (1.2 if is_planted else 1 + 0.01 * ((step * 7) % 5)))
    now_ns += 20_000
profiler.close("done")
"""


def action() -> dict[str, Any]:
    """Return the parsed action.yml."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    return found


class Runner:
    """A job on GitHub: a checkout with two commits, and the folders and variables of its runner."""

    def __init__(self, at: Path, runtime: Path, *, is_slower: bool) -> None:
        self.checkout, self.temp, self.tools = (at / name for name in ("repository", "temp", "bin"))
        for folder in (self.checkout, self.temp, self.tools):
            folder.mkdir()
        self.summary = self.temp / "summary.md"
        self.git("init", "--initial-branch=main")
        for text, said in ((BENCH, "base"), (BENCH.replace("SLOWER = False", f"SLOWER = {is_slower}") + "\n", "new")):
            (self.checkout / "bench.py").write_text(text)
            self.git("add", "-A")
            self.git("commit", "-m", said)
        (self.tools / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (self.tools / "python").chmod(0o755)
        (self.tools / "sitecustomize.py").write_text(CUSTOMIZED)
        self.variables = {
            "PATH": os.pathsep.join((str(self.tools), os.environ["PATH"])),
            "PYTHONPATH": os.pathsep.join((str(self.tools), *filter(None, sys.path))),
            "HOME": str(at),
            "CI": "true",
            "CBTOP_RUNTIME_DIR": str(runtime),
            "GITHUB_ACTIONS": "true",
            "GITHUB_ACTION_PATH": str(ROOT),
            "GITHUB_WORKSPACE": str(self.checkout),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "RUNNER_TEMP": str(self.temp),
        }

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        done = subprocess.run(("git", *who, *words), cwd=self.checkout, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def run(self, **inputs: str) -> subprocess.CompletedProcess[str]:
        """Run the last step of the action. Inputs that are not given have their default values."""
        values = {name: known.get("default", "") for name, known in action()["inputs"].items()}
        assert values["baseline"] == "${{ github.event.pull_request.base.sha }}"
        values |= {"baseline": inputs.get("baseline") or self.git("rev-parse", "HEAD~1")} | inputs
        *_, step = action()["runs"]["steps"]
        environment = {
            name: values[text.removeprefix("${{ inputs.").removesuffix(" }}")] for name, text in step["env"].items()
        }
        return subprocess.run(
            (step["shell"], "-e", "-c", step["run"]),
            cwd=self.checkout,
            env=self.variables | environment,
            capture_output=True,
            text=True,
            check=False,
        )


def test_the_script_reads_every_input_and_no_other() -> None:
    found = action()
    assert found["runs"]["using"] == "composite"
    install, gate = found["runs"]["steps"]
    inputs = {name: f"${{{{ inputs.{name} }}}}" for name in found["inputs"]}
    assert install["env"] == {f"GATE_{name.upper()}": inputs[name] for name in ("python", "cbtop")}
    del inputs["cbtop"]  # This input belongs to another step, which installs cbtop.
    assert gate["env"] == {f"GATE_{name.upper()}": text for name, text in inputs.items()}
    assert set(INPUT.findall(SCRIPT.read_text(encoding="utf-8"))) == set(gate["env"])
    assert set(INPUT.findall(install["run"])) == set(install["env"])
    assert os.access(SCRIPT, os.X_OK)
    # GitHub would insert an expression into the script as code, and a pull request could choose this code.
    assert [step["run"] for step in found["runs"]["steps"] if "${{" in step["run"]] == []


def test_a_slower_commit_breaks_a_threshold_and_the_summary_names_its_brick(runtime: Path, tmp_path: Path) -> None:
    """Only this test of the gate runs by default.

    Gates without thresholds need more runs, so their tests are slow.
    """
    runner = Runner(tmp_path, runtime, is_slower=True)
    (runner.checkout / "staged.py").write_text("1\n")
    runner.git("add", "staged.py")
    index = runner.checkout / ".git" / "index"
    before = index.read_bytes()
    # git sets these variables in a hook, and they must not lead the gate to another index.
    runner.variables |= {"GIT_INDEX_FILE": str(index), "GIT_DIR": str(index.parent)}
    formats = f"\n sarif={runner.temp}/check.sarif \n"
    done = runner.run(
        command="python bench.py", learn="1", thresholds="\nAttention@2 <= 1.05x\n step <= 9x\n", formats=formats
    )
    assert done.returncode == 4, done.stderr
    assert index.read_bytes() == before
    # The summary of `cbtop run` has a line with the next command. `cbtop check` must not print it.
    assert "next: cbtop" not in done.stderr
    for text in (done.stdout, runner.summary.read_text(), (runner.temp / "check.sarif").read_text()):
        assert "Attention in Layer 2" in text
    (suite,) = ET.parse(runner.temp / "cbtop-check.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert sorted(path.name for path in runner.temp.iterdir()) == ["cbtop-check.xml", "check.sarif", "summary.md"]
    assert len(runner.git("worktree", "list").splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("is_slower", "code"), [(False, 0), (True, 4)])
def test_equal_speed_passes_and_a_slower_brick_fails_by_its_layer(
    runtime: Path, tmp_path: Path, is_slower: bool, code: int
) -> None:
    runner = Runner(tmp_path, runtime, is_slower=is_slower)
    done = runner.run(command="python bench.py", setup="touch set-up")
    assert done.returncode == code, done.stderr
    annotations = [line for line in done.stdout.splitlines() if line.startswith(("::error", "::notice"))]
    assert annotations[0].startswith("::error ") is is_slower
    for where in (done.stdout, annotations[0], runner.summary.read_text()):
        assert ("Attention in Layer 2" if is_slower else "all 3 hold") in where
    assert (runner.checkout / "set-up").exists()


@first_by_default(
    ("inputs", "code", "said"),
    [
        ({"command": ""}, 2, "the input command is empty"),
        ({"command": "true", "baseline": ""}, 2, "this event has no pull request"),
        ({"command": "true", "baseline": "0" * 40}, 2, f"there is no commit {'0' * 40}"),
        ({"command": "python bench.py", "setup": "exit 7"}, 7, ""),
        ({"command": "false\ntrue", "learn": "1"}, 1, "the base commit cannot be measured"),
        pytest.param(
            {"command": "false | true", "learn": "1"}, 1, "the base commit cannot be measured", marks=pytest.mark.slow
        ),
        pytest.param(  # This case is slow, because the recorder waits for a process.
            {"command": "exit 9", "learn": "1"}, 1, "the base commit cannot be measured", marks=pytest.mark.slow
        ),
    ],
    2,
)
def test_an_input_that_cannot_be_used_is_named_and_leaves_nothing(
    runtime: Path, tmp_path: Path, inputs: dict[str, str], code: int, said: str
) -> None:
    runner = Runner(tmp_path, runtime, is_slower=False)
    done = runner.run(**inputs)
    assert done.returncode == code, done.stderr
    assert said in done.stdout
    assert list(runner.temp.iterdir()) == []
    assert len(runner.git("worktree", "list").splitlines()) == 1


@pytest.mark.slow
def test_a_base_that_a_shallow_checkout_lacks_is_fetched(runtime: Path, tmp_path: Path) -> None:
    runner = Runner(tmp_path, runtime, is_slower=True)
    base, origin = runner.git("rev-parse", "HEAD~1"), runner.checkout
    runner.git("config", "uploadpack.allowAnySHA1InWant", "true")
    runner.checkout = tmp_path / "shallow"
    subprocess.run(("git", "clone", "--quiet", "--depth=1", f"file://{origin}", str(runner.checkout)), check=True)
    with pytest.raises(subprocess.CalledProcessError):
        runner.git("cat-file", "-e", base)
    done = runner.run(command="python bench.py", baseline=base, learn="1", thresholds="Attention@2 <= 1.05x")
    assert done.returncode == 4, done.stderr
