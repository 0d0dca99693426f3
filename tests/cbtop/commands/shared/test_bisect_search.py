"""`cbtop bisect` searches real git histories. The runs of each commit are simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.commands.shared.bisect_search import Asked, Search
from cbtop.commands.shared.bisect_trees import BrokenCommitError, Repository
from cbtop.commands.shared.runs import OverdueError
from cbtop.comparison.runs import Run
from cbtop.comparison.threshold_grammar import parse
from cbtop.reports.bisect import BisectResult, End
from tests.cbtop.commands.made_repository import MadeRepository, made_repository
from tests.cbtop.comparison.made_runs import Noise, made_run
from tests.representatives import first_by_default

COMMITS = 8
# so little noise that three rounds of runs give a verdict
QUIET = Noise(memory=0, machine=0.003, brick=0.003, call=0.01, pauses=0)
GUILTY = "DownProjection in Layer 4"


@dataclass
class MadeRuns:
    """Simulated runs of commits, without processes.

    `slower` maps a commit to the factor by which its DownProjection takes longer.
    """

    slower: Mapping[str, float]
    broken: Sequence[str] = ()
    changed: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    before_run: Callable[[], None] = lambda: None
    measured: list[tuple[str, ...]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    kept: int = 0
    seeds: count[int] = field(default_factory=count)

    def rounds(self, sides: Sequence[str], number: int) -> list[list[Run]]:
        self.measured.append(tuple(sides))
        return [[self._run(side) for side in sides] for _ in range(number)]

    def skip(self, commit: str, why: str) -> None:
        self.skipped[commit] = why

    def why_skipped(self, commit: str) -> str:
        return self.skipped.get(commit, "")

    def remove(self, commit: str) -> None:
        pass

    def _run(self, commit: str) -> Run:
        self.before_run()
        if commit in self.broken:
            raise BrokenCommitError(commit, "does not build")
        self.kept += 1
        slower = {"slower": self.slower.get(commit, 1.0)}
        return made_run(next(self.seeds), QUIET, 40, **(slower | dict(self.changed.get(commit, {}))))


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> tuple[MadeRepository, list[str]]:
    """Create a linear history."""
    repository = made_repository(tmp_path_factory.mktemp("line") / "repository")
    return repository, [repository.commit(f"commit {number}", {}) for number in range(COMMITS)]


def search(
    repository: MadeRepository, runs: MadeRuns, good: str, bad: str, *thresholds: str, first_parent: bool = False
) -> BisectResult:
    here = Repository(repository.at, "", repository.at / ".git" / "cbtop-bisect")
    asked = Asked(good, bad, [parse(one) for one in thresholds], 4, first_parent)
    return Search(here, runs, asked, lambda _: None).run("state")


def since(commits: Sequence[str], first: int, slower: float = 1.5) -> dict[str, float]:
    return dict.fromkeys(commits[first:], slower)


def named(result: BisectResult) -> list[str]:
    return [one.name for one in result.suspects]


@pytest.mark.slow
@given(first=st.integers(1, COMMITS - 1), skipped=st.sets(st.integers(1, COMMITS - 2), max_size=4))
def test_the_first_bad_commit_is_always_among_the_suspects(
    line: tuple[MadeRepository, list[str]], first: int, skipped: set[int]
) -> None:
    repository, commits = line
    runs = MadeRuns(since(commits, first), [commits[at] for at in skipped])
    result = search(repository, runs, commits[0], commits[-1])
    # The remaining suspects are the first bad commit that can run, and the commits directly before it that cannot.
    low = max(at for at in range(first) if at not in skipped)
    high = min(at for at in range(first, COMMITS) if at not in skipped)
    assert named(result) == commits[low + 1 : high + 1][::-1]
    assert result.end is (End.FOUND if high == low + 1 else End.RANGE)
    assert GUILTY in {one.guilty for one in result.broken}
    assert set(runs.skipped) <= {commits[at] for at in skipped}


@pytest.mark.slow
def test_a_search_measures_about_as_many_commits_as_halving_needs(line: tuple[MadeRepository, list[str]]) -> None:
    repository, commits = line
    for first in (1, 4, COMMITS - 1):
        result = search(repository, MadeRuns(since(commits, first)), commits[0], commits[-1])
        between = {one.commit.name for one in result.commits} - {commits[-1]}
        assert len(between) <= (COMMITS - 1).bit_length(), first
        assert (result.between, result.end) == (COMMITS - 1, End.FOUND)


@pytest.mark.slow
def test_good_is_compared_with_itself_and_the_bad_commit_with_its_parent(
    line: tuple[MadeRepository, list[str]],
) -> None:
    repository, commits = line
    runs = MadeRuns(since(commits, 5))
    result = search(repository, runs, commits[0], commits[-1])
    assert runs.measured[0] == (commits[0], commits[-1], commits[0])
    assert runs.measured[-1] == (commits[4], commits[5])
    assert (result.commits[-1].commit.name, result.commits[-1].base) == (commits[5], commits[4])
    assert f"beside its parent {commits[4][:10]}: {GUILTY}: 1." in result.commits[-1].said


@pytest.mark.slow
def test_a_bad_commit_that_is_equally_fast_leaves_nothing_to_find(line: tuple[MadeRepository, list[str]]) -> None:
    repository, commits = line
    runs = MadeRuns({commits[3]: 2.0})
    result = search(repository, runs, commits[0], commits[-1])
    assert (result.end, result.suspects, result.commits) == (End.NOTHING, (), ())
    assert "BAD compared with GOOD: all 3 hold" in result.why
    assert {len(sides) for sides in runs.measured} == {3}


@pytest.mark.slow
def test_a_good_commit_that_differs_from_itself_is_not_trusted(line: tuple[MadeRepository, list[str]]) -> None:
    repository, commits = line
    number = count()

    class Drifting(MadeRuns):
        def _run(self, commit: str) -> Run:
            self.slower = {commit: 1.5 if next(number) % 3 == 2 else 1.0}  # Every third run of the program is slower.
            return super()._run(commit)

    result = search(repository, Drifting({}), commits[0], commits[-1])
    assert (result.end, result.suspects) == (End.UNTRUSTED, ())
    assert "GOOD compared with itself breaks the gate" in result.why


@pytest.mark.slow
def test_a_commit_that_is_as_fast_as_its_parent_is_not_confirmed(line: tuple[MadeRepository, list[str]]) -> None:
    """Commits are slower than GOOD until the search suspects one commit.

    The suspect is then not slower than its parent.
    """
    repository, commits = line

    class Misled(MadeRuns):
        def rounds(self, sides: Sequence[str], number: int) -> list[list[Run]]:
            if sides[0] != commits[0]:
                self.slower = {}
            return super().rounds(sides, number)

    result = search(repository, Misled(since(commits, 4)), commits[0], commits[-1])
    assert (result.end, named(result)) == (End.UNCONFIRMED, [commits[4]])
    assert f"slower than GOOD, but not than its parent {commits[3][:10]}" in result.why
    assert GUILTY in {one.guilty for one in result.broken}  # The suspect was slower than GOOD.


def test_commits_whose_interval_does_not_decide_are_left_as_a_range(line: tuple[MadeRepository, list[str]]) -> None:
    """Commit 3 has about half of the final slowdown, and its runs vary, so no verdict on it is possible."""
    repository, commits = line
    number = count()

    class Varying(MadeRuns):
        def _run(self, commit: str) -> Run:
            if commit == commits[3]:
                self.slower = {**self.slower, commit: 1.25 + 0.1 * (-1) ** next(number)}
            return super()._run(commit)

    result = search(repository, Varying(since(commits, 4)), commits[0], commits[-1])
    assert (result.end, named(result)) == (End.RANGE, [commits[4], commits[3]])
    assert [one.verdict for one in result.commits if one.commit.name == commits[3]] == ["unclear"]
    assert result.why == "1 of the last 2 commits could not be judged"


@pytest.mark.slow
def test_a_slowdown_that_a_later_commit_fixed_is_not_the_answer(line: tuple[MadeRepository, list[str]]) -> None:
    repository, commits = line
    changed = {commit: {"between_steps_us": 3000.0} for commit in commits[2:5]}
    result = search(repository, MadeRuns(since(commits, 6), changed=changed), commits[0], commits[-1])
    assert (result.end, named(result)) == (End.FOUND, [commits[6]])


@pytest.mark.slow
@pytest.mark.parametrize("slow_from", [12, pytest.param(20, marks=pytest.mark.slow)])
def test_a_machine_that_becomes_slower_meanwhile_blames_no_commit(
    line: tuple[MadeRepository, list[str]], slow_from: int
) -> None:
    """The machine becomes slower in a run of GOOD or of the tested commit.

    All later runs of both are equally slow.
    """
    repository, commits = line
    number = count()

    class Slowing(MadeRuns):
        def _run(self, commit: str) -> Run:
            longer = {"all_longer": 1.3 if next(number) >= slow_from else 1.0}
            self.changed = dict.fromkeys(commits, longer)
            return super()._run(commit)

    result = search(repository, Slowing(since(commits, 4)), commits[0], commits[-1])
    assert commits[4] in named(result)
    assert result.end in (End.FOUND, End.RANGE)


@pytest.mark.slow
def test_thresholds_replace_the_default_gate(line: tuple[MadeRepository, list[str]]) -> None:
    repository, commits = line
    slower = since(commits, 2, 1.2) | since(commits, 5, 1.6)
    result = search(repository, MadeRuns(slower), commits[0], commits[-1], "DownProjection@4.p50<=330us")
    assert (result.end, named(result)) == (End.FOUND, [commits[5]])
    assert [one.rule for one in result.broken] == ["DownProjection@4.p50<=330us"]
    result = search(repository, MadeRuns(slower), commits[0], commits[-1])
    assert (result.end, named(result)) == (End.FOUND, [commits[2]])


@first_by_default(("error", "end"), [(OverdueError("over"), End.UNFINISHED), (KeyboardInterrupt(), End.INTERRUPTED)])
def test_a_search_that_was_stopped_names_the_commits_that_are_left(
    line: tuple[MadeRepository, list[str]], error: BaseException, end: End
) -> None:
    repository, commits = line
    # The search may test either commit, because each splits the seven suspects evenly.
    halves = [commits[4:], commits[5:]]
    for runs_before, left in ((5, [[]]), (3 * 3 + 1, [commits[1:]]), (3 * 3 + 6, halves)):
        runs = MadeRuns(since(commits, 6))

        def stop(runs: MadeRuns = runs, most: int = runs_before) -> None:
            if runs.kept == most:
                raise error

        runs.before_run = stop
        result = search(repository, runs, commits[0], commits[-1])
        assert result.end is end
        assert "the same command goes on" in result.why
        assert named(result)[::-1] in left


def test_good_that_does_not_run_ends_the_search(line: tuple[MadeRepository, list[str]]) -> None:
    repository, commits = line
    for end in (0, -1):
        with pytest.raises(BrokenCommitError, match="does not build"):
            search(repository, MadeRuns({}, [commits[end]]), commits[0], commits[-1])


@first_by_default("first_parent", [False, True])
def test_a_slow_commit_of_a_merged_branch_is_found_or_its_merge(tmp_path: Path, first_parent: bool) -> None:
    repository = made_repository(tmp_path / "repository")
    good = repository.commit("base", {"a": "1"})
    repository.git("checkout", "-b", "side")
    side = [repository.commit(f"side {number}", {"b": str(number)}) for number in range(4)]
    repository.git("checkout", "main")
    main = [repository.commit(f"main {number}", {"a": str(number)}) for number in range(4)]
    repository.git("merge", "--no-edit", "-m", "merge", "side")
    merge = repository.git("rev-parse", "HEAD")
    bad = repository.commit("last", {"a": "9"})
    slow = [*side[2:], merge, bad]
    result = search(repository, MadeRuns(dict.fromkeys(slow, 1.5)), good, bad, first_parent=first_parent)
    assert (result.end, named(result)) == (End.FOUND, [merge if first_parent else side[2]])
    measured = {one.commit.name for one in result.commits}
    assert not (first_parent and measured & set(side))
    assert not measured & {good}
    assert main


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slower", "longer_each", "least"), [(1.5, 0.0, 9), (1.2, 0.0, 3), (1.1, 0.0, 0), (1.5, 0.01, 5), (1.2, 0.01, 0)]
)
def test_no_wrong_commit_is_named_on_a_noisy_machine(
    line: tuple[MadeRepository, list[str]], slower: float, longer_each: float, least: int
) -> None:
    """The times of the runs vary by 0.5 %.

    The machine also slows down: each run takes `longer_each` times as long as the run before.
    """
    repository, commits = line
    noisy, seeds, found = Noise(run=0.005), count(10_000), []

    class Noisy(MadeRuns):
        def _run(self, commit: str) -> Run:
            self.kept += 1
            longer = 1 + longer_each * self.kept
            return made_run(next(seeds), noisy, 120, slower=self.slower.get(commit, 1.0), all_longer=longer)

    for number in range(10):
        first = 1 + number % (COMMITS - 1)
        result = search(repository, Noisy(since(commits, first, slower)), commits[0], commits[-1])
        found.append((result.end, commits[first] in named(result) or not named(result)))
    print(f"{slower}x, {longer_each:.0%} longer each run: {Counter(end for end, _ in found)}")  # noqa: T201
    assert [end for end, is_right in found if not is_right] == []
    assert sum(end is End.FOUND for end, _ in found) >= least
