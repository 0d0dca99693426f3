"""False alarms of the gate: short demos recorded one after another, then the same compared with the same.

    python -m benchmarks.gate FOLDER [--runs 50] [--steps 480] [--base 6] [--comparisons 1000]

What FOLDER lacks of recordings is made first, about ten seconds each. A comparison draws, by a seed, as many of them
as base and one more, and judges that as `cbtop demo --check` does; with `--base 1` every pair is compared.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter
from pathlib import Path

from cbtop.client.run_file import read_runs, write_runs
from cbtop.commands.shared.runs import run_of_command
from cbtop.viewmodels.run_diff import diff_of
from cbtop.viewmodels.runs import Run
from cbtop.viewmodels.thresholds import Outcome, default_gate

WORST_FIRST = (Outcome.BROKEN, Outcome.UNKNOWN, Outcome.UNSURE, Outcome.HOLDS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, usual in (("runs", 50), ("steps", 480), ("base", 6), ("comparisons", 1000), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=usual, help=f"default: {usual}")
    options = parser.parse_args()
    runs = [recorded(options.folder / f"run {at:02}.json", options.steps) for at in range(options.runs)]
    rng = random.Random(options.seed)
    if options.base == 1:
        drawn = [list(pair) for pair in itertools.combinations(runs, 2)]
    else:
        drawn = [rng.sample(runs, options.base + 1) for _ in range(options.comparisons)]
    outcomes = Counter(judged(some[:-1], some[-1]) for some in drawn)
    said = ", ".join(f"{outcomes[one]} {one}" for one in WORST_FIRST)
    print(f"{len(runs)} recordings, {options.base} of them beside one more, {len(drawn)} times: {said}")
    return 0


def recorded(path: Path, steps: int) -> Run:
    """The run in `path`, which is recorded where there is none."""
    if not path.exists():
        options = argparse.Namespace(connect=None, server_key=None, key=None, source=None)
        command = [sys.executable, "-m", "cbtop", "demo", "--serve-only", "--steps", str(steps)]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_runs(path, [run_of_command(command, "the demo", options, path.stem)])
    (run,) = read_runs(path)
    return run


def judged(bases: list[Run], now: Run) -> Outcome:
    """What the default gate says at worst."""
    found = diff_of(bases, [now])
    outcomes = {one.outcome for one in default_gate(found)}
    return next((one for one in WORST_FIRST if one in outcomes), Outcome.UNKNOWN)


if __name__ == "__main__":
    sys.exit(main())
