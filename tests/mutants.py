"""`make mutants`: plant small faults in important modules. The tests of each module must find its faults.

    python -m tests.mutants [MODULE …] [--each N] [--seed N] [--seconds N] [--jobs N]

A mutant is a module with one comparison, operator, number or condition changed. It is created in memory when a new
process imports the module, so no file changes. The seed draws some mutants of each module. Those not found are listed
with their lines. Exits with 1 if fewer than four of five were found in any module.
"""

# No existing tool fits: mutmut copies the tree, and here packages are links. cosmic-ray writes each mutant into the
# working tree and starts Python and pytest each time.

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).parents[1]
WANTED = 0.80
# The files of tests for each module, the fastest first. The first failing test finds the mutant.
MODULES: dict[str, tuple[str, ...]] = {
    "cbtop.protocol.ring": (
        "tests/protocol/test_ring.py",
        "tests/profiler/test_recorder.py",
        "tests/cbtop/daemon/test_source.py",
    ),
    "cbtop.protocol.ring_reader": (
        "tests/protocol/test_ring_reader.py",
        "tests/protocol/test_ring.py",
        "tests/protocol/test_record_batch.py",
        "tests/cbtop/daemon/test_source.py",
    ),
    "cbtop.protocol.codec": ("tests/protocol/test_codec.py", "tests/protocol/test_hostile.py"),
    "cbtop.profiler.analysis.histograms": ("tests/profiler/analysis/test_histograms.py",),
    "cbtop.profiler.analysis.calls": ("tests/profiler/analysis/test_stats.py",),
    "cbtop.profiler.analysis.growth": ("tests/profiler/analysis/test_stats.py", "tests/cbtop/client/test_window.py"),
    "cbtop.profiler.analysis.running_steps": (
        "tests/profiler/analysis/test_running_steps.py",
        "tests/cbtop/viewmodels/test_time_breakdown.py",
    ),
    "cbtop.profiler.analysis.sparse_columns": (
        "tests/profiler/analysis/test_stats.py",
        "tests/profiler/analysis/test_running_steps.py",
    ),
    "cbtop.profiler.analysis.special_records": (
        "tests/profiler/analysis/test_stats.py",
        "tests/profiler/test_plain_steps.py",
    ),
    "cbtop.profiler.analysis.step_intervals": (
        "tests/profiler/analysis/test_step_intervals.py",
        "tests/cbtop/test_steps_in_the_window.py",
    ),
    "cbtop.profiler.analysis.stats": (
        "tests/profiler/analysis/test_stats.py",
        "tests/profiler/analysis/test_phase_totals.py",
        "tests/cbtop/viewmodels/test_time_breakdown.py",
        "tests/cbtop/test_steps_in_the_window.py",
        "tests/cbtop/test_every_hop.py",
    ),
    "cbtop.profiler.analysis.time_breakdown": (
        "tests/cbtop/viewmodels/test_time_breakdown.py",
        "tests/cbtop/viewmodels/test_source_view.py",
    ),
    "cbtop.viewmodels.training": ("tests/cbtop/viewmodels/test_training.py",),
    "cbtop.viewmodels.gradients": ("tests/cbtop/viewmodels/test_gradients.py",),
    "cbtop.comparison.training_measures": ("tests/cbtop/comparison/test_training_parts.py",),
    "cbtop.comparison.training_parts": ("tests/cbtop/comparison/test_training_parts.py",),
    "cbtop.viewmodels.time_breakdown": ("tests/cbtop/viewmodels/test_time_breakdown.py",),
    "cbtop.viewmodels.merge": (
        "tests/cbtop/viewmodels/test_merge.py",
        "tests/cbtop/viewmodels/test_straggler.py",
        "tests/cbtop/test_rates.py",
    ),
    "cbtop.comparison.comparison": (
        "tests/cbtop/comparison/test_comparison.py",
        "tests/cbtop/viewmodels/test_snapshot.py",
    ),
    "cbtop.comparison.noise": ("tests/cbtop/comparison/test_noise.py", "tests/cbtop/tuning/test_paired.py"),
    "cbtop.comparison.quantiles": ("tests/cbtop/comparison/test_quantiles.py",),
    "cbtop.comparison.drift": (
        "tests/cbtop/comparison/test_drift.py",
        "tests/cbtop/comparison/test_steadiness.py",
    ),
    "cbtop.comparison.tails": ("tests/cbtop/comparison/test_tails.py",),
    "cbtop.comparison.steadiness": ("tests/cbtop/comparison/test_steadiness.py",),
    "cbtop.comparison.run_sets": ("tests/cbtop/comparison/test_run_sets.py",),
    "cbtop.comparison.runs": (
        "tests/cbtop/comparison/test_runs.py",
        "tests/cbtop/comparison/test_run_diff.py",
        "tests/cbtop/commands/test_diff.py",
        "tests/cbtop/feeds/test_run_file.py",
    ),
    "cbtop.comparison.part_diff": (
        "tests/cbtop/comparison/test_run_diff.py",
        "tests/cbtop/comparison/test_thresholds.py",
    ),
    "cbtop.comparison.run_diff": (
        "tests/cbtop/comparison/test_run_diff.py",
        "tests/cbtop/comparison/test_thresholds.py",
        "tests/cbtop/commands/test_diff.py",
    ),
    "cbtop.comparison.bisect_verdict": ("tests/cbtop/comparison/test_bisect_verdict.py",),
    "cbtop.comparison.batches": ("tests/cbtop/comparison/test_rates_of_thresholds.py",),
    "cbtop.comparison.rate_blocks": ("tests/cbtop/comparison/test_rate_blocks.py",),
    "cbtop.comparison.phase_rates": ("tests/cbtop/comparison/test_phase_rates.py",),
    "cbtop.comparison.rate_diff": (
        "tests/cbtop/comparison/test_rates_of_thresholds.py",
        "tests/cbtop/comparison/test_default_gate.py",
    ),
    "cbtop.comparison.rate_measures": (
        "tests/cbtop/comparison/test_rates_of_thresholds.py",
        "tests/cbtop/comparison/test_training_parts.py",
    ),
    "cbtop.comparison.default_gate": (
        "tests/cbtop/comparison/test_default_gate.py",
        "tests/cbtop/comparison/test_rates_of_thresholds.py",
    ),
    "cbtop.comparison.threshold_grammar": ("tests/cbtop/comparison/test_threshold_grammar.py",),
    "cbtop.comparison.thresholds": (
        "tests/cbtop/comparison/test_thresholds.py",
        "tests/cbtop/comparison/test_rates_of_thresholds.py",
    ),
    "cbtop.comparison.baseline": ("tests/cbtop/comparison/test_baseline.py",),
    "cbtop.comparison.call_counts": (
        "tests/cbtop/comparison/test_call_counts.py",
        "tests/cbtop/comparison/test_place_changes.py",
        "tests/cbtop/comparison/test_comparison.py",
    ),
    "cbtop.comparison.causes": ("tests/cbtop/comparison/test_causes.py",),
    "cbtop.comparison.contents": (
        "tests/cbtop/comparison/test_contents.py",
        "tests/cbtop/comparison/test_contents_diff.py",
        "tests/cbtop/comparison/test_structure.py",
    ),
    "cbtop.comparison.contents_diff": (
        "tests/cbtop/comparison/test_contents_diff.py",
        "tests/cbtop/comparison/test_causes.py",
    ),
    "cbtop.comparison.items": (
        "tests/cbtop/comparison/test_runs.py",
        "tests/cbtop/viewmodels/test_snapshot.py",
        "tests/cbtop/comparison/test_comparison.py",
    ),
    "cbtop.comparison.judged": (
        "tests/cbtop/comparison/test_judged.py",
        "tests/cbtop/comparison/test_structure.py",
        "tests/cbtop/comparison/test_default_gate.py",
        "tests/cbtop/comparison/test_rates_of_thresholds.py",
    ),
    "cbtop.comparison.machine_differences": (
        "tests/cbtop/comparison/test_runs.py",
        "tests/cbtop/comparison/test_run_diff.py",
        "tests/cbtop/comparison/test_default_gate.py",
    ),
    "cbtop.comparison.place_changes": (
        "tests/cbtop/comparison/test_place_changes.py",
        "tests/cbtop/comparison/test_comparison.py",
        "tests/cbtop/comparison/test_run_diff.py",
    ),
    "cbtop.comparison.places_together": (
        "tests/cbtop/comparison/test_places_together.py",
        "tests/cbtop/comparison/test_run_sets.py",
    ),
    "cbtop.comparison.renamed": ("tests/cbtop/comparison/test_renamed.py",),
    "cbtop.comparison.step_blocks": (
        "tests/cbtop/comparison/test_step_blocks.py",
        "tests/cbtop/comparison/test_runs.py",
        "tests/cbtop/comparison/test_drift.py",
    ),
    "cbtop.comparison.step_counts": (
        "tests/cbtop/comparison/test_step_counts.py",
        "tests/cbtop/comparison/test_structure.py",
    ),
    "cbtop.comparison.structure": ("tests/cbtop/comparison/test_structure.py",),
    "cbtop.tuning.paired": ("tests/cbtop/tuning/test_paired.py",),
}
# The warning is ignored because modules are loaded before the fork, where pytest cannot rewrite their assertions.
OPTIONS = (
    "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=1",
    "-W", "ignore::pytest.PytestAssertRewriteWarning",
)  # fmt: skip
# Modules that are loaded before the fork to save time. A module of cbtop must not be in this list, because the forked
# process would not load the mutant of this module.
LOADED = (
    "hypothesis", "jinja2", "msgpack", "numpy", "pytest", "pytest_asyncio", "syrupy", "textual.app", "trio", "yaml",
    "zmq",
)  # fmt: skip
# Time limit of a mutant: this number of seconds, plus PATIENCE times the time of its tests without a mutant.
GRACE_S = 20.0
PATIENCE = 4
POLL_S = 0.02

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one node of the syntax tree.

    `place` is the number of the node in the order of `ast.walk`. `part` is the number of the operand if the node has
    several.
    """

    module: str
    place: int
    part: int
    line: int
    change: str


def mutants(module: str, tree: ast.Module) -> list[Mutant]:
    """Return all mutants of a module. Annotations, decorators and error messages are not changed."""
    left_out: set[int] = set()
    for node in ast.walk(tree):
        hidden: list[ast.AST | None] = []
        if isinstance(node, ast.Raise):
            hidden = [node]
        elif isinstance(node, ast.AnnAssign):
            hidden = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            hidden = [*node.decorator_list, node.returns]
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            # `strict` of zip cannot be tested, because the lengths are equal in all calls.
            hidden = [node]
        elif isinstance(node, ast.ClassDef):
            hidden = [*node.decorator_list]
        elif isinstance(node, ast.arg):
            hidden = [node.annotation]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            hidden = [node]
        left_out |= {id(each) for one in hidden if one is not None for each in ast.walk(one)}
    found = []
    for place, node in enumerate(ast.walk(tree)):
        if id(node) not in left_out:
            found += [
                Mutant(module, place, part, getattr(node, "lineno", 0), change) for part, change in _changes(node)
            ]
    return found


def _changes(node: ast.AST) -> Iterator[tuple[int, str]]:
    match node:
        case ast.Compare(ops=ops):
            for part, each in enumerate(ops):
                yield part, f"{type(each).__name__} → {COMPARISONS[type(each)].__name__}"
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            if not isinstance(node, ast.BinOp) or not _is_text(node):
                yield 0, f"{type(op).__name__} → {OPERATORS[type(op)].__name__}"
        case ast.BoolOp(op=op):
            yield 0, "and → or" if isinstance(op, ast.And) else "or → and"
        case ast.UnaryOp(op=ast.Not()):
            yield 0, "not x → x"
        case ast.UnaryOp(op=ast.USub()):
            yield 0, "-x → x"
        case ast.Constant(value=bool(value)):
            yield 0, f"{value} → {not value}"
        case ast.Constant(value=int(value)):
            yield 0, f"{value} → {value + 1}"
        case ast.Constant(value=float(value)):
            yield 0, f"{value} → {value * 1.5 + 0.5}"
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield 0, "return … → return None"
        case ast.Continue():
            yield 0, "continue → break"
        case ast.Break():
            yield 0, "break → continue"


def _is_text(node: ast.BinOp) -> bool:
    """Return whether the operation joins or formats text."""
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in (node.left, node.right)
    )


def mutated(tree: ast.Module, mutant: Mutant) -> ast.Module:
    """Return a copy of `tree` with the change."""
    tree = copy.deepcopy(tree)
    node = next(node for place, node in enumerate(ast.walk(tree)) if place == mutant.place)
    new: ast.AST | None = None
    match node:
        case ast.Compare(ops=ops):
            ops[mutant.part] = COMPARISONS[type(ops[mutant.part])]()
        case ast.BinOp(op=op) | ast.AugAssign(op=op):
            node.op = OPERATORS[type(op)]()
        case ast.BoolOp(op=op):
            node.op = ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.UnaryOp(operand=operand):
            new = operand
        case ast.Constant(value=bool(value)):
            node.value = not value
        case ast.Constant(value=int(value)):
            node.value = value + 1
        case ast.Constant(value=float(value)):
            node.value = value * 1.5 + 0.5
        case ast.Return():
            node.value = ast.Constant(None)
        case ast.Continue():
            new = ast.Break()
        case ast.Break():
            new = ast.Continue()
    if new is not None:
        _replace(tree, node, new)
    return ast.fix_missing_locations(tree)


def _replace(tree: ast.Module, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list) and any(one is old for one in value):
                setattr(parent, name, [new if one is old else one for one in value])


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        return self._code


class _Finder(importlib.abc.MetaPathFinder):
    """An import finder that loads one module from changed code."""

    def __init__(self, name: str, path: Path, code: CodeType) -> None:
        self._name, self._path, self._code = name, path, code

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        loader = _Loader(name, str(self._path), self._code)
        return importlib.util.spec_from_file_location(name, self._path, loader=loader)


def file_of(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def is_found(code: CodeType | None, module: str, tests: Sequence[str]) -> int:
    """Start the tests of a module in a forked process. Returns its process id.

    `code` replaces the code of the module. With None, the module stays as it is.
    """
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    if code is not None:
        sys.meta_path.insert(0, _Finder(module, file_of(module), code))
    import pytest

    result = 1
    with contextlib.suppress(BaseException):
        result = int(pytest.main([*tests, *OPTIONS]))
    os._exit(result)


def ended(pid: int, deadline_s: float) -> bool | None:
    """Return whether the tests passed, or None while they run. Tests beyond the deadline count as failed."""
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
        return os.waitstatus_to_exitcode(status) == 0
    if time.monotonic() < deadline_s:
        return None
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


@dataclass
class Tally:
    """The results of one module: how many mutants were tried, and which mutants no test found."""

    tried: int
    survived: list[Mutant]


def run(modules: Sequence[str], each: int, seed: int, seconds: float, jobs: int) -> dict[str, Tally]:
    """Try the selected mutants until all are tried or the time is over.

    The modules take turns. Returns the results by module.
    """
    begun_s = time.monotonic()
    trees = {module: ast.parse(file_of(module).read_text(encoding="utf-8")) for module in modules}
    patience_s = {}
    for module in modules:
        at_s = time.monotonic()
        pid = is_found(None, module, MODULES[module])
        while (passed := ended(pid, at_s + 600)) is None:
            time.sleep(POLL_S)
        if not passed:
            raise SystemExit(f"the tests of {module} fail as it is: {' '.join(MODULES[module])}")
        patience_s[module] = PATIENCE * (time.monotonic() - at_s) + GRACE_S
        _say(f"{module}: {len(mutants(module, trees[module]))} mutants, tests take {time.monotonic() - at_s:.1f} s")
    drawn = {}
    for module in modules:
        all_of_them = mutants(module, trees[module])
        drawn[module] = random.Random(seed).sample(all_of_them, min(each, len(all_of_them)))
    turns = [drawn[module][turn] for turn in range(each) for module in modules if turn < len(drawn[module])]
    found = {module: Tally(0, []) for module in modules}
    running: dict[int, tuple[Mutant, float]] = {}
    while turns or running:
        while turns and len(running) < jobs and time.monotonic() - begun_s < seconds:
            mutant = turns.pop(0)
            code = compile(mutated(trees[mutant.module], mutant), str(file_of(mutant.module)), "exec")
            deadline_s = time.monotonic() + patience_s[mutant.module] * jobs
            running[is_found(code, mutant.module, MODULES[mutant.module])] = mutant, deadline_s
        if not running:
            break
        for pid, (mutant, deadline_s) in list(running.items()):
            passed = ended(pid, deadline_s)
            if passed is not None:
                del running[pid]
                found[mutant.module].tried += 1
                if passed:
                    found[mutant.module].survived.append(mutant)
                    _say(f"survived: {mutant.module}:{mutant.line}: {mutant.change}")
        time.sleep(POLL_S)
    return found


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(MODULES)} (default: all)")
    parser.add_argument("--each", type=int, default=60, metavar="N", help="mutants of a module (default: 60)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="draws others (default: 1)")
    parser.add_argument("--seconds", type=float, default=1800, metavar="N", help="begin none after (default: 1800)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="at a time (default: 2)")
    options = parser.parse_args()
    if unknown := set(options.modules) - set(MODULES):
        parser.error(f"{', '.join(unknown)}: there are {', '.join(MODULES)}")
    for name in LOADED:
        importlib.import_module(name)
    # The name is short, because the path of a socket in this directory may have only 107 bytes.
    with tempfile.TemporaryDirectory(prefix="cbm-") as directory:
        os.environ["TMPDIR"] = directory
        tempfile.tempdir = None
        os.chdir(ROOT)
        found = run(options.modules or list(MODULES), options.each, options.seed, options.seconds, options.jobs)
    for module, tally in found.items():
        if tally.tried:
            killed = tally.tried - len(tally.survived)
            _say(f"{module:<30}{killed:>4} of {tally.tried:>3} found, {100 * killed / tally.tried:.0f} %")
    tried = sum(tally.tried for tally in found.values())
    killed = tried - sum(len(tally.survived) for tally in found.values())
    share = 100 * killed / max(tried, 1)
    _say(f"{killed} of {tried} mutants were found, {share:.1f} %; {100 * WANTED:.0f} % are wanted")
    return int(not tried or any(one.tried - len(one.survived) < WANTED * one.tried for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
