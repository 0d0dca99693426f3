"""`cbtop bisect`: find the first commit that made a command slower, and the brick that became slower."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from cbtop.commands.diff import add_anyway_argument
from cbtop.commands.run import recorded_overhead
from cbtop.commands.shared.numbers import count
from cbtop.commands.shared.runs import add_source_argument
from cbtop.errors import UsageError
from cbtop.units import counted

if TYPE_CHECKING:  # imported for types only, because numpy loads slowly
    from cbtop.commands.shared.bisect_search import Asked
    from cbtop.commands.shared.bisect_trees import Repository

TAKES_COMMAND = "-- COMMAND …"
DESCRIPTION = (
    "Find the first commit after GOOD, up to BAD, that made COMMAND slower, and name the brick and the layer that "
    "became slower. Each commit is checked out into a temporary worktree. Your checkout, index and branches stay as "
    "they are."
)
EPILOG = """\
examples:
  cbtop bisect v1.2 HEAD -- python bench.py
  cbtop bisect HEAD~40 HEAD 'decode.step<=1.05x' 'attn@3.p99<=2ms' -- python bench.py     thresholds of cbtop check
  cbtop bisect v1.2 HEAD --build 'pip install -e .' -- python bench.py
  cbtop bisect v1.2 HEAD --build 'git submodule update --init && make' -- ./bench
  cbtop bisect v1.2 main --first-parent --limit 240 -- python bench.py

COMMAND runs under `cbtop run` in the worktree, in the folder that corresponds to the current one. So it must be
committed, or outside of the checkout, and uncommitted changes do not count. The worktree and its folder src come
first on PYTHONPATH. --build is needed only if a commit must be compiled or installed. It runs at the top of each
worktree, in a virtual environment of its own, which also has the packages of the current one.

Runs alternate: GOOD, the commit, then the commit, GOOD. A commit is judged as in cbtop check after 3 rounds, and
after --rounds if that was not clear. First GOOD is compared with itself, and BAD with GOOD. Commits that do not build
or run are skipped, as by git bisect skip. The first bad commit is compared with its parent at the end. The first run
in each worktree is not used.

Each round is kept in .git/cbtop-bisect. After Ctrl-C, or when the time is over, the same command goes on.

