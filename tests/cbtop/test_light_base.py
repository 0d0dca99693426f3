"""Tests of an installation without the extra `compute`: seven packages are enough to watch, record and compare.

Only the engine of the demo needs the extra.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from cbtop.commands import COMMANDS, NEED_ENGINE
from cbtop.compute.engine import PACKAGES
from tests.integration.hosts import CBTOP, DEADLINE_S, cbtop

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RECORDING = str(ROOT / "tests/cbtop/h100.cbtop")
BLOCKED = ("numba", "llvmlite", "yaml")
# A file that Python imports when it starts, also in processes that cbtop starts. The file forbids some imports.
BLOCK = f"import sys\nsys.modules.update(dict.fromkeys({BLOCKED}))\n"
PROGRAM = """
import sys
assert sys.modules["numba"] is None
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

model = Model()
with torch.inference_mode():
    for _ in range(50):
        model(torch.zeros(1, 8))
print("done")
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def light(tmp_path: Path, runtime: Path) -> Run:
    """Run the command line in a Python that cannot import the packages of the extra `compute`."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked/sitecustomize.py").write_text(BLOCK)
    path = os.pathsep.join(filter(None, [str(tmp_path / "blocked"), os.environ.get("PYTHONPATH")]))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*CBTOP, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=DEADLINE_S,
            env=os.environ | {"PYTHONPATH": path}, check=False,
        )  # fmt: skip

    return run


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}


def test_the_base_needs_seven_packages_and_zstd_before_python_3_14() -> None:
    needed = PROJECT["dependencies"]
    assert sorted(names_of([one for one in needed if "python_version" not in one])) == [
        "msgpack", "numpy", "nvidia-ml-py", "psutil", "pyzmq", "rich", "textual",
    ]  # fmt: skip
    assert [one for one in needed if "python_version" in one] == ["backports.zstd>=1.0; python_version<'3.14'"]


def test_extras_that_use_the_engine_install_it() -> None:
    extras = PROJECT["optional-dependencies"]
    assert names_of(extras["compute"]) == {"numba", "pyyaml"}
    with_engine = {name for name, needed in extras.items() if any("cbtop[compute" in one for one in needed)}
    assert with_engine == {"bench", "cuda", "dev", "text"}


@pytest.mark.slow
def test_help_of_each_command_works_without_the_engine() -> None:
    script = f"""{BLOCK}
from contextlib import suppress
from cbtop.cli import main
for name in {["", *COMMANDS]}:
    with suppress(SystemExit):
        main([*filter(None, [name]), "--help"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert re.findall(r"^usage: cbtop ?([a-z-]*)", done.stdout, re.MULTILINE) == ["", *COMMANDS]


@pytest.mark.parametrize("missing", PACKAGES)
@pytest.mark.parametrize("name", sorted(NEED_ENGINE))
def test_a_command_that_needs_the_engine_names_its_extra(
    name: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    done = cbtop(name, *(["lint", "."] if name == "contracts" else []))
    expected = f"cbtop: cbtop {name} needs the engine; pip install 'cbtop[compute]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["calibrate"], "calibrate"),
        (["map", "model.gguf"], "map"),
        (["check", "--budget", "contracts", "--baseline", "old", "--new", "new"], "check --budget contracts"),
    ],
    ids=["calibrate", "map", "check"],
)
def test_options_that_need_the_engine_name_its_extra(
    arguments: list[str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    done = cbtop(*arguments)
    assert (done.returncode, done.stderr) == (
        2, f"cbtop: cbtop {what} needs the engine; pip install 'cbtop[compute]'\n",
    )  # fmt: skip


@pytest.mark.slow
def test_demo_says_how_to_install_the_engine_in_a_process_of_its_own(light: Run) -> None:
    done = light("demo", "--headless", "--steps", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "cbtop: cbtop demo needs the engine; pip install 'cbtop[compute]'\n"


@pytest.mark.slow
def test_a_report_of_what_runs_works_without_the_engine(light: Run) -> None:
    done = light("--headless", "--once", "--timeout", "0.1")
    assert done.returncode == 3
    assert "nothing is running: start `pip install 'cbtop[compute]'`, then `cbtop demo --serve-only`" in done.stderr


def test_a_recording_is_shown_and_exported_without_the_engine(light: Run, tmp_path: Path) -> None:
    shown = light("replay", "--headless", RECORDING)
    assert shown.returncode == 0, shown.stderr
    assert "REPLAY of h100.cbtop" in shown.stdout
    written = light("export", RECORDING, "--format", "csv", "-o", str(tmp_path / "rows.csv"))
    assert written.returncode == 0, written.stderr
    assert (tmp_path / "rows.csv").stat().st_size > 1000


@pytest.mark.slow
def test_doctor_works_without_the_engine_and_names_its_extra(light: Run) -> None:
    done = light("doctor")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if " numba " in line]
    assert line.endswith("→ `cbtop demo` needs the engine; pip install 'cbtop[compute]'")
    (line,) = [line for line in done.stdout.splitlines() if " sources " in line]
    assert line.endswith("→ `pip install 'cbtop[compute]'`, then `cbtop demo --serve-only` is something to watch")


@pytest.mark.slow
def test_a_torch_program_is_recorded_and_compared_without_the_engine(light: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    recordings = [str(tmp_path / f"{name}.cbtop") for name in ("old", "new")]
    for recording in recordings:
        done = light("run", "--record", recording, "--", sys.executable, str(program))
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
        assert "cbtop: forward:" in done.stderr
    for command in (("diff", *recordings), ("check", "--baseline", recordings[0], "--new", recordings[1])):
        done = light(*command)
        # Fifty short steps may be too few for a verdict, so several exit codes are right.
        assert done.returncode in (0, 3, 4, 5), done.stderr
        assert "Traceback" not in done.stderr
