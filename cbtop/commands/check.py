"""`cbtop check`: check whether a run is as fast as its baseline, and within its budgets."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbtop.commands.diff import add_anyway_argument
from cbtop.commands.run import recorded_overhead
from cbtop.commands.shared.engine import require_engine
from cbtop.commands.shared.junit import junit
from cbtop.commands.shared.names import one_of
from cbtop.commands.shared.numbers import count
from cbtop.commands.shared.runs import WHERE, add_runs_arguments, run_of_command, runs_of
from cbtop.commands.shared.sarif import Failure, SarifRule, sarif
from cbtop.errors import CbtopError, FailedCheckError, NoDataError, UntrustedError, UsageError
from cbtop.protocol.errors import ProtocolError
from cbtop.protocol.vocabulary import PRECONDITION
from cbtop.units import counted

if TYPE_CHECKING:  # imported for types only, because numpy loads slowly
    from cbtop.comparison.items import Brick
    from cbtop.comparison.judged import Judged
    from cbtop.comparison.run_diff import RunDiff
    from cbtop.comparison.runs import Run
    from cbtop.comparison.structure import Structural
    from cbtop.comparison.threshold_grammar import Threshold

TAKES_COMMAND = "[-- COMMAND …]"
DESCRIPTION = (
    "Compare a run with a baseline, fail if it is slower, and name the brick and the layer. Without thresholds, it "
    "fails if a brick, a typical step with the time before it, or a token became slower beyond noise, if steps grow "
    "longer inside the run, or if a p99 is longer. With thresholds, only these count."
)
EPILOG = f"""\
thresholds: [PHASE.]WHAT[@LAYER][.FIGURE] <= NUMBER[UNIT]
  PHASE    such as decode, or decode[batch=6] for only its steps of 6 sequences
  WHAT     a brick (RmsNorm), a category (attn, ffn, norm), step, tokens_per_sec, samples_per_sec, in_steps (tokens
           a second of the time in steps), unattributed, loss; PHASE.FIGURE without WHAT is that of its step; of
           training steps a part (train.backward), memory.allocated, memory.reserved
  FIGURE   p50 of a call (the default), p99, or per_token
  UNIT     x (times the baseline), %, ns, us, ms, s, MB, GB;  also < > >= and, of loss, ==
contents of a step, exact with three steps or more, on any machine: [PHASE.]WHAT == NUMBER|base
  WHAT     graph (==base), bricks, launches, transfers.h2d, allocations, graph_breaks, recompilations

examples:
  cbtop check --baseline learned.json --new new.cbtop              learned from six runs
  cbtop check --baseline base.json 'attn.p50<=1.05x' 'decode.tokens_per_sec>=40' --new new.cbtop
  cbtop check --baseline base.json 'RmsNorm.p99<=12us' 'unattributed<=1%' 'loss==0' --new 4711
  cbtop check --baseline base.json 'graph==base' 'graph_breaks==0' -- python bench.py --steps 3
  cbtop check --baseline learned.json --learn 6 -- python bench.py    run it six times, and store how runs vary
  cbtop check --baseline base.json --format text --format junit=check.xml -- python bench.py
  cbtop check --baseline base.json --budget pyproject.toml --new new.cbtop
  cbtop demo --check                                               a complete example

BASE and NEW are each {WHERE}. Budgets are TOML:

  [budgets]                       # or [tool.cbtop.budgets]
  attn.p50 = "<=1.05x"
  decode.tokens_per_sec = ">=40"

The budget of a BrickDefinition is always judged, too.

A threshold is broken if the whole interval of the measurement is beyond it. If the limit is within the interval, the
threshold is `unsure`: exit code 5, or 0 with --allow-unsure. If the interval reaches zero, nothing could break the
threshold: exit code 5. tokens_per_sec is by the wall clock, as on the screen, with waits and other phases. In
training it is by the time in training steps, without evaluations.