exit codes: 0 BAD is not slower than GOOD, so there is nothing to find; 1 runtime error, or GOOD or BAD does not run;
2 usage; 3 nothing recorded or too few steps; 4 the first bad commit was found; 5 not found: not judged, several
commits left, not confirmed, or the time is over; 130 interrupted
"""
DEFAULT_ROUNDS = 6
DEFAULT_LIMIT_MIN = 60.0
EXIT_CODES = {"nothing": 0, "found": 4, "interrupted": 130}
NOT_FOUND = 5
FORMAT_NAMES = ("text", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("good", metavar="GOOD", help="a commit that is fast: a hash, tag, branch, or HEAD~40")
    parser.add_argument("bad", metavar="BAD", help="a later commit that is slower")
    parser.add_argument(
        "threshold", nargs="*", metavar="THRESHOLD",
        help="such as 'attn.p50<=1.05x', relative to GOOD (default: slower beyond noise, as in cbtop check)",
    )  # fmt: skip
    parser.add_argument("--build", metavar="LINE", help="shell line that builds a commit in its worktree")
    parser.add_argument(
        "--limit", type=_minutes, default=DEFAULT_LIMIT_MIN, metavar="MINUTES",
        help=f"stop after this time; the same command goes on (default: {DEFAULT_LIMIT_MIN:g})",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=_rounds, default=DEFAULT_ROUNDS, metavar="N",
        help=f"most rounds of runs for each commit, at least 3 (default: {DEFAULT_ROUNDS})",
    )  # fmt: skip
    parser.add_argument(
        "--first-parent", action="store_true", help="only merges and commits of the branch BAD itself"
    )
    parser.add_argument("--restart", action="store_true", help="do not use the runs of the same command before")
    parser.add_argument("--format", choices=FORMAT_NAMES, default="text", help="of the result (default: text)")
    add_anyway_argument(parser)
    add_source_argument(parser)


def run(options: argparse.Namespace) -> int:
    from cbtop.commands.shared.bisect_search import Asked
    from cbtop.commands.shared.bisect_trees import Repository, locked
    from cbtop.comparison.threshold_grammar import parse

    if not options.command:
        raise UsageError("pass the command to measure after --: cbtop bisect GOOD BAD -- python bench.py")
    thresholds = [parse(text) for text in options.threshold]
    repository = Repository.here()
    _check_command(options.command, repository)
    good, bad = repository.ends(options.good, options.bad)
    asked = Asked(good, bad, thresholds, options.rounds, options.first_parent, options.anyway)
    # A bisection reads only processes of this machine, so it needs no daemon's address or keys.
    vars(options).update(connect=None, server_key=None, key=None)
    with locked(repository):
        return _search(options, repository, asked)


def _search(options: argparse.Namespace, repository: Repository, asked: Asked) -> int:
    from cbtop.commands.shared.bisect_runs import CommitRuns, state_of
    from cbtop.commands.shared.bisect_search import Search
    from cbtop.commands.shared.bisect_trees import Trees
    from cbtop.reports.bisect import FORMATS

    until_s = time.monotonic() + 60 * options.limit
    words = {name: getattr(options, name) for name in ("threshold", "build", "source", "command")}
    of = {"good": asked.good, "bad": asked.bad, "folder": repository.below, **words}
    state = state_of(repository.state, of, restart=options.restart)
    commits = len(repository.between([asked.good], asked.bad, first_parent=asked.first_parent))
    least, most = runs_needed(commits, asked.rounds)
    from_good = f"{counted(commits, 'commit')} from GOOD to BAD"
    _say(f"{from_good}: {least} to {most} runs, at most {options.limit:g} min (--limit)")

    def say_how_long(build_s: float, run_s: float) -> None:
        builds_s = build_s * (2 + halvings(commits))
        low, high = ((builds_s + max(1, number - runs.kept) * run_s) / 60 for number in (least, most))
        _say(estimate(run_s, low, high, options.limit, "the others" if runs.kept else "all of them"))

    with closing(Trees(repository, options.build, until_s)) as trees:
        # With the option -P, Python does not import a module of the worktree instead of a module that cbtop needs.
        under = [sys.executable, "-P", "-m", "cbtop", "run", "--quiet", "--overhead", recorded_overhead(), "--"]
        runs = CommitRuns(state, trees, [*under, *options.command], options, until_s, say_how_long)
        if runs.kept:
            _say(f"{counted(runs.kept, 'run')} kept from before (--restart removes them)")
        result = Search(repository, runs, asked, _say).run(str(state))
    sys.stdout.write(FORMATS[options.format](result) + "\n")
    return EXIT_CODES.get(result.end.value, NOT_FOUND)


def estimate(run_s: float, low_min: float, high_min: float, limit_min: float, which: str) -> str:
    """Return a text with the time of the bisection, estimated from its first run. It warns if that may exceed
    `--limit`.
    """
    low, high = math.ceil(low_min), math.ceil(high_min)
    said = f"the first run took {run_s:.1f} s, so {which} take about {low} to {high} min"
    if low_min > limit_min:
        return f"{said}: --limit {limit_min:g} is too short; pass --limit {high}, or repeat the command to go on"
    return f"{said}; --limit {limit_min:g} may be too short" if high_min > limit_min else said


def halvings(commits: int) -> int:
    """Return how many commits a binary search must measure to find the first bad one among `commits`."""
    return (commits - 1).bit_length()


def runs_needed(commits: int, rounds: int) -> tuple[int, int]:
    """Return the smallest and the largest number of runs that a bisection needs. Each commit has one warm-up run."""
    from cbtop.comparison.noise import MIN_LEARNED

    least, most = (2 + 3 * each + halvings(commits) * (1 + 2 * each) for each in (MIN_LEARNED, rounds))
    return least, most + 2 + 2 * rounds  # The last runs compare the first bad commit with its parent.


def _check_command(command: Sequence[str], repository: Repository) -> None:
    """Raise UsageError if the command names a script in the user's checkout by its absolute path.

    Such a script would import modules from there instead of from the commit.
    """
    for word in command:
        path = Path(word)
        if path.is_absolute() and path.suffix == ".py" and path.is_relative_to(repository.root):
            inside = path.relative_to(repository.root)
            raise UsageError(
                f"{shlex.quote(word)} is in your checkout, so every commit would run with your modules; commit it "
                f"and write {inside}, or copy it out of the checkout"
            )


def _say(text: str) -> None:
    sys.stderr.write(f"cbtop: {text}\n")
    sys.stderr.flush()


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above zero")
    return value


def _rounds(text: str) -> int:
    from cbtop.comparison.noise import MIN_LEARNED

    value = count(text)
    if value < MIN_LEARNED:
        raise argparse.ArgumentTypeError(f"{text!r} is less than {MIN_LEARNED}, which do not show how runs vary")
    return value
