"""Measure the CPU time that `cbtop run` adds to the start of a program.

Rounds alternate between bare starts, and a second series of bare starts is the control. Each Python process of the
command pays for the import hook. The command as a whole pays once for the launcher. Python has cbtop's files as from
a wheel, because an editable install makes each start slower than cbtop does.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sysconfig
import tempfile
import venv
from importlib.util import find_spec
from pathlib import Path

import cbtop
from benchmarks.base import Figure, Ratio
from cbtop.commands.run import HOOK

ROUNDS, ROUNDS_WITH_TORCH = 41, 11
BARE = "bare"
LAUNCHER = Path(__file__).parents[1] / "bin" / "cbtop"
PROGRAMS = {"a program without torch": "pass", "import torch": "import torch"}
FOLLOWS = """
import time, torch
begun_ns = time.process_time_ns()
from cbtop.profiler.instrument.first_call import await_first_call
await_first_call(lambda: None)
print(time.process_time_ns() - begun_ns)
"""


def run() -> list[Figure]:
    figures = []
    with tempfile.TemporaryDirectory(prefix="cbtop-bench-") as directory:
        python = _environment(Path(directory))
        for what, program in PROGRAMS.items():
            if "torch" not in program or find_spec("torch") is not None:
                figures += _measured(python, what, program, ROUNDS_WITH_TORCH if "torch" in program else ROUNDS)
        if find_spec("torch") is not None:
            figures.append(_follows_torch(python))
    return figures


def _follows_torch(python: str) -> Figure:
    """Measure only the work that the import hook does after an import of torch. In the other figures, this work is
    hidden by the seconds that the import itself takes.
    """
    found = [int(subprocess.check_output([python, "-c", FOLLOWS])) / 1e6 for _ in range(ROUNDS_WITH_TORCH)]
    return Figure("import torch, of that the hook once it is there", statistics.median(found), "ms")


def _environment(directory: Path) -> str:
    """Make a virtual environment. Returns the path of its Python, which also finds the packages of our own
    environment.
    """
    venv.create(directory, symlinks=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "cbtop").symlink_to(Path(cbtop.__file__).parent)
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib"))
    return str(directory / "bin" / "python")


def _measured(interpreter: str, what: str, program: str, rounds: int) -> list[Figure]:
    python = [interpreter, "-c", program]
    # The mark of a run. The run records no step, so it has nothing to report at its end.
    nothing_yet = Path(os.environ["CBTOP_RUNTIME_DIR"]) / "run-1-1"
    hook = {"CBTOP_RUN": "1", "CBTOP_RUN_ID": f"1,1:{nothing_yet}", "PYTHONPATH": HOOK}
    ways: dict[str, tuple[list[str], dict[str, str]]] = {
        BARE: (python, {}),
        "bare again": (python, {}),
        "under the hook": (python, hook),
        "with the launcher": ([interpreter, str(LAUNCHER), "run", "--", *python], {}),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (command, variables) in ways.items():
            found[name].append(_cpu_ms(command, variables))
    bare = found.pop(BARE)
    return [Figure(f"{what}, {BARE}", statistics.median(bare), "ms")] + [
        Figure(
            f"{what}, {name}: more",
            statistics.median(ms - bare_ms for ms, bare_ms in zip(times, bare, strict=True)),
            "ms",
            BARE,
            Ratio.of(times, bare),
        )
        for name, times in found.items()
    ]


def _cpu_ms(command: list[str], variables: dict[str, str]) -> float:
    """Return the CPU time (ms) of one run of `command`. Its stderr is discarded."""
    with open(os.devnull, "wb") as nowhere:
        actions = [(os.POSIX_SPAWN_DUP2, nowhere.fileno(), 2)]
        pid = os.posix_spawn(command[0], command, os.environ | variables, file_actions=actions)
        _, status, usage = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"{command} ended with {os.waitstatus_to_exitcode(status)}")
    return 1e3 * (usage.ru_utime + usage.ru_stime)