Three or more --baseline, or one of --learn, show how much runs vary. A single one does not. Without thresholds, a
slowdown against a single baseline has exit code 5, never 4. A change below 3 % is then no change, and a change that
all bricks share is not called slower, because a clock causes it, too. The result is unknown (exit code 5) if a step
seems longer by over 10 % or a token by over 25 %, within an interval as wide, if more steps fail, or if over 10 % of
the new run's time is in steps that the baseline lacks. It is also unknown if the machine's own speed right before and
after COMMAND differs by over 10 % from its speed around the baseline; --anyway judges nevertheless.

Without thresholds, a slower COMMAND runs once more. A brick is broken if both runs show it, and unsure if one does.
If the runs show different bricks, the exit code is 5.

A change of 5 % in one brick of one layer is found 95 times in 100 with 240 steps or more, 7 % with 120, 10 % with 60:
see docs/gate.md. Each comparison reports the change that it would have found.

exit codes: 0 all hold, 1 runtime error, 2 usage, 3 nothing recorded or too few steps, 4 something is slower or over
its budget, or a check of a brick failed, 5 not comparable, data not trustworthy, unknown, or an unsure threshold
"""
CHECKS = "checks of bricks"
CONTRACTS = "contracts"
DEMO_RUNS = 7
FORMATS = ("text", "markdown", "json", "junit", "sarif", "github")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("threshold", nargs="*", metavar="THRESHOLD", help="such as 'attn.p50<=1.05x'; see below")
    parser.add_argument(
        "--baseline", action="append", default=[], metavar="BASE",
        help="the run to compare with; three or more show how much runs vary",
    )  # fmt: skip
    parser.add_argument("--new", metavar="NEW", help="the run to judge (default: a run of COMMAND)")
    parser.add_argument(
        "--budget", action="append", default=[], metavar="FILE.toml|contracts",
        help="use the thresholds in the table [budgets] of a file; or `contracts`: the limits in the contracts of "
        "cbtop's own kernels",
    )  # fmt: skip
    parser.add_argument(
        "--learn", type=count, metavar="N",
        help="run COMMAND N times, and write the results to --baseline; nothing is judged",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="with --learn: overwrite the file")
    parser.add_argument(
        "--format", type=_format, action="append", metavar="NAME[=FILE]",
        help=f"print the result, or write it to FILE: {', '.join(FORMATS)}; repeat for several (default: text)",
    )  # fmt: skip
    parser.add_argument(
        "--allow-unsure", action="store_true",
        help="let a threshold pass if its limit is within the interval of the measurement (default: exit code 5)",
    )  # fmt: skip
    add_anyway_argument(parser)
    add_runs_arguments(parser)


def run(options: argparse.Namespace) -> int:
    from cbtop.comparison.structure import is_about_base, parse_any, split

    parsed = [parse_any(text) for text in options.threshold]
    for where in options.budget:
        parsed += [] if where == CONTRACTS else budgets(Path(where))
    thresholds, structural = split(parsed)
    if options.learn is not None:
        return _learn(options)
    if (options.new is None) == (not options.command):
        raise UsageError("pass either --new NEW or a command after --: it is the run to judge")
    by_contract = CONTRACTS in options.budget
    if by_contract:
        require_engine(f"cbtop check --budget {CONTRACTS}")
    needs_base = by_contract or not parsed or any(one.is_relative for one in thresholds)
    needs_base |= any(is_about_base(one) for one in structural)
    if not options.baseline and needs_base:
        raise UsageError("there is no baseline; pass --baseline BASE, or only thresholds without x or base")
    again = None if options.new is not None else partial(_run_of, options, "the second run")
    try:
        bases = [one for where in options.baseline for one in _runs_of_base(where, options)]
        news = runs_of(options.new, options) if options.new is not None else [_run_of(options)]
    except (CbtopError, ProtocolError, OSError) as error:
        _end_without_run(options, error)
        raise
    known = _judged_structure(structural, bases, news)
    if structural and not (thresholds or by_contract):
        return _gate_of_structure(known, bases or news, news, options)
    return gate(bases or news, news, thresholds, options, again, by_contract=by_contract, known=known)


def _runs_of_base(where: str, options: argparse.Namespace) -> list[Run]:
    if not (where.isdecimal() or Path(where).exists()):
        raise UsageError(
            f"there is no baseline {where}; write it at the commit to compare with: cbtop check --baseline "
            f"{shlex.quote(where)} --learn 6 -- COMMAND"
        )
    return runs_of(where, options)


def gate_of_demo(command: Sequence[str], report: str) -> int:
    """Run the demo's workload several times, and judge the last run as `cbtop check` does. The earlier runs are its
    baseline.

    `command` is the workload's command line.
    """
    options = argparse.Namespace(
        baseline=[], connect=None, server_key=None, key=None, source=None, anyway=False, allow_unsure=False,
        format=[(report, None)],
    )  # fmt: skip
    runs = [run_of_command(command, "the demo", options, f"run {number + 1}") for number in range(DEMO_RUNS)]
    try:
        again = partial(run_of_command, command, "the demo", options, f"run {DEMO_RUNS + 1}")
        return gate(runs[:-1], runs[-1:], [], options, again, by_definition=False)
    except UntrustedError:
        sys.stderr.write(
            "cbtop: it could not be judged; stop other programs, or run longer: cbtop demo --check --steps N\n"
        )
        raise


def gate(
    bases: Sequence[Run],
    news: Sequence[Run],
    thresholds: Sequence[Threshold],
    options: argparse.Namespace,
    again: Callable[[], Run] | None = None,
    *,
    by_contract: bool = False,
    by_definition: bool = True,
    known: Sequence[Judged] = (),
) -> int:
    """Judge the runs, print the result, and raise the error that sets the exit code.

    `known` are results that do not depend on times. Without thresholds, `again` measures once more after a slowdown.
    The slowdown counts only if the second run is slower, too. `by_contract` also judges the factors in contracts, and
    `by_definition` the budgets in definitions. The demo's budgets are not judged, because each run derives them from
    a newly measured roof.
    """
    from cbtop.comparison.causes import with_causes
    from cbtop.comparison.default_gate import default_gate, known_to_scatter
    from cbtop.comparison.judged import only_if_trusted
    from cbtop.comparison.threshold_grammar import LOSS
    from cbtop.comparison.thresholds import judge, of_contracts
    from cbtop.reports.gate import summary

    if len(news) == 2:
        raise UsageError(f"{options.new} contains 2 runs; pass 1 run, or at least 3 so that their variation is known")
    judges_loss = any(one.names[-1] == LOSS for one in thresholds)
    found = _compared(bases, news, options, may_lack_records=judges_loss)
    if found.why_not:
        judged = [*known, _not_judged(found)]
        error = FailedCheckError(summary(judged)) if _is_broken(known) else _not_comparable(found)
        _end(judged, found, options, error)
    judged = [one for threshold in thresholds for one in judge(threshold, found)]
    if by_contract:
        judged += of_contracts(found, _bounds(found.now))
    judged = _allowed(judged, options)
    besides = _allowed(_besides(found, by_definition=by_definition), options)
    if not judged:
        judged = known_to_scatter(default_gate(found), found.base.runs)
        if again is not None and _is_broken(judged) and not (_is_broken(besides) or found.now.untrusted):
            judged, found = _confirmed(judged, [*known, *besides], found, bases, options, again)
            besides = _allowed(_besides(found, by_definition=by_definition), options)
    if bases is not news:
        judged = with_causes(judged, found)
    judged = only_if_trusted([*known, *judged, *besides], found)
    if bases is not news:
        _warn_of_few(len(bases), judged, has_thresholds=bool(thresholds) or by_contract)
    _end(judged, found, options, _error_of(judged))
    return 0


def _confirmed(
    judged: list[Judged],
    besides: list[Judged],
    found: RunDiff,
    bases: Sequence[Run],
    options: argparse.Namespace,
    again: Callable[[], Run],
) -> tuple[list[Judged], RunDiff]:
    """Make another new run.

    Return the slowdowns of both new runs, and the second run's comparison with the baseline. If the second run fails
    or cannot be compared, write the first run's results and raise the error.
    """
    from cbtop.comparison.default_gate import confirmed, default_gate, unconfirmed
    from cbtop.reports.gate import tally

    sys.stderr.write(f"cbtop: {tally(judged)}; another run checks whether that persists\n")
    try:
        second = _compared(bases, [again()], options, may_lack_records=False)
        if second.why_not:
            raise _not_comparable(second)
    except (CbtopError, ProtocolError, OSError, KeyboardInterrupt) as error:
        why = str(error) or "it was interrupted"
        _end([*unconfirmed(judged, why), *besides], found, options, error)
        raise
    return confirmed(judged, default_gate(second)), second


def _error_of(judged: Sequence[Judged]) -> CbtopError | None:
    """Return the error that sets the exit code, or None if the check passes."""
    from cbtop.reports.gate import summary

    if _is_broken(judged):
        return FailedCheckError(summary(judged))
    if not all(one.passes for one in judged):
        return UntrustedError(summary(judged))
    return None


def _allowed(judged: Sequence[Judged], options: argparse.Namespace) -> list[Judged]:
    """Return the results of the check. Unsure results pass if the user's options allow it."""
    from cbtop.comparison.judged import must_be_sure

    return list(judged) if options.allow_unsure else must_be_sure(judged)


