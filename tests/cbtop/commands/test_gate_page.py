"""The GitHub workflow of docs/gate.md, run step by step as a runner does it, by `bash -e` in its own home."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml

PAGE = Path(__file__).parents[3] / "docs/gate.md"
BASE_COMMIT = "${{ github.event.pull_request.base.sha }}"
# A project of two commits, whose clock is made; the second is slower where SLOWER says so.
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


class _Strict(yaml.SafeLoader):
    """Refuses a key that is there twice, as GitHub does; `on` is a word, as it is to GitHub."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"twice in {node.start_mark}: {keys}"
        return super().construct_mapping(node, deep)


_Strict.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in known if tag != "tag:yaml.org,2002:bool"]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def steps() -> list[dict[str, Any]]:
    """The steps of the workflow's only job. All its keys are keys of GitHub."""
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (text,) = [block for block in blocks if "runs-on:" in block]
    workflow = yaml.load(text, _Strict)
    assert (set(workflow), workflow["on"]) == ({"name", "on", "jobs"}, "pull_request")
    (job,) = workflow["jobs"].values()
    assert (set(job), job["runs-on"]) == ({"runs-on", "steps"}, "ubuntu-latest")
    found: list[dict[str, Any]] = job["steps"]
    assert all(set(step) in ({"uses", "with"}, {"run"}, {"name", "run"}) for step in found)
    return found


def test_the_workflow_has_the_whole_history_and_a_supported_python() -> None:
    checkout, python, install, *checks = steps()
    # Without the base commit there is nothing to compare with.
    assert (checkout["uses"], checkout["with"]) == ("actions/checkout@v4", {"fetch-depth": 0})
    assert (python["uses"], python["with"]["python-version"]) == ("actions/setup-python@v5", "3.12")
    assert install["run"].startswith("pip install cbtop")
    assert [step["run"].count("cbtop check") for step in checks] == [1, 1]
    assert BASE_COMMIT in checks[0]["run"]
    assert "${{" not in checks[0]["run"].replace(BASE_COMMIT, "") + checks[1]["run"]


@pytest.mark.slow
@pytest.mark.parametrize(("is_slower", "code"), [(False, 0), (True, 4)])
def test_the_action_passes_equal_speed_and_fails_a_slower_brick_by_its_layer(
    runtime: Path, tmp_path: Path, is_slower: bool, code: int
) -> None:
    checkout, home, temp, tools = (tmp_path / name for name in ("repository", "home", "temp", "bin"))
    for folder in (checkout, home, temp, tools):
        folder.mkdir()

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        return subprocess.run(("git", *who, *words), cwd=checkout, check=True, capture_output=True, text=True).stdout

    git("init", "--initial-branch=main")
    for text, said in ((BENCH, "base"), (BENCH.replace("SLOWER = False", f"SLOWER = {is_slower}") + "\n", "new")):
        (checkout / "bench.py").write_text(text)
        git("add", "-A")
        git("commit", "-m", said)
    # What `pip install` would have put on the path.
    for name, words in (("python", ""), ("cbtop", " -m cbtop")):
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable}{words} "$@"\n')
        (tools / name).chmod(0o755)
    summary = temp / "summary.md"
    runner = {
        "PATH": os.pathsep.join((str(tools), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "HOME": str(home),
        "RUNNER_TEMP": str(temp),
        "GITHUB_STEP_SUMMARY": str(summary),
        "CBTOP_RUNTIME_DIR": str(runtime),
    }
    done = None
    for step in steps()[3:]:
        assert done is None or done.returncode == 0, done.stderr
        script = tmp_path / "step.sh"
        script.write_text(step["run"].replace(BASE_COMMIT, git("rev-parse", "HEAD~1").strip()))
        done = subprocess.run(
            ("bash", "-e", str(script)), cwd=checkout, env=runner, capture_output=True, text=True, check=False
        )
    assert done is not None
    assert done.returncode == code, done.stderr
    (suite,) = ET.parse(temp / "check.xml").getroot()
    annotations = [line for line in done.stdout.splitlines() if line.startswith("::")]
    assert (suite.get("failures") != "0", annotations[0].startswith("::error ")) == (is_slower, is_slower)
    for where in (done.stdout, annotations[0], summary.read_text()):
        assert ("Attention in Layer 2" if is_slower else "all 3 hold") in where
    assert list(home.iterdir()) == []
