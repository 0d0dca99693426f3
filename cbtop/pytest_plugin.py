"""A pytest plugin. `cbtop check` measures each test that has the mark `cbtop`, and compares it with a file of earlier
runs.

PYTEST_DONT_REWRITE
"""

# Rules
# - Each measured run is a separate process: `cbtop check` starts pytest with this test alone. Runs in one process
#   would have the same memory layout, and would not show how runs vary.
# - The user's session runs no fixture of a measured test.
# - Every pytest session imports this module, so nothing slow is imported at its top.

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import pytest

MARK, FIXTURE, PROPERTY = "cbtop", "cbtop_budget", "cbtop"
FOLDER = "cbtop-baselines"
# The pytest session sets this environment variable for a measured process. The value is the folder for the reports of
# the measured process.
EXCHANGE = "CBTOP_PYTEST"
# names of the files in the folder that EXCHANGE names
BUDGET, SKIPPED, VERDICTS, NEW = "budget", "skipped", "verdicts.json", "new.json"
# Number of measured base runs. With 6, an interval is 5.6 times the scatter, and with 3 it is 20 times
# (docs/gate.md).
LEARNED_RUNS = 6
FAILED, TOO_LITTLE, UNTRUSTED = 1, 3, 5  # `cbtop check` ends with these exit codes.
STEPS_NEEDED = (
    "a measured test needs at least 20 steps of a phase: `with profiler.step(…)` of a BrickProfiler, or calls of a "
    "torch model; see docs/pytest.md"
)
AT_THE_SAME_TIME = "other tests ran at the same time and disturb what is measured; run measured tests with -n 0"
WAYS_OUT = {
    "unsure": "to pass tests of which a threshold is unsure: --cbtop-allow-unsure",
    "unknown": "let the test run more steps, or learn from more runs: --cbtop-update --cbtop-runs N",
    "different": "to compare them anyway: --cbtop-anyway; to write a base file on this machine: --cbtop-update",
}
# Pytest and coverage set variables with these prefixes for their session. A measured process must not get them.
_OF_THE_SESSION = ("PYTEST_ADDOPTS", "COV_CORE_", "COVERAGE_PROCESS_")


class ParallelRunWarning(pytest.PytestWarning):
    """Issued if a test with the mark `cbtop` would be measured while xdist runs other tests."""


class MeasurementError(Exception):
    """Raised if the measured test is too slow, or if it could not be measured or judged."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cbtop", "speed of tests with the mark cbtop")
    group.addoption("--cbtop-update", action="store_true", help="run each measured test, and write its base file")
    group.addoption(
        "--cbtop-runs", type=int, default=LEARNED_RUNS, metavar="N",
        help="with --cbtop-update: run each test N times, to learn how runs vary (default: %(default)s)",
    )  # fmt: skip
    group.addoption("--cbtop-allow-unsure", action="store_true", help="pass a test of which a threshold is unsure")
    group.addoption("--cbtop-anyway", action="store_true", help="compare with base files of another machine, too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARK}(*thresholds): measure this test, and judge it by thresholds such as 'decode.p50 <= 1.05x'; without "
        "any, nothing may be slower than in its base file",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Replace each test that has the mark `cbtop` by a MeasuredTest. In a measured process, do nothing."""
    if EXCHANGE in os.environ:
        return
    for at, item in enumerate(items):
        if isinstance(item, pytest.Function) and (item.get_closest_marker(MARK) or FIXTURE in item.fixturenames):
            items[at] = MeasuredTest.from_parent(
                item.parent,
                name=item.name,
                callspec=getattr(item, "callspec", None),
                callobj=item.obj,
                originalname=item.originalname,
            )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """If the measured test skips itself, tell the pytest session why. This runs in the measured process."""
    if report.skipped and EXCHANGE in os.environ:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        Path(os.environ[EXCHANGE], SKIPPED).write_text(why.removeprefix("Skipped: "), encoding="utf-8")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = [
        line
        for report in terminalreporter.getreports("passed")
        for name, line in getattr(report, "user_properties", ())
        if name == PROPERTY
    ]
    if lines:
        terminalreporter.section("cbtop")
        for line in lines:
            terminalreporter.write_line(str(line))