def _judged_structure(thresholds: Sequence[Structural], bases: Sequence[Run], news: Sequence[Run]) -> list[Judged]:
    """Judge the thresholds on counts, such as the number of launches. The machine's speed does not matter for
    them.
    """
    from cbtop.comparison.contents import contents_together
    from cbtop.comparison.structure import judge_structure, of_lost_records

    if not thresholds:
        return []
    if lost := of_lost_records(thresholds, [*bases, *news]):
        return lost
    base = contents_together([run.contents for run in bases]) if bases else None
    now = contents_together([run.contents for run in news], needs_all=True)
    return [one for threshold in thresholds for one in judge_structure(threshold, base, now)]


def _gate_of_structure(
    judged: Sequence[Judged], bases: Sequence[Run], news: Sequence[Run], options: argparse.Namespace
) -> int:
    """Report the results that do not depend on times, and return the exit code. Times cannot be judged: the runs are
    too short, or not comparable.
    """
    from cbtop.comparison.judged import only_if_trusted
    from cbtop.comparison.run_diff import RunDiff

    found = RunDiff(bases[0], news[0])
    judged = only_if_trusted([*judged, *_besides(found, by_definition=False)], found)
    _end(judged, found, options, _error_of(judged))
    return 0


def _warn_of_few(base_runs: int, judged: Sequence[Judged], *, has_thresholds: bool) -> None:
    """With only one or two base runs, write to stderr how this limits the result, unless a verdict already says
    so.
    """
    from cbtop.comparison.default_gate import SCATTER_UNKNOWN
    from cbtop.comparison.noise import MIN_LEARNED

    if not 0 < base_runs < MIN_LEARNED:
        return
    if base_runs > 1:
        sys.stderr.write(
            "cbtop: 2 base runs do not show how runs vary, so only the first is used, completed by the second; "
            "pass 3 or more\n"
        )
    if not (has_thresholds or any(SCATTER_UNKNOWN in one.said for one in judged)):
        sys.stderr.write(
            "cbtop: 1 base run does not show how runs vary, so a slowdown is reported with exit code 5, never 4; "
            f"pass {MIN_LEARNED} or more (--learn 6)\n"
        )


