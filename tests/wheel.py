"""Build the distributions, and try the wheel in a new environment outside the checkout. `make wheel` runs this.

    python -m tests.wheel   write dist/cbtop-*.tar.gz and .whl; exit code 1 if something is missing or fails

The wheel is built from the source distribution. Its dependencies come from this environment by a .pth file, so that
only the build needs a network.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from cbtop.version import __version__
from tests.links import ROOT

DEPENDENCIES = Path(np.__file__).parents[1]
OURS = ("cbtop", "__editable__")
STEPS = 20
SMALL_MODEL = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
model = Model()
for _ in range(100):
    model(torch.ones(1, 64))
"""


def built(directory: Path) -> Path:
    """Build both distributions into `directory`. Returns the wheel."""
    for old in directory.glob("cbtop-*"):
        old.unlink()
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(directory), str(ROOT)], check=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def source_files() -> Iterator[str]:
    """Yield the files that a wheel must contain: Python code, types and data, by their names in the wheel."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package in tools["packages"]:
        folder = ROOT / package.replace(".", "/")
        patterns = ["*.py", *tools["package-data"].get(package, [])]
        for path in (path for pattern in patterns for path in folder.glob(pattern)):
            yield str(path.relative_to(ROOT))


def missing(wheel: Path) -> list[str]:
    """Return the source files that the wheel lacks."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(set(source_files()) - set(archive.namelist()))


def installed(wheel: Path, directory: Path) -> Path:
    """Install the wheel into a new environment in `directory`. Returns its folder of commands."""
    venv.create(directory / "venv", with_pip=True, symlinks=True)
    commands = directory / "venv" / "bin"
    pip = [str(commands / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-index", "--no-deps", str(wheel)], check=True)
    (directory / "dependencies").mkdir()
    for path in DEPENDENCIES.iterdir():
        if not path.name.startswith(OURS) and path.suffix != ".pth":
            (directory / "dependencies" / path.name).symlink_to(path)
    site = next((directory / "venv" / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(f"{directory / 'dependencies'}\n")
    return commands


def trials(commands: Path) -> Iterator[tuple[list[str], str]]:
    """Yield commands to try in the installation, each with a text that it must print."""
    cbtop, python = str(commands / "cbtop"), str(commands / "python")
    yield [cbtop, "--version"], f"cbtop {__version__}"
    yield [python, "-m", "cbtop", "--help"], "commands (cbtop help COMMAND)"
    yield [cbtop, "demo", "--headless", "--steps", str(STEPS)], "tokens/s"
    if importlib.util.find_spec("torch") is None:
        yield [cbtop, "run", "--", python, "-c", "pass"], "torch was never imported"
    else:
        yield [cbtop, "run", "--", python, "-c", SMALL_MODEL], "steps/s"


def failure(command: Sequence[str], expected: str, directory: Path) -> str:
    """Run the command in `directory`. Returns what is wrong with its result, or ""."""
    variables = {"CBTOP_RUNTIME_DIR": str(directory / "runtime"), "XDG_CACHE_HOME": str(ROOT / ".pytest_cache/home")}
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables,
    )  # fmt: skip
    printed = done.stdout + done.stderr
    if done.returncode == 0 and expected in printed:
        return ""
    return f"{' '.join(command[:4])}: exit code {done.returncode}, expected {expected!r}\n{printed}"


def main() -> int:
    """Build, install and try the wheel. Returns the exit code."""
    wheel = built(ROOT / "dist")
    failures = [f"not in the wheel: {name}" for name in missing(wheel)]
    with tempfile.TemporaryDirectory(prefix="cbtop-wheel-") as folder:
        directory = Path(folder)
        (directory / "runtime").mkdir(mode=0o700)
        failures += filter(None, [failure(*trial, directory) for trial in trials(installed(wheel, directory))])
    sys.stdout.writelines(f"{line}\n" for line in failures or [f"{wheel.relative_to(ROOT)}: installed and tried"])
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
