"""Search for the first bad commit between GOOD and BAD.

First GOOD is compared with itself, and BAD with GOOD. Then commits between them are compared with GOOD. At the end,
the first bad commit is compared with its parent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cbtop.commands.shared.bisect_trees import BrokenCommitError, Repository
from cbtop.commands.shared.runs import OverdueError
from cbtop.comparison.bisect_verdict import Assessment, CommitVerdict, Wanted, assess, said_of, verdict_of, wanted_of
from cbtop.comparison.judged import Outcome
from cbtop.comparison.noise import MIN_LEARNED
from cbtop.comparison.threshold_grammar import Threshold
from cbtop.errors import UsageError
from cbtop.reports.bisect import SHORT, BisectResult, CommitResult, End
from cbtop.reports.gate import summary

if TYPE_CHECKING:
    from cbtop.comparison.runs import Run

SKIPPED = "skipped"
GO_ON = "the same command goes on"


class Runs(Protocol):
    """The methods that a search for the first bad commit needs from `CommitRuns`."""

    def rounds(self, sides: Sequence[str], number: int) -> list[list[Run]]: ...
    def skip(self, commit: str, why: str) -> None: ...
    def why_skipped(self, commit: str) -> str: ...
    def remove(self, commit: str) -> None: ...

    @property
    def kept(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """The commits and the options of a bisection, as given by the user."""

    good: str
    bad: str
    thresholds: Sequence[Threshold]
    rounds: int  # maximum number of runs of one commit
    first_parent: bool = False
    anyway: bool = False

    @property
    def looks(self) -> list[int]:
        """A commit is judged after each of these numbers of rounds."""
        return sorted({MIN_LEARNED, self.rounds})


class Search:
    """A search for the first bad commit in `repository`. The search calls `say` with a line of progress for each
    commit.
    """

    def __init__(self, repository: Repository, runs: Runs, asked: Asked, say: Callable[[str], None]) -> None:
        self._repository, self._runs, self._asked, self._say = repository, runs, asked, say
        self._begun_s = time.monotonic()
        self._goods, self._bad = [asked.good], asked.bad
        self._unclear: set[str] = set()  # hashes of commits that could not be judged
        self._wanted: Wanted | None = None
        self._results: list[CommitResult] = []
        self._assessments: dict[str, Assessment] = {}  # for each bad commit, its comparison with GOOD
        self._between = self._candidates()

    def run(self, state: str) -> BisectResult:
        """Search for the first bad commit, and return the result.

        `state` is the name of the folder with the runs. Raises BrokenCommitError if GOOD or BAD does not run.
        """
        try:
            end, why = self._compare_ends() or self._narrow()
        except OverdueError as error:
            end, why = End.UNFINISHED, f"{error}; {GO_ON}"
        except KeyboardInterrupt:
            end, why = End.INTERRUPTED, GO_ON
        left = [] if self._wanted is None else [self._bad]
        if end not in (End.FOUND, End.UNCONFIRMED) and left:
            left = self._candidates()
        good, bad, *suspects = self._repository.commits([self._asked.good, self._asked.bad, *left])
        assessment = self._assessments.get(self._bad)
        broken = self._wanted.of(assessment) if self._wanted and assessment else []
        return BisectResult(
            end=end,
            why=why,
            good=good,
            bad=bad,
            suspects=tuple(suspects),
            broken=tuple(broken),
            commits=tuple(self._results),
            between=len(self._between),
            runs=self._runs.kept,
            seconds=time.monotonic() - self._begun_s,
            state=state,
        )

    def _candidates(self, *, is_halved: bool = False) -> list[str]:
        """Return the candidates for the first bad commit.

        With `is_halved`, the commit to measure next comes first, as in `git rev-list --bisect-all`.
        """
        first_parent = self._asked.first_parent
        return self._repository.between(self._goods, self._bad, first_parent=first_parent, is_halved=is_halved)

    def _assess(self, bases: Sequence[Run], news: Sequence[Run]) -> Assessment:
        return assess(bases, news, self._asked.thresholds, anyway=self._asked.anyway)

    def _compare_ends(self) -> tuple[End, str] | None:
        """Compare GOOD with itself, and BAD with GOOD. Return the outcome if this ends the search, else None."""
        good, bad = self._asked.good, self._asked.bad
        for number in self._asked.looks:
            firsts, news, seconds = zip(*self._runs.rounds([good, bad, good], number), strict=True)
            same, worse = self._assess(firsts, seconds), self._assess([*firsts, *seconds], news)
            if worse.broken and not same.broken:
                break
        self._runs.remove(bad)
        if same.broken:
            return End.UNTRUSTED, f"GOOD compared with itself breaks the gate: {summary(same.judged)}"
        if why_not := same.why_not or worse.why_not:
            return End.UNTRUSTED, why_not
        self._wanted = wanted_of(worse)
        if self._wanted is None:
            is_known = not any(one.outcome is Outcome.UNKNOWN for one in worse.judged)
            said = f"BAD compared with GOOD: {summary(worse.judged)}"
            return (End.NOTHING if is_known else End.UNTRUSTED), said
        self._note(bad, good, CommitVerdict.BAD, worse, number)
        return None

    def _narrow(self) -> tuple[End, str]:
        """Measure commits until the first bad one is known, then compare it with its parent. Return the outcome."""
        while True:
            left = [one for one in self._candidates(is_halved=True) if one != self._bad]
            commit = next((one for one in left if one not in self._unclear), None)
            if commit is None:
                break
            if why := self._runs.why_skipped(commit):
                self._note_skipped(commit, why)
                continue
            try:
                verdict = self._measure(self._asked.good, commit)
            except BrokenCommitError as error:
                if error.commit != commit:
                    raise
                self._runs.skip(commit, error.why)
                self._note_skipped(commit, error.why)
            else:
                if verdict is CommitVerdict.GOOD:
                    self._goods.append(commit)
                elif verdict is CommitVerdict.BAD:
                    self._bad = commit
                else:
                    self._unclear.add(commit)
            self._runs.remove(commit)
        if left:
            return End.RANGE, f"{len(left)} of the last {len(left) + 1} commits could not be judged"
        return self._confirm()

    def _measure(self, base: str, commit: str) -> CommitVerdict:
        """Run `commit` and `base` in turns, and return the verdict: whether `commit` is slower than `base` (bad)."""
        assert self._wanted is not None
        for number in self._asked.looks:
            bases, news = zip(*self._runs.rounds([base, commit], number), strict=True)
            try:
                assessment = self._assess(bases, news)
            except UsageError as error:  # A threshold of the user names a brick that does not exist at this commit.
                raise BrokenCommitError(commit, str(error)) from error
            verdict = verdict_of(assessment, self._wanted, is_last=number == self._asked.rounds)
            if verdict is not CommitVerdict.UNCLEAR:
                break
        self._note(commit, base, verdict, assessment, number)
        return verdict

    def _confirm(self) -> tuple[End, str]:
        """Compare the first bad commit with its parent.

        If several commits each add a small slowdown, the first bad commit may be no slower than its parent.
        """
        parent = self._repository.parent(self._bad)
        if parent is None or parent == self._asked.good:
            return End.FOUND, ""
        try:
            verdict = self._measure(parent, self._bad)
        except BrokenCommitError as error:
            return End.UNCONFIRMED, f"it could not be compared with its parent {parent[:SHORT]}: {error}"
        if verdict is CommitVerdict.BAD:
            return End.FOUND, ""
        return End.UNCONFIRMED, (
            f"it is slower than GOOD, but not than its parent {parent[:SHORT]}: several commits may add up, or noise "
            "has misled one verdict; more rounds or longer runs would tell"
        )

    def _note(self, commit: str, base: str, verdict: CommitVerdict, assessment: Assessment, rounds: int) -> None:
        assert self._wanted is not None
        if verdict is CommitVerdict.BAD:
            self._assessments[commit] = assessment
        said = said_of(assessment, self._wanted)
        (words,) = self._repository.commits([commit])
        beside = "" if base == self._asked.good else f"beside its parent {base[:SHORT]}: "
        self._results.append(CommitResult(words, base, verdict.value, f"{beside}{said}", rounds))
        self._say(f"{words.line}: {verdict.value}, {beside}{said}")

    def _note_skipped(self, commit: str, why: str) -> None:
        self._unclear.add(commit)
        (words,) = self._repository.commits([commit])
        self._results.append(CommitResult(words, self._asked.good, SKIPPED, why, 0))
        self._say(f"{words.line}: {SKIPPED}, {why}")