def _compared(
    bases: Sequence[Run],
    news: Sequence[Run],
    options: argparse.Namespace,
    *,
    may_lack_records: bool,
    known: Sequence[Judged] = (),
) -> RunDiff:
    from cbtop.comparison.run_diff import diff_of

    return diff_of(bases, news, anyway=options.anyway, may_lack_records=may_lack_records)


def _not_judged(found: RunDiff) -> Judged:
    """Return the single verdict "not judged" with the reason why the runs are not comparable."""
    from cbtop.comparison.judged import Judged, Outcome

    return Judged("comparable" if found.has_baseline else "judged", "", Outcome.UNKNOWN, found.why_not)


def _not_comparable(found: RunDiff) -> CbtopError:
    return (NoDataError if found.is_too_little else UntrustedError)(f"not judged: {found.why_not}")


def _besides(found: RunDiff, *, by_definition: bool) -> list[Judged]:
    """Return the results of checks that need no thresholds: the checks of brick outputs, and the checks of budgets in
    definition files.
    """
    from cbtop.comparison.judged import Judged, Outcome
    from cbtop.comparison.thresholds import of_definitions

    return (of_definitions(found) if by_definition else []) + [
        Judged(CHECKS, check, Outcome.BROKEN, f"the check failed: {_meaning(assertion)}", brick)
        for check in found.now.failed_checks
        for brick, _, assertion in [check.partition(": ")]
    ]


