"""Find the line of a contract file that a failure is about, and format failures of a user's bricks as SARIF."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cbtop.commands.shared.sarif import Failure, SarifRule, sarif

if TYPE_CHECKING:  # Numba loads slowly
    from cbtop.compute.own_bricks import OwnBrick
    from cbtop.compute.verification import Verified

CASES = "cases"
# An output's number follows the name of a planted fault if a brick has several outputs.
IN_OUTPUT = re.compile(r" in output \d+$")


class ContractLines:
    """The lines of a contract file, counted from 1. A line that is not found counts as the first line."""

    def __init__(self, path: Path) -> None:
        self.file = checkout_path(path)
        try:
            self._lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            self._lines = []

    def of_key(self, key: str) -> int:
        """Return the line of a key, such as `tolerance` or `falsification.outputs`."""
        return self._found(key) or 1

    def of_text(self, section: str, text: str) -> int:
        """Return the first line with `text` in a section, or the line of the section."""
        begin = self.of_key(section)
        return self._first(begin, lambda line: text in line.partition(" #")[0], begin)

    def of_case(self, number: int) -> int:
        """Return the line of a case, counted from 1."""
        line = self.of_key(CASES)
        for _ in range(number):
            line = self._first(line + 1, re.compile(r"\s*- ").match, line)
        return line

    def of_fault(self, fault: str) -> int:
        """Return the line that a fault of `contracts lint` is about."""
        if found := re.search(r"\bline (\d+), column", fault):
            return int(found[1])
        case = re.match(r"(?:cases: )?case (\d+): ", fault)
        about = IN_OUTPUT.sub("", fault[case.end() if case else 0 :].removesuffix(": no case falsifies it"))
        about = about.removesuffix(" does not hold")
        for kind in ("precondition", "postcondition"):
            if about.startswith(f"{kind} "):
                return self.of_text(f"{kind}s", about.removeprefix(f"{kind} ").partition(": ")[0])
        if case:
            return self.of_case(int(case[1]))
        if about in fault and about != fault:  # a planted fault
            return self.of_text("falsification", about)
        key = about.partition(": ")[0]
        quoted = re.findall(r"'([^']+)'", fault)
        return next(filter(None, [self._found(key), *map(self._containing, [key, *quoted])]), 1)

    def _found(self, key: str) -> int:
        """Return the line of a key, or 0."""
        line = 1
        for name in key.split("."):
            line = self._first(max(line, 1), re.compile(rf"\s*[\"']?{re.escape(name)}[\"']?\s*:").match, 0)
        return line

    def _containing(self, text: str) -> int:
        """Return the first line that contains `text`, or 0."""
        return self._first(1, lambda line: text in line, 0)

    def _first(self, begin: int, is_wanted: Callable[[str], object], otherwise: int) -> int:
        numbered = enumerate(self._lines[begin - 1 :], begin)
        return next((number for number, line in numbered if is_wanted(line)), otherwise)


def checkout_path(path: Path) -> str:
    """Return a path as SARIF has it: relative to the working directory if it is inside."""
    whole = path.resolve()
    return whole.relative_to(Path.cwd()).as_posix() if whole.is_relative_to(Path.cwd()) else whole.as_posix()


def own_brick_sarif(brick: OwnBrick, found: Sequence[Verified]) -> str:
    """Return a SARIF log of a user's brick. A failure is at the line of its contract, or else of its function."""
    rules = {rule.means: rule for rule in _rules(brick)}
    failures = {
        said: Failure(rules.get(about, rules[brick.name]), said)
        for one in found
        for about, said in _failed(brick, one)
    }
    return sarif(list(rules.values()), list(failures.values()))


def lint_sarif(faults: dict[str, list[str]]) -> str:
    """Return a SARIF log of the faults of contract files, by path."""
    failures = []
    for path, found in faults.items():
        lines = ContractLines(Path(path))
        for fault in found:
            line = lines.of_fault(fault)
            rule = SarifRule(f"contract/{Path(path).stem}/{line}", "a contract without faults", lines.file, line)
            failures.append(Failure(rule, fault))
    rules = {failure.rule.id: failure.rule for failure in failures}
    return sarif(list(rules.values()), failures)


def _rules(brick: OwnBrick) -> Iterator[SarifRule]:
    """Yield a rule for each checked property, and one for the function itself with the brick's name."""
    # The function may be an object with `__call__`, or a function of C, which has no code.
    code = getattr(brick.function, "__code__", None) or getattr(type(brick.function).__call__, "__code__", None)
    file = code.co_filename if code else sys.modules[brick.name.partition(":")[0]].__file__ or ""
    yield SarifRule(brick.name, brick.name, checkout_path(Path(file)), code.co_firstlineno if code else 1)
    contract = brick.contract
    if contract is None:
        return
    lines = ContractLines(contract.path)
    where = {f"equals {contract.reference.partition(':')[2]}": lines.of_key("tolerance")}
    where |= {one.name: lines.of_text("preconditions", one.expression.text) for one in contract.preconditions}
    where |= {one.name: lines.of_text("postconditions", one.expression.text) for one in contract.postconditions}
    faults = (*contract.output_faults, *(one.name for one in contract.argument_faults))
    where |= {fault: lines.of_text("falsification", fault) for fault in faults}
    for means, line in where.items():
        yield SarifRule(f"{contract.name}/{means}", means, lines.file, line)


def _failed(brick: OwnBrick, one: Verified) -> Iterator[tuple[str, str]]:
    """Yield the broken rule and the message for each failure of a call."""
    for failure in one.failed:
        check, _, note = failure.partition(": ")
        conditions = note.split("; ") if check.startswith("contract ") and not note.startswith("raises ") else []
        for about in conditions or [check]:
            yield about, f"{one.kernel} {one.how}: fails {about if conditions else failure}"
    for fault in one.missed:
        yield IN_OUTPUT.sub("", fault), f"{one.kernel}: no check notices {fault}"
