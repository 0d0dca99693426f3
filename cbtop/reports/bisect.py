"""Write the result of `cbtop bisect` as text and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum

from cbtop.comparison.judged import Judged
from cbtop.profiler.analysis.graph.nodes import printable
from cbtop.reports.tables import Table, table
from cbtop.units import counted, duration

SCHEMA = "cbtop.bisect/1"
SHORT = 10  # number of characters of a commit's hash in names of files and in reports
MAX_SUSPECTS = 20  # The text lists at most this many commits. The JSON lists all.


class End(StrEnum):
    """The outcome of a bisection."""

    FOUND = "found"  # A commit is slower than GOOD, and also slower than its parent.
    UNCONFIRMED = "unconfirmed"  # A commit is slower than GOOD, but possibly not slower than its parent.
    # Some commits could not be judged, so it is known only that one of several is the first bad one.
    RANGE = "range"
    NOTHING = "nothing"  # The commit BAD is not slower than the commit GOOD.
    UNTRUSTED = "untrusted"  # The runs of GOOD and BAD cannot be judged.
    UNFINISHED = "unfinished"  # The time limit was reached before the end.
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit: its hash, subject, author and date."""

    name: str  # full hash of the commit
    subject: str
    author: str
    date: str  # date at which the author made the commit, in ISO 8601

    @property
    def line(self) -> str:
        return printable(f"{self.name[:SHORT]} {self.subject}")


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The verdict on one commit: `good`, `bad`, `unclear` or `skipped`.

    The bisection compared the commit with the commit `base`.
    """

    commit: Commit
    base: str  # full hash of the commit that this commit was compared with
    verdict: str
    said: str  # the measured change as text, or the reason why the commit was skipped
    rounds: int


@dataclass(frozen=True, slots=True)
class BisectResult:
    """The result of a bisection.

    `suspects` has the first bad commit, or all commits that may be the first bad one.
    """

    end: End
    why: str
    good: Commit
    bad: Commit
    suspects: tuple[Commit, ...]
    # The rules that the first bad commit breaks, compared with its parent. If it is unknown, the rules that BAD
    # breaks.
    broken: tuple[Judged, ...]
    commits: tuple[CommitResult, ...]
    between: int  # number of commits between GOOD and BAD, including BAD
    runs: int  # number of measured runs, including stored runs of earlier bisections
    seconds: float  # how long this bisection has taken, in seconds
    state: str  # path of the folder that contains the measured runs


def bisect_text(result: BisectResult) -> str:
    """Return the text of a bisection for terminals and logs: the first bad commit, the rules that it breaks, and all
    measured commits.
    """
    lines = [*_head(result)]
    rows: Table = [("verdict", "commit", "rounds", "measured")]
    for one in result.commits:
        rounds = str(one.rounds) if one.rounds else "–"
        rows.append((one.verdict, one.commit.line, rounds, printable(one.said)))
    if result.commits:
        lines += ["", table(rows, left=4)]
    runs = f"{counted(result.runs, 'run')} measured, {duration(result.seconds * 1e6)}; kept in {result.state}"
    return "\n".join([*lines, "", f"{counted(result.between, 'commit')} from GOOD to BAD; {runs}"])


def _head(result: BisectResult) -> list[str]:
    if result.end in (End.FOUND, End.UNCONFIRMED):
        (commit,) = result.suspects
        lines = [f"first bad commit: {commit.line}", f"  {printable(commit.author)}, {commit.date}"]
        lines += [f"  breaks {line_of(one)}" for one in result.broken]
        return [*lines, *([f"not confirmed: {result.why}"] if result.why else [])]
    if result.end is End.NOTHING:
        return [f"nothing to find: {result.why}"]
    if result.end is End.UNTRUSTED:
        return [f"not judged: {result.why}"]
    lines = [f"{result.end}: {result.why}"]
    if result.suspects:
        lines.append(f"the first bad commit is one of {len(result.suspects)}:")
        lines += [f"  {commit.line}" for commit in result.suspects[:MAX_SUSPECTS]]
        if len(result.suspects) > MAX_SUSPECTS:
            lines.append(f"  and {len(result.suspects) - MAX_SUSPECTS} more")
        lines += [f"BAD breaks {line_of(one)}" for one in result.broken]
    return lines


def line_of(one: Judged) -> str:
    """Return one line about a rule that a commit breaks. The line begins with the brick and layer."""
    return f"{one.guilty or one.about}: {one.said} ({one.rule})"


def bisect_json(result: BisectResult) -> str:
    """Return the whole result of a bisection as JSON."""
    document = {
        "schema": SCHEMA,
        "end": result.end.value,
        "why": result.why,
        "good": asdict(result.good),
        "bad": asdict(result.bad),
        "first_bad": asdict(result.suspects[0]) if result.end in (End.FOUND, End.UNCONFIRMED) else None,
        "suspects": [asdict(one) for one in result.suspects],
        "broken": [
            {"rule": one.rule, "about": one.about, "guilty": one.guilty, "said": one.said} for one in result.broken
        ],
        "commits": [asdict(one) for one in result.commits],
        "between": result.between,
        "runs": result.runs,
        "seconds": result.seconds,
        "state": result.state,
    }
    return json.dumps(document, allow_nan=False)


FORMATS: dict[str, Callable[[BisectResult], str]] = {"text": bisect_text, "json": bisect_json}