def _meaning(assertion: str) -> str:
    if assertion.startswith(PRECONDITION):
        return "its input breaks a precondition"
    return "its result is wrong"


def _is_broken(judged: Sequence[Judged]) -> bool:
    from cbtop.comparison.judged import Outcome

    return any(one.outcome is Outcome.BROKEN for one in judged)


def budgets(path: Path) -> list[Threshold | Structural]:
    """Read the thresholds from a TOML file. Raises UsageError if the file or one of its thresholds is invalid."""
    from cbtop.comparison.structure import parse_any

    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from error
    wanted = ("budgets",), ("tool", "cbtop", "budgets")
    tables = [table for names in wanted if (table := _table_at(document, names)) is not None]
    if not tables:
        raise UsageError(f"{path}: the file has no table [budgets] or [tool.cbtop.budgets]; add one")
    lines = text.splitlines()
    return [
        parse_any(f"{name}{value}", (str(path), _line(lines, name, value)))
        for table in tables
        for name, value in _flat(path, table, ())
    ]


def _bounds(run: Run) -> dict[Brick, tuple[float, tuple[str, int]]]:
    """Return how much slower each brick's calls may become, with the file and line of the contract.

    Raises UsageError if no contract allows a slow-down.
    """
    # Imported here, because loading Numba and every kernel takes half a second.
    from cbtop.compute.contracts import file_of
    from cbtop.compute.kernels import all_kernels
    from cbtop.compute.verification import variants

    # Look up the kernels of this processor and all others, because the run may have been made on another processor.
    kernels = (*(variant.kernel for variant in variants()), *all_kernels())
    contracts = {kernel.name: kernel.contract for kernel in kernels}
    found = {}
    for brick, names in run.kernels.items():
        of = [contracts[name] for name in names if name in contracts]
        bounds = [(one.performance.regression, one) for one in of]
        if names and len(bounds) == len(names):
            limit, contract = max(bounds, key=lambda one: one[0])
            found[brick] = limit, (os.path.relpath(file_of(contract.name)), contract.line_of("regression"))
    if not found:
        raise UsageError(
            f"--budget {CONTRACTS}: no brick of {run.name} runs a kernel with a bound in its contract; pass "
            "--budget FILE or --threshold"
        )
    return found


def _table_at(document: Any, names: Sequence[str]) -> dict[str, Any] | None:
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document if isinstance(document, dict) else None


