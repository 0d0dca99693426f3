"""The contracts of kernels, one YAML file per operation. A contract states what the operation computes, the
conditions of a call, and how to break these conditions."""

# All facts about a contract are in its YAML file and nowhere else. Kernels read their tolerance from the file. `cbtop
# verify` and the tests read the faults to plant. Runs with `--check-contracts` read the conditions.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cbtop.compute.contracts.conditions import Failed, failing
from cbtop.compute.contracts.expressions import Expression, ExpressionError, Values, parsed
from cbtop.compute.errors import ContractError
from cbtop.compute.jit.halves import bits, numbers

FOLDER = Path(__file__).parent
# The roof of kernels that read weights: the bandwidth over a working set as large as the model's weights.
WEIGHTS = "weights_read"
# libyaml reads the contracts in 0.03 s, and PyYAML's loader in Python in 0.3 s. PyYAML may have been built without
# libyaml.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class ArgumentChange:
    """A fault that is planted by changing a call's arguments.

    `values` has an expression for each changed argument. The expression is evaluated on the unchanged arguments.
    """

    name: str
    values: Mapping[int, Expression]

    def of(self, arguments: Values) -> tuple[Any, ...]:
        """Return the arguments of a call after the change. Their arrays are contiguous, as kernels require."""
        changed = list(arguments)
        for place, expression in self.values.items():
            value = expression.evaluate(arguments)
            changed[place] = np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value
        return tuple(changed)


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on the arguments of a call, with a name like `precondition finite(x)`.

    `broken_by` changes the arguments so that the condition does not hold.
    """

    name: str
    expression: Expression
    broken_by: ArgumentChange

    def holds(self, values: Values) -> bool:
        """Return whether the condition holds. A condition that cannot be evaluated does not hold.

        `values` are the arguments of a call. For a postcondition, `values` are the arguments after the call, followed
        by the arguments before the call.
        """
        with np.errstate(all="ignore"):
            try:
                return bool(self.expression.evaluate(numbers(values)))
            except (ArithmeticError, IndexError, TypeError, ValueError):
                return False


class Checks:
    """Conditions that are evaluated together.

    `failed(values)` returns 0 if all conditions hold. Otherwise bit n is set if condition n does not hold.

    `values` is a tuple with the values that `Condition.holds` takes. The first call of `failed` compiles the
    conditions.
    """

    def __init__(self, conditions: Sequence[Condition], arguments: Sequence[str]) -> None:
        self._conditions = tuple(conditions)
        self._arguments = arguments
        self.failed: Failed = self._first

    def names_of(self, failed: int) -> Iterator[str]:
        """Return the names of the conditions that fail. Bit n of `failed` is set if condition n does not hold."""
        return (one.name for number, one in enumerate(self._conditions) if failed >> number & 1)

    def all_of(self, values: Values) -> list[tuple[str, bool]]:
        """Return the name of each condition, and whether it holds for `values`."""
        failed = self.failed(values)
        return [(one.name, not failed >> number & 1) for number, one in enumerate(self._conditions)]

    def _first(self, values: Values) -> int:
        expressions, meaning = zip(*[(one.expression, one.holds) for one in self._conditions], strict=True)
        self.failed = failing(expressions, self._arguments, meaning)
        return self.failed(values)


@dataclass(frozen=True, slots=True)
class Performance:
    """The speed of a kernel: the share of a roof (peak rate) that it reached when it was measured.

    `roof` is the name of a ceiling (see `ceilings`). Kernels that read weights have the roof WEIGHTS, and only their
    bricks get time budgets.

    A call is a regression if it takes `regression` times as long as was measured.
    """

    roof: str
    fraction: float
    where: str
    when: str
    regression: float


@dataclass(frozen=True, slots=True)
class Contract:
    """The contract of an operation: what its kernels must fulfil, and ways to check it.

    - `tolerance` limits max|difference| / max|reference| of an output.
    - `output_faults` are names of `verification.FAULTS`, which are planted in outputs.
    - `argument_faults` change the kernel's arguments.
    - `before` and `after` evaluate the conditions.
    - `earlier` has the indices of arguments that some postconditions need as they were before the call.
    """

    name: str
    equations: str
    arguments: tuple[str, ...]
    tolerance: float
    preconditions: tuple[Condition, ...]
    postconditions: tuple[Condition, ...]
    output_faults: tuple[str, ...]
    argument_faults: tuple[ArgumentChange, ...]
    performance: Performance
    before: Checks = field(init=False)
    after: Checks = field(init=False)
    earlier: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        names = {name for condition in self.postconditions for name in condition.expression.earlier}
        for name, value in (
            ("before", Checks(self.preconditions, self.arguments)),
            ("after", Checks(self.postconditions, self.arguments)),
            ("earlier", frozenset(self.arguments.index(name) for name in names)),
        ):
            object.__setattr__(self, name, value)

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return *self.preconditions, *self.postconditions

    def check_before(self, arguments: Values) -> list[tuple[str, bool]]:
        """Return the name of each precondition, and whether it holds before a call."""
        return self.before.all_of(arguments)

    def check_after(self, arguments: Values, earlier: Values) -> list[tuple[str, bool]]:
        """Return the name of each postcondition, and whether it holds after a call.

        `earlier` are the arguments before the call. `self.earlier` has the indices of arguments. At least these
        arguments must be copies.
        """
        return self.after.all_of((*arguments, *earlier))

    def broken(self, earlier: Values, right: Values) -> list[tuple[str, bool]]:
        """Return each condition's name, and whether the condition fails after its `broken_by` has changed the
        arguments.

        `earlier` are the arguments before a call, and `right` are the arguments after a correct call.
        """
        with np.errstate(all="ignore"):
            before = [bits(one.broken_by.of(numbers(earlier))) for one in self.preconditions]
            after = [(*bits(one.broken_by.of(numbers(right))), *earlier) for one in self.postconditions]
        return [
            (one.name, bool(checks.failed(values) >> number & 1))
            for checks, conditions, changed in (
                (self.before, self.preconditions, before),
                (self.after, self.postconditions, after),
            )
            for number, (one, values) in enumerate(zip(conditions, changed, strict=True))
        ]

    def line_of(self, text: str) -> int:
        """Return the number of the first line of the contract's file that contains `text`, or 1 if no line does."""
        lines = file_of(self.name).read_text(encoding="utf-8").splitlines()
        return next((number for number, line in enumerate(lines, 1) if text in line), 1)


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.yaml"


