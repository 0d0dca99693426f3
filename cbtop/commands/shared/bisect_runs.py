"""Run a command at several commits in turn, for `cbtop bisect`.

Each round of runs is stored in a file, so that an interrupted bisection can be continued.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from cbtop.commands.shared.bisect_trees import BrokenCommitError, Trees, last_line
from cbtop.commands.shared.git import local_variables
from cbtop.commands.shared.runs import Launch, OverdueError, run_of_command
from cbtop.errors import CbtopError
from cbtop.reports.bisect import SHORT

if TYPE_CHECKING:  # imported for types only, because numpy loads slowly
    from cbtop.comparison.runs import Run

ID_CHARS = 12


class CommitRuns:
    """Runs a command at commits, and stores the recorded runs in the folder `state`.

    `command` is the words that start the recording, followed by the user's command. `on_first_run` is called once,
    with the seconds of the first checkout and build, and of the first run.
    """

    def __init__(
        self,
        state: Path,
        trees: Trees,
        command: Sequence[str],
        options: argparse.Namespace,
        until_s: float,
        on_first_run: Callable[[float, float], None],
    ) -> None:
        self._state, self._trees, self._options, self._until_s = state, trees, options, until_s
        self._command, self._on_first_run = command, on_first_run
        self._run_s = 0.0
        self._warm: set[str] = set()
        self._numbers: Counter[str] = Counter()

    def rounds(self, sides: Sequence[str], number: int) -> list[list[Run]]:
        """Return `number` rounds, each with a run of every commit in `sides`. Stored rounds are not made again.

        In every second round, the commits run in the opposite order. Raises BrokenCommitError if a commit does not
        run, and OverdueError at the time limit.
        """
        from cbtop.feeds.run_file import read_runs, write_runs

        folder = self._state / "-".join(side[:SHORT] for side in sides)
        folder.mkdir(exist_ok=True)
        found = []
        for at in range(number):
            path = folder / f"round-{at + 1}.json"
            if path.exists():
                found.append(read_runs(path))
                continue
            for side in sides:
                self._warm_up(side)
            if time.monotonic() + len(sides) * self._run_s > self._until_s:
                raise OverdueError("the time is over")
            row = [self._next_run(side) for side in (sides if at % 2 == 0 else reversed(sides))]
            row = row if at % 2 == 0 else row[::-1]
            write_runs(path, row)
            found.append(row)
        return found

    @property
    def kept(self) -> int:
        """The number of runs that are stored in files."""
        return sum(len(path.parent.name.split("-")) for path in self._state.glob("*/round-*.json"))

    def skip(self, commit: str, why: str) -> None:
        """Store why a commit cannot be judged. The bisection does not try this commit again."""
        (self._state / f"{commit[:SHORT]}.skipped").write_text(why, encoding="utf-8")

    def why_skipped(self, commit: str) -> str:
        """Return why a commit was skipped, or "" if it was not skipped."""
        path = self._state / f"{commit[:SHORT]}.skipped"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def remove(self, commit: str) -> None:
        """Remove the temporary worktree of a commit."""
        self._warm.discard(commit)
        self._trees.remove(commit)

    def _warm_up(self, commit: str) -> None:
        """Run the command once at a commit in a new worktree. Its caches are empty, so its times are not used."""
        if commit in self._warm:
            return
        begun_s = time.monotonic()
        with self._log(commit) as log:
            self._trees.at(commit, log)
        built_s = time.monotonic()
        self._run(commit, "warm-up")
        self._warm.add(commit)
        if not self._run_s:
            self._run_s = time.monotonic() - built_s
            self._on_first_run(built_s - begun_s, self._run_s)

    def _next_run(self, commit: str) -> Run:
        self._numbers[commit] += 1
        return self._run(commit, f"run {self._numbers[commit]}")

    def _run(self, commit: str, name: str) -> Run:
        with self._log(commit) as log:
            begins = os.lseek(log, 0, os.SEEK_END)
            tree = self._trees.at(commit, log)
            without = local_variables()
            launch = Launch(tree.directory, tree.environment, without, log, is_apart=True, until_s=self._until_s)
            name = f"{commit[:SHORT]} {name}"
            try:
                return run_of_command(self._command, "the command", self._options, name, launch)
            except OverdueError:
                raise
            except CbtopError as error:
                why = f"{error}{last_line(log, begins)}"
                raise BrokenCommitError(commit, why, error.exit_code) from error

    @contextmanager
    def _log(self, commit: str) -> Iterator[int]:
        """Yield the descriptor of a commit's log file. The output of the build and of the runs goes to this file."""
        log = os.open(
            self._state / f"{commit[:SHORT]}.log", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        try:
            yield log
        finally:
            os.close(log)


def state_of(folder: Path, asked: dict[str, object], *, restart: bool) -> Path:
    """Return the folder below `folder` for the runs of this command line. With `restart`, the runs stored there are
    removed.
    """
    text = json.dumps(asked, indent=2)
    found = folder / sha256(text.encode()).hexdigest()[:ID_CHARS]
    if restart and found.exists():
        shutil.rmtree(found)
    found.mkdir(parents=True, exist_ok=True)
    (found / "asked.json").write_text(text + "\n", encoding="utf-8")
    return found