def _flat(path: Path, table: dict[str, Any], above: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        names = (*above, key)
        if isinstance(value, dict):
            yield from _flat(path, value, names)
        elif isinstance(value, str):
            yield ".".join(names), value
        else:
            raise UsageError(f'{path}: {".".join(names)} = {value!r}; write it as a text, such as "<=1.05x"')


def _line(lines: Sequence[str], name: str, value: str) -> int:
    """Return the line (from 1) of the budget with this name and value.

    It is the first line with both `value` and the last part of the dotted `name`, or else 1.
    """
    last = name.rpartition(".")[2]
    return next((at for at, line in enumerate(lines, 1) if last in line and value in line), 1)


def _learn(options: argparse.Namespace) -> int:
    from cbtop.comparison.noise import MIN_LEARNED
    from cbtop.comparison.run_diff import diff_of
    from cbtop.feeds.run_file import write_runs
    from cbtop.reports.run_diff import power

    if not options.command or len(options.baseline) != 1 or options.new is not None:
        raise UsageError("--learn needs one --baseline FILE.json to write and a command after --, and no --new")
    if options.threshold or options.budget or options.format or options.allow_unsure:
        raise UsageError(
            "--learn judges nothing, so it takes no thresholds, --budget, --format or --allow-unsure; pass them to "
            "the check that compares with its file"
        )
    path = Path(options.baseline[0])
    if path.exists() and not options.force:
        raise UsageError(f"{path} exists; pass --force to overwrite it")
    runs = [_run_of(options, f"run {number + 1}") for number in range(options.learn)]
    if short := next((run for run in runs if not run.parts), None):
        raise NoDataError(f"{short.name}: it has too few steps for a comparison; let it run longer")
    write_runs(path, runs, overwrite=options.force)
    sys.stderr.write(f"cbtop: wrote {counted(len(runs), 'run')} into {path}\n")
    if len(runs) > MIN_LEARNED:
        for part in diff_of(runs[:-1], runs[-1:], anyway=True).parts:
            sys.stderr.write(f"cbtop: {part.phase}, {runs[-1].name} compared with those before: {power(part)}\n")
    return 0


def _run_of(options: argparse.Namespace, name: str = "the new run") -> Run:
    """Run the command after `--` and record it like `cbtop run --record`. Return the recorded run."""
    under = [sys.executable, "-m", "cbtop", "run", "--quiet", "--overhead", recorded_overhead(), "--"]
    return run_of_command([*under, *options.command], repr(shlex.join(options.command)), options, name)


def _end_without_run(options: argparse.Namespace, error: Exception) -> None:
    """Write into every result file why there was no run. Otherwise a file of an earlier check could be mistaken for
    this result.
    """
    from cbtop.comparison.judged import Judged, Outcome

    files = [(name, file) for name, file in options.format or () if file is not None]
    try:
        _write([Judged("judged", "", Outcome.UNKNOWN, str(error))], None, files, options.baseline)
    except UsageError as unwritten:
        sys.stderr.write(f"cbtop: {unwritten}\n")


def _end(judged: Sequence[Judged], found: RunDiff, options: argparse.Namespace, error: BaseException | None) -> None:
    """Write the result of the check in every format, then raise `error` if there is one.

    If a file cannot be written, raises UsageError, but only without `error`, because the verdict matters more.
    """
    try:
        _write(judged, found, options.format or [("text", None)], options.baseline)
    except UsageError as unwritten:
        if error is None:
            raise
        sys.stderr.write(f"cbtop: {unwritten}\n")
    if error is not None:
        raise error


def _write(
    judged: Sequence[Judged],
    found: RunDiff | None,
    formats: Sequence[tuple[str, Path | None]],
    baselines: Sequence[str],
) -> None:
    """Write the result of the check in every format. A file that cannot be written raises UsageError after the others
    are written.
    """
    unwritten = []
    # Write files before standard output. Standard output may be a closed pipe, and writing to it would end the
    # command.
    for name, file in sorted(formats, key=lambda one: one[1] is None):
        text = _written(judged, found, name, baselines) + "\n"
        if file is None:
            sys.stdout.write(text)
            sys.stdout.flush()
            continue
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            unwritten.append(f"--format {name}={file}: {error.strerror}")
    if unwritten:
        raise UsageError("; ".join(unwritten))


def _format(text: str) -> tuple[str, Path | None]:
    name, _, file = text.partition("=")
    return one_of("format", FORMATS)(name), Path(file) if file else None


def _written(judged: Sequence[Judged], found: RunDiff | None, name: str, baselines: Sequence[str]) -> str:
    from cbtop.reports import gate as report

    if name == "junit":
        run = found.now.name if found else ""
        cases = [
            (one.about or run, one.rule, [] if one.passes else [report.line_of(one)], "", report.line_of(one))
            for one in judged
        ]
        return junit("cbtop check", [("thresholds", cases)]).rstrip("\n")
    if name == "sarif":
        # file name in the output for a rule that no file defines
        beside = next(iter(baselines), found.now.name if found else "")
        rules = {one.rule: SarifRule(one.rule, one.rule, one.where[0] or beside, one.where[1]) for one in judged}
        failures = [Failure(rules[one.rule], report.line_of(one)) for one in judged if not one.passes]
        return sarif(list(rules.values()), failures).rstrip("\n")
    writers: dict[str, Callable[[Sequence[Judged], RunDiff | None], str]] = {
        "text": report.gate_text,
        "markdown": report.gate_markdown,
        "json": report.gate_json,
        "github": report.gate_github,
    }
    return writers[name](judged, found)
