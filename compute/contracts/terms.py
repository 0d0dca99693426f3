"""The terms of a contract: the conditions of a call, and the faults that break them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cbtop.compute.contracts.conditions import Failed, failing
from cbtop.compute.contracts.expressions import Expression, Values
from cbtop.compute.jit.halves import bits, numbers


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

    `failed(values)` returns 0 if all conditions hold. Otherwise bit n is set if condition n does not hold. `values`
    is a tuple with the same values as for `Condition.holds`. The first call of `failed` compiles the conditions.
    """

    def __init__(self, conditions: Sequence[Condition], arguments: Sequence[str]) -> None:
        self._conditions = tuple(conditions)
        self._arguments = arguments
        self.failed: Failed = self._first

    def names_of(self, failed: int) -> Iterator[str]:
        """Return the names of the conditions that fail. Bit n of `failed` is set if condition n does not hold."""
        return (one.name for number, one in enumerate(self._conditions) if failed >> number & 1)

    def all_of(self, values: Values) -> list[tuple[str, bool]]:
        """Return for each condition its name, and whether it holds for `values`."""
        failed = self.failed(values)
        return [(one.name, not failed >> number & 1) for number, one in enumerate(self._conditions)]

    def _first(self, values: Values) -> int:
        expressions, meaning = zip(*[(one.expression, one.holds) for one in self._conditions], strict=True)
        self.failed = failing(expressions, self._arguments, meaning)
        return self.failed(values)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a contract states about the calls of an operation, and ways to check it.

    `tolerance` limits max|difference| / max|reference| of an output. `output_faults` are names of
    `verification.FAULTS`, which are planted in outputs. `argument_faults` change the kernel's arguments. `before` and
    `after` evaluate the conditions. Some postconditions need the values that arguments had before the call. `earlier`
    has the indices of these arguments.
    """

    name: str
    equations: str
    arguments: tuple[str, ...]
    tolerance: float
    preconditions: tuple[Condition, ...]
    postconditions: tuple[Condition, ...]
    output_faults: tuple[str, ...]
    argument_faults: tuple[ArgumentChange, ...]
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
        """Return for each precondition its name, and whether it holds before a call."""
        return self.before.all_of(arguments)

    def check_after(self, arguments: Values, earlier: Values) -> list[tuple[str, bool]]:
        """Return for each postcondition its name, and whether it holds after a call.

        `earlier` are the arguments before the call. `self.earlier` has the indices of arguments. At least these
        arguments must be copies.
        """
        return self.after.all_of((*arguments, *earlier))

    def broken(self, earlier: Values, right: Values) -> list[tuple[str, bool]]:
        """Return for each condition its name, and whether it fails after its `broken_by` has changed the arguments.

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