@pytest.fixture
def cbtop_budget() -> Callable[..., None]:
    """Return a function that adds thresholds to this test, for example `cbtop_budget("decode.p50 <= 1.05x")`.

    The function is for thresholds that are known only while the test runs.
    """
    if EXCHANGE not in os.environ:
        raise pytest.UsageError(f"{FIXTURE} must be an argument of the test, so that the test is measured")
    file = Path(os.environ[EXCHANGE], BUDGET)

    def add(*thresholds: str) -> None:
        with file.open("a", encoding="utf-8") as budget:
            budget.writelines(json.dumps(text) + "\n" for text in thresholds)

    return add


class MeasuredTest(pytest.Function):
    """A test with the mark `cbtop`. The test runs in measured processes, and not in this pytest session."""

    def setup(self) -> None:
        """Set up no fixture here, because each measured process sets up its own fixtures."""

    def runtest(self) -> None:
        """Measure the test in other processes and judge it. Raises MeasurementError if the test is too slow or could
        not be judged.
        """
        if getattr(self.config, "workerinput", {}).get("workercount", 1) > 1:
            warnings.warn(ParallelRunWarning(AT_THE_SAME_TIME), stacklevel=1)
        with TemporaryDirectory(prefix="cbtop-pytest-") as exchange:
            self._measure(Path(exchange))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> Any:  # type: ignore[override]
        return str(excinfo.value) if isinstance(excinfo.value, MeasurementError) else super().repr_failure(excinfo)

    @property
    def base_file(self) -> Path:
        """The file of runs that the test is compared with, next to the test's file:
        cbtop-baselines/test_file/test_name.json.
        """
        name = self.nodeid.partition("::")[2].replace("::", ".")
        return self.path.parent / FOLDER / self.path.stem / f"{quote(name, safe='[],=. ')}.json"

    def _measure(self, exchange: Path) -> None:
        options = self.config.option
        marks = [*self.iter_markers(MARK)]
        thresholds = [text for mark in reversed(marks) for text in mark.args]
        if any(mark.kwargs for mark in marks) or not all(isinstance(text, str) for text in thresholds):
            raise MeasurementError(f"the mark {MARK} takes thresholds as texts: @pytest.mark.{MARK}('step <= 1.05x')")
        may_add = FIXTURE in self.fixturenames  # The fixture `cbtop_budget` may add thresholds while the test runs.
        needs_base = _need_base(thresholds)
        if options.cbtop_update and (needs_base or may_add):
            self.base_file.parent.mkdir(parents=True, exist_ok=True)
            learn = ("--learn", str(options.cbtop_runs), "--force")
            done = self._check(exchange, "--baseline", str(self.base_file), *learn)
            check_names([*thresholds, *_added(exchange)], self.base_file)
            self.user_properties += [(PROPERTY, f"{self.nodeid}: {line}") for line in _own_lines(done.stderr)]
            return
        words = []
        if may_add:
            self._check(exchange, "--baseline", str(exchange / NEW), "--learn", "1")
            words += ["--new", str(exchange / NEW)]
            thresholds += _added(exchange)
            needs_base = _need_base(thresholds)
        if needs_base:
            if not self.base_file.exists():
                raise MeasurementError(
                    f"there is no base file {self.base_file}; write it with `pytest --cbtop-update` at the commit to "
                    "compare with"
                )
            words += ["--baseline", str(self.base_file)]
        words += ["--anyway"] * options.cbtop_anyway + ["--allow-unsure"] * options.cbtop_allow_unsure
        self._check(exchange, *words, "--format", "text", "--format", f"json={exchange / VERDICTS}", *thresholds)

    def _check(self, exchange: Path, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `cbtop check` with the arguments `words` and with a command that runs this test.

        If `words` contains --new, the run already exists, and no command is added. Raises MeasurementError if the
        check fails. If the test skips itself in the measured process, it is skipped here, too.
        """
        command = [] if "--new" in words else ["--", *self._command(exchange)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_SESSION)}
        done = subprocess.run(
            [sys.executable, "-m", "cbtop", "check", *words, *command],
            cwd=self.config.invocation_params.dir,
            env=environment | {EXCHANGE: str(exchange)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if (exchange / SKIPPED).exists():
            pytest.skip((exchange / SKIPPED).read_text(encoding="utf-8"))
        if done.returncode:
            raise MeasurementError(_explained(done, exchange))
        return done

    def _command(self, exchange: Path) -> list[str]:
        """Return a command that runs this test alone, with the pytest options of this session."""
        options = self.config.option
        words = [sys.executable, "-m", "pytest", f"{self.path}::{self.nodeid.partition('::')[2]}"]
        words += ["--runxfail", "--no-header", "-q"]
        words += ["--rootdir", str(self.config.rootpath), "--import-mode", options.importmode]
        words += ["-c", str(self.config.inipath)] if self.config.inipath else []
        words += [word for name in options.plugins for word in ("-p", name)]
        for text in (*(options.override_ini or ()), "addopts=", f"cache_dir={exchange / 'cache'}"):
            words += ["-o", text]
        return words


def _need_base(thresholds: Sequence[str]) -> bool:
    """Whether the thresholds need a base file. Without thresholds, the default gate needs one."""
    # imported here, because few pytest sessions need this module
    from cbtop.comparison.structure import is_about_base, parse_any, split
    from cbtop.errors import UsageError

    try:
        timed, structural = split([parse_any(text) for text in thresholds])
    except UsageError as error:
        raise MeasurementError(str(error)) from error
    return not thresholds or any(one.is_relative for one in timed) or any(map(is_about_base, structural))


def check_names(thresholds: Sequence[str], base_file: Path) -> None:
    """Raise MeasurementError if a threshold is invalid, or if a name in a threshold is missing in the runs of the
    base file.
    """
    from cbtop.comparison.contents import contents_together
    from cbtop.comparison.run_diff import diff_of
    from cbtop.comparison.structure import judge_structure, parse_any, split
    from cbtop.comparison.thresholds import judge
    from cbtop.errors import UsageError
    from cbtop.feeds.run_file import read_runs

    runs = read_runs(base_file)[:1]
    contents = contents_together([run.contents for run in runs])
    try:
        timed, structural = split([parse_any(text) for text in thresholds])
        for one in timed:
            judge(one, diff_of(runs, runs))
        for other in structural:
            judge_structure(other, contents, contents)
    except UsageError as error:
        raise MeasurementError(str(error)) from error


def _added(exchange: Path) -> list[str]:
    """Return the thresholds that the test has added during its runs.

    Every run adds the same thresholds, so each threshold counts once.
    """
    file = exchange / BUDGET
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in dict.fromkeys(lines)]


def _own_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith(("cbtop: ", "cbtop check: "))]


def _reason(done: subprocess.CompletedProcess[str], exchange: Path) -> str:
    """Return why `cbtop check` did not pass: `unsure`, `unknown`, `different` or `untrusted`. Return "" if a
    threshold is broken.
    """
    if done.returncode != UNTRUSTED or not (exchange / VERDICTS).exists():
        return ""
    document = json.loads((exchange / VERDICTS).read_text(encoding="utf-8"))
    diff = document["diff"]
    if diff is None:  # `cbtop check` could not read the new run.
        return "untrusted"
    # Without a baseline, the field `base` is null.
    if any(side["untrusted"] for side in (diff["base"], diff["now"]) if side):
        return "untrusted"
    if diff["not_comparable"]:
        return "different"
    is_unknown = any(one["outcome"] == "unknown" for one in document["verdicts"] if not one["passes"])
    return "unknown" if is_unknown else "unsure"


def _explained(done: subprocess.CompletedProcess[str], exchange: Path) -> str:
    """Return why `cbtop check` failed, and advice. If the test itself failed, the text contains the output of the
    test.
    """
    own = _own_lines(done.stderr)
    if done.returncode == FAILED or not (own or done.stdout):
        return f"{done.stderr}\n`cbtop check` ended with exit code {done.returncode}"
    lines = [*own, done.stdout]
    others = [line for line in done.stderr.splitlines() if line not in own]
    sys.stderr.write("".join(f"{line}\n" for line in others))  # Pytest shows this text below the failure.
    if done.returncode == TOO_LITTLE:
        lines.append(STEPS_NEEDED)
    lines.append(WAYS_OUT.get(_reason(done, exchange), ""))
    return "\n".join(filter(None, lines))
