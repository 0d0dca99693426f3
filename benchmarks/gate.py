"""Count the false alarms of the gate: record short demos one after another, then compare runs that do the same work.

    python -m benchmarks.gate FOLDER [--runs 50] [--steps 480] [--base 6] [--comparisons 1000]

Recordings that FOLDER lacks are made first, about ten seconds each. A comparison draws some runs as a base and one
more run at random, with a fixed seed. It judges the additional run as `cbtop demo --check` does. A broken result must
be confirmed by the run that was recorded next, which is then not part of the base. With `--base 1`, every pair of
runs is compared, and nothing is confirmed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter
from pathlib import Path

from cbtop.commands.shared.runs import run_of_command
from cbtop.comparison.default_gate import confirmed, default_gate
from cbtop.comparison.judged import Outcome
from cbtop.comparison.run_diff import diff_of
from cbtop.comparison.runs import Run
from cbtop.feeds.run_file import read_runs, write_runs

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
        outcomes = Counter(judged([one], other) for one, other in itertools.combinations(runs, 2))
    else:
        drawn = (drawn_runs(runs, options.base, rng) for _ in range(options.comparisons))
        outcomes = Counter(judged(*some) for some in drawn)
    said = ", ".join(f"{outcomes[one]} {one}" for one in WORST_FIRST)
    print(f"{len(runs)} recordings, {options.base} of them beside one more, {outcomes.total()} times: {said}")
    return 0


def recorded(path: Path, steps: int) -> Run:
    """Return the run in the file `path`. If the file is missing, record the run first."""
    if not path.exists():
        options = argparse.Namespace(connect=None, server_key=None, key=None, source=None)
        command = [sys.executable, "-m", "cbtop", "demo", "--serve-only", "--steps", str(steps)]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_runs(path, [run_of_command(command, "the demo", options, path.stem)])
    (run,) = read_runs(path)
    return run


def drawn_runs(runs: list[Run], base: int, rng: random.Random) -> tuple[list[Run], Run, Run]:
    """Draw runs at random: some runs as a base, one more run, and the run that was recorded right after that one."""
    at = rng.randrange(len(runs) - 1)
    return rng.sample(runs[:at] + runs[at + 2 :], base), runs[at], runs[at + 1]


def judged(bases: list[Run], now: Run, again: Run | None = None) -> Outcome:
    """Return the worst outcome of the default gate for the run `now`.

    If the run `again` is given, only results that it confirms count as broken.
    """
    found = default_gate(diff_of(bases, [now]))
    if again is not None and any(one.outcome is Outcome.BROKEN for one in found):
        second = diff_of(bases, [again])
        if second.why_not:
            return Outcome.UNKNOWN
        found = confirmed(found, default_gate(second))
    outcomes = {one.outcome for one in found}
    return next((one for one in WORST_FIRST if one in outcomes), Outcome.UNKNOWN)


if __name__ == "__main__":
    sys.exit(main())
