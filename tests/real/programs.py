"""Runs the small real programs of the folder `scripts` under `cbtop run`, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cbtop.commands.run import DEFAULT_OVERHEAD
from cbtop.feeds.replay import ReplayFeed
from cbtop.reports import REPORTS
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import Severity, Verdict
from tests.integration.hosts import CBTOP, DEADLINE_S

SCRIPTS = Path(__file__).parent / "scripts"
# Verdicts that other processes on the same processors can cause. If the machine is shared, these verdicts may be
# right.
OF_NEIGHBOURS = {"starved", "bimodal-latency", "outlier-mean"}
SHARED = 0.05  # The machine counts as shared if processes waited for a processor for more than this share of the run.
PRESSURE = Path("/proc/pressure/cpu")


@dataclass(frozen=True)
class Outcome:
    """The results of a program that has ended."""

    view: SourceView  # view of the first rank
    ranks: tuple[SourceView, ...]  # views of all ranks; a program that is a single process has one
    output: str
    summary: str  # what `cbtop run` printed on stderr when it ended
    file: Path
    is_shared: bool  # whether other processes used the processors during the run, according to Linux

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """Return the verdicts by their ids."""
        return {verdict.id: verdict for verdict in self.view.verdicts}

    @property
    def warnings(self) -> set[str]:
        """Return the ids of errors and warnings. Verdicts that other processes may have caused are left out."""
        found = {verdict.id for verdict in self.view.verdicts if verdict.severity is not Severity.NOTE}
        return found - OF_NEIGHBOURS if self.is_shared else found

    @property
    def is_starved(self) -> bool:
        """Return whether other processes left too little time for a verdict on the steps."""
        return self.is_shared and "starved" in self.verdicts

    @property
    def text(self) -> str:
        """Return the text report of its bricks."""
        return REPORTS["text"]([self.view], ["bricks"])

    def brick(self, name: str) -> BrickRow:
        """Return the row of the brick with this name."""
        return {row.name: row for row in self.view.bricks}[name]

    def views(self) -> Iterator[SourceView]:
        """Yield the views at each second of the run."""
        with ReplayFeed(self.file) as feed:
            for second in range(int(feed.duration_s) + 1):
                feed.seek(second)
                views = (feed.view(source.key) for source in feed.sources())
                yield from (view for view in views if view is not None)

    def during(self) -> set[str]:
        """Return the ids of all verdicts at any second of the run."""
        return {verdict.id for view in self.views() for verdict in view.verdicts}


class Run:
    """Runs scripts of the folder `scripts`, each with the argument `faulty` or `healthy`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._runs = 0

    def __call__(self, script: str, kind: str, overhead: str = DEFAULT_OVERHEAD) -> Outcome:
        """Run a script under `cbtop run`."""
        self._runs += 1
        directory = self._directory / f"{kind}-{self._runs}"
        begun, pressure_s = time.monotonic(), _pressure_s()
        ranks, output, summary = _shown([str(SCRIPTS / f"{script}.py"), kind], directory, overhead)
        waited = (_pressure_s() - pressure_s) / (time.monotonic() - begun)
        return Outcome(ranks[0], ranks, output, summary, directory / "run.cbtop", waited > SHARED)

    def faulty(self, script: str, verdict: str, overhead: str = DEFAULT_OVERHEAD) -> Outcome:
        """Run the faulty variant of a script.

        Repeat at most twice if other processes may have hidden the verdict `verdict`, or may have added another one.
        """
        for _ in range(2):
            outcome = self(script, "faulty", overhead)
            # The verdict `stuck` is only found in views during the run, because an ended process is never stuck.
            found = outcome.during() if verdict == "stuck" else outcome.verdicts
            is_hidden = verdict not in found and outcome.is_shared
            if verdict in OF_NEIGHBOURS and outcome.is_starved:
                is_hidden = False
            if not is_hidden and not _are_of_neighbours(outcome.warnings - {verdict}):
                return outcome
        return self(script, "faulty", overhead)

    def healthy(self, script: str, overhead: str = DEFAULT_OVERHEAD) -> Outcome:
        """Run the healthy variant of a script. Repeat at most twice if other processes may have caused all warnings.

        Other processes can slow down a program without making it wait: through caches, clocks and other threads of a
        core. Linux may not report that. If a rule were wrong, its warning would come in each run.
        """
        for _ in range(2):
            outcome = self(script, "healthy", overhead)
            if not _are_of_neighbours(outcome.warnings):
                return outcome
        return self(script, "healthy", overhead)


def _are_of_neighbours(warnings: set[str]) -> bool:
    """Return whether there are warnings and other processes can cause all of them."""
    return bool(warnings) and warnings <= OF_NEIGHBOURS


def view_of(program: str, directory: Path, overhead: str = DEFAULT_OVERHEAD) -> SourceView:
    """Return the view of `program` after its end."""
    (view,) = _shown(["-c", program], directory, overhead)[0]
    return view


def _shown(program: list[str], directory: Path, overhead: str) -> tuple[tuple[SourceView, ...], str, str]:
    directory.mkdir(exist_ok=True)
    file = directory / "run.cbtop"
    command = [*CBTOP, "run", "--overhead", overhead, "--record", str(file), "--", sys.executable, *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    with ReplayFeed(file) as feed:
        feed.seek(feed.duration_s)
        views = [feed.view(source.key) for source in feed.sources()]
    found = [view for view in views if view is not None]
    return tuple(sorted(found, key=lambda view: view.rank or 0)), done.stdout, done.stderr


def _pressure_s() -> float:
    """Return how long any process has waited for a processor since the start of the machine, in s; 0 if unknown."""
    if not PRESSURE.exists():
        return 0.0
    some, *_ = PRESSURE.read_text().splitlines()
    return float(some.rpartition("=")[2]) / 1e6


def has_compiler() -> bool:
    """Return whether torch.compile finds a C++ compiler for the CPU."""
    return any(
        os.access(Path(directory, name), os.X_OK)
        for directory in os.environ.get("PATH", "").split(os.pathsep)
        for name in (os.environ.get("CXX") or "g++", "clang++")
    )