def all_names() -> tuple[str, ...]:
    """Return the names of all contract files."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


@cache
def contract(name: str) -> Contract:
    """Return the contract in NAME.yaml. Raises ContractError if the file is missing or invalid."""
    path = file_of(name)
    try:
        return read(name, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ContractError(f"{path}: {error.strerror}; each kernel has a contract") from error


def read(name: str, text: str) -> Contract:
    """Return the contract in `text`. Raises ContractError, which names the file and the wrong key."""
    file = f"contracts/{name}.yaml"
    try:
        document = yaml.load(text, LOADER)
    except yaml.YAMLError as error:
        raise ContractError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    return _Reader(file).contract(name, document)


class _Reader:
    """Reads the file of one contract. An error names the wrong key."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._arguments: tuple[str, ...] = ()

    def contract(self, name: str, document: Any) -> Contract:
        keys = (
            "equations", "arguments", "tolerance", "preconditions", "postconditions", "falsification", "performance"
        )  # fmt: skip
        said = self._mapping("the file", document, keys)
        self._arguments = self._texts("arguments", said["arguments"])
        faults = self._mapping("falsification", said["falsification"], ("outputs", "arguments"))
        return Contract(
            name,
            self._text("equations", said["equations"]),
            self._arguments,
            self._number("tolerance", said["tolerance"]),
            self._conditions("precondition", said["preconditions"]),
            self._conditions("postcondition", said["postconditions"], after=True),
            self._texts("falsification.outputs", faults["outputs"]),
            tuple(
                self._change(f"falsification.arguments: {fault}", fault, changes)
                for fault, changes in self._pairs("falsification.arguments", faults["arguments"])
            ),
            self._performance(said["performance"]),
        )

    def _conditions(self, kind: str, found: Any, *, after: bool = False) -> tuple[Condition, ...]:
        conditions = []
        for text, changes in self._pairs(f"{kind}s", found):
            name = f"{kind} {text}"
            conditions.append(Condition(name, self._expression(name, text, after), self._change(name, name, changes)))
        return tuple(conditions)

    def _change(self, key: str, name: str, found: Any) -> ArgumentChange:
        values = {}
        for argument, value in self._pairs(key, found):
            if argument not in self._arguments:
                raise self._wrong(key, f"changes {argument!r}; arguments are {', '.join(self._arguments)}")
            values[self._arguments.index(argument)] = self._expression(f"{key}: {argument}", str(value))
        return ArgumentChange(name, values)

    def _performance(self, found: Any) -> Performance:
        said = self._mapping("performance", found, ("roof", "fraction", "where", "when", "regression"))
        return Performance(
            self._text("performance.roof", said["roof"]),
            self._number("performance.fraction", said["fraction"]),
            self._text("performance.where", said["where"]),
            str(said["when"]),
            self._number("performance.regression", said["regression"]),
        )

    def _expression(self, key: str, text: str, after: bool = False) -> Expression:
        try:
            expression = parsed(text, self._arguments)
        except ExpressionError as error:
            raise self._wrong(key, str(error)) from error
        if expression.earlier and not after:
            raise self._wrong(key, "asks for old values, which only a postcondition has")
        return expression

    def _mapping(self, key: str, found: Any, wanted: tuple[str, ...]) -> dict[str, Any]:
        said = dict(self._pairs(key, found))
        if unknown := [name for name in said if name not in wanted]:
            raise self._wrong(key, f"{unknown[0]!r} is no key; keys are {', '.join(wanted)}")
        if missing := [name for name in wanted if name not in said]:
            raise self._wrong(key, f"has no {missing[0]!r}")
        return said

    def _pairs(self, key: str, found: Any) -> tuple[tuple[str, Any], ...]:
        if not isinstance(found, dict) or not all([isinstance(name, str) for name in found]):
            raise self._wrong(key, f"is {found!r:.60}; texts with what they are to (`a: b`) are wanted")
        return tuple(found.items())

    def _texts(self, key: str, found: Any) -> tuple[str, ...]:
        if not isinstance(found, list) or not all([isinstance(one, str) for one in found]):
            raise self._wrong(key, f"is {found!r:.60}; a list of texts is wanted")
        return tuple(found)

    def _text(self, key: str, found: Any) -> str:
        if not isinstance(found, str) or not found.strip():
            raise self._wrong(key, f"is {found!r:.60}; a text is wanted")
        return found.strip()

    def _number(self, key: str, found: Any) -> float:
        if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found < float("inf"):
            raise self._wrong(key, f"is {found!r:.60}; a number from 0 is wanted (YAML reads 1.0e-5, and not 1e-5)")
        return float(found)

    def _wrong(self, key: str, what: str) -> ContractError:
        return ContractError(f"{self._file}: {key}: {what}")
