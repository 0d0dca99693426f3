"""Count how often a slow layer is named, and how often its healthy twin gets a warning.

    python -m benchmarks planted [--runs N] [--seconds S]

One of eight layers takes 1.5 times as long (`benchmarks/programs/slow_layer.py`). Each run starts a new Python
process with the default settings of cbtop, and is judged when it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from cbtop.commands.run import DEFAULT_OVERHEAD

PROGRAM = Path(__file__).parent / "programs" / "slow_layer.py"
CBTOP = [sys.executable, "-m", "cbtop"]
NAMED = ("odd-layer", "Layer 5")
LEAST_NAMED = 0.95  # At least this share of the runs must name the slow layer.
LIMIT_S = 300.0


def main(arguments: Sequence[str]) -> int:
    """Print each run and both counts.

    Returns 1 if the healthy program got a warning, or if too few runs of the faulty program named the slow layer.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks planted", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="of each program (default: 20)")
    parser.add_argument("--seconds", type=float, default=9.0, help="of steps after the warm-up (default: 9)")
    options = parser.parse_args(arguments)
    found: Counter[str] = Counter()
    for number in range(1, options.runs + 1):
        for kind in ("faulty", "healthy"):
            begun = time.monotonic()
            warnings = warnings_of(kind, options.seconds)
            found[kind] += NAMED in warnings if kind == "faulty" else not warnings
            shown = ", ".join(f"{name} ({about})" for name, about in warnings) or "no warning"
            took_s, load = time.monotonic() - begun, os.getloadavg()[0]
            print(f"{number:3} {kind:8}{took_s:5.1f} s, load {load:4.1f}: {shown}", flush=True)
    print(f"slow layer named in {found['faulty']} of {options.runs}")
    print(f"twin without a warning in {found['healthy']} of {options.runs}")
    return int(found["healthy"] < options.runs or found["faulty"] < LEAST_NAMED * options.runs)


def warnings_of(kind: str, seconds: float) -> list[tuple[str, str]]:
    """Run the faulty or the healthy program. Return the id and the subject of each warning and error that remains at
    its end.
    """
    with tempfile.TemporaryDirectory(prefix="cbtop-planted-") as folder:
        file = str(Path(folder, "run.cbtop"))
        _run("run", "--quiet", "--overhead", DEFAULT_OVERHEAD, "--record", file, "--",
             sys.executable, str(PROGRAM), f"{seconds:g}", kind)  # fmt: skip
        report = json.loads(_run("replay", file, "--headless", "--format", "json"))
    return [
        (one["id"], one["about"]["name"])
        for source in report["sources"]
        for one in source["verdicts"]
        if one["severity"] != "note"
    ]


def _run(*command: str) -> str:
    return subprocess.run([*CBTOP, *command], capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
