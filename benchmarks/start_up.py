"""What `cbtop run` adds to a program's start, in CPU time of its process, in rounds: bare, and bare again as control.

The hook alone is what each Python process of the command pays; with the launcher, what the command pays once.
"""

from __future__ import annotations

import os
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.base import Figure, Ratio
from cbtop.commands.run import HOOK

ROUNDS, ROUNDS_WITH_TORCH = 41, 11
BARE = "bare"
PROGRAMS = {"a program without torch": "pass", "import torch": "import torch"}


def run() -> list[Figure]:
    figures = []
    for what, program in PROGRAMS.items():
        if "torch" not in program or find_spec("torch") is not None:
            figures += _measured(what, program, ROUNDS_WITH_TORCH if "torch" in program else ROUNDS)
    return figures


def _measured(what: str, program: str, rounds: int) -> list[Figure]:
    python = [sys.executable, "-c", program]
    nothing_yet = Path(os.environ["CBTOP_RUNTIME_DIR"]) / "run-1-1"  # of a process that says nothing at its end
    hook = {"CBTOP_RUN": "1", "CBTOP_RUN_ID": f"1,1:{nothing_yet}", "PYTHONPATH": str(HOOK)}
    ways: dict[str, tuple[list[str], dict[str, str]]] = {
        BARE: (python, {}),
        "bare again": (python, {}),
        "under the hook": (python, hook),
        "with the launcher": ([sys.executable, "-m", "cbtop", "run", "--", *python], {}),
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
    """The CPU time of one run, whose stderr nobody reads."""
    with open(os.devnull, "wb") as nowhere:
        actions = [(os.POSIX_SPAWN_DUP2, nowhere.fileno(), 2)]
        pid = os.posix_spawn(command[0], command, os.environ | variables, file_actions=actions)
        _, status, usage = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"{command} ended with {os.waitstatus_to_exitcode(status)}")
    return 1e3 * (usage.ru_utime + usage.ru_stime)
