"""Turn the conditions of a contract into one function. _conditions.c evaluates their syntax trees."""

# Rules
# - A node gives the same result as `Expression.evaluate` for the same syntax. The C code can only confirm that a
#   condition holds. In all other cases, and if the C code was not built, `Condition.holds` decides.
# - A subexpression that several conditions share becomes one node, so that an array is read once for all of them.

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from cbtop.compute.contracts.expressions import Expression, Values

try:
    from cbtop.compute.contracts import _conditions

    compiled: type[_conditions.Conditions] | None = _conditions.Conditions
except ImportError:  # at installation, the compiler or the headers of Python were missing
    compiled = None

# A function that is called with the values of a kernel call. If condition n does not hold, bit n of the result is
# set.
Failed = Callable[[Values], int]
Holds = Callable[[Values], bool]
ASKED = -1  # marks a condition that Python must decide, because C cannot evaluate it
NONE = -1  # marks a missing bound of a slice

_OPERATIONS: Mapping[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide", ast.FloorDiv: "floor",
    ast.Mod: "remainder", ast.USub: "negate", ast.Not: "not", ast.And: "and", ast.Or: "or", ast.Lt: "less",
    ast.LtE: "less_equal", ast.Gt: "greater", ast.GtE: "greater_equal", ast.Eq: "equal", ast.NotEq: "unequal",
}  # fmt: skip
_CALLED: Mapping[str, str] = {
    "finite": "finite", "size": "size", "lengths": "lengths", "at": "at", "abs": "magnitude",
    "sqrt": "root", "all": "all", "count": "count",
}  # fmt: skip
_EXTREMES: Mapping[str, tuple[str, str]] = {"max": ("maximum", "most"), "min": ("minimum", "least")}


class _UnknownError(Exception):
    """Raised for an expression that cannot be expressed by nodes. Python must evaluate this expression."""


def failing(expressions: Sequence[Expression], names: Sequence[str], meaning: Sequence[Holds]) -> Failed:
    """Return a function that takes the values called `names` and returns a bit mask of the `expressions` that fail.

    `meaning` has a Python function for each expression. The function returns whether the expression holds.
    """
    if compiled is None:
        return lambda values: sum([1 << number for number, holds in enumerate(meaning) if not holds(values)])
    writer = _Writer(names)
    nodes = [writer.condition(one.tree) for one in expressions]
    return compiled(writer.nodes, nodes, tuple(meaning))


class _Writer:
    """Makes the nodes of expressions. A node is a tuple (operation, operand, …), and an operand is the index of an
    earlier node.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = {name: place for place, name in enumerate(names)}
        self._known: dict[tuple[Any, ...], int] = {}
        self.nodes: list[tuple[Any, ...]] = []

    def condition(self, tree: ast.expr) -> int:
        try:
            return self._of(tree)
        except _UnknownError:
            return ASKED

    def _node(self, *node: Any) -> int:
        # The key contains the types of the operands, because 1 == 1.0, although 1 and 1.0 are different constants.
        key = (*node, *map(type, node))
        if key not in self._known:
            self._known[key] = len(self.nodes)
            self.nodes.append(node)
        return self._known[key]

    def _of(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=value):
                return self._node("constant", value)
            case ast.Name(id=name):
                return self._node("argument", self._names[name])
            case ast.UnaryOp(op=op, operand=operand):
                return self._node(_OPERATIONS[type(op)], self._of(operand))
            case ast.BinOp(left=left, op=op, right=right):
                return self._node(_OPERATIONS[type(op)], self._of(left), self._of(right))
            case ast.BoolOp(op=op, values=operands):
                return self._joined(_OPERATIONS[type(op)], [self._of(one) for one in operands])
            case ast.Compare(left=left, ops=ops, comparators=right):
                sides = [self._of(one) for one in (left, *right)]
                pairs = zip(ops, sides, sides[1:], strict=False)
                return self._joined("and", [self._node(_OPERATIONS[type(op)], *pair) for op, *pair in pairs])
            case ast.Subscript(value=array, slice=at):
                return self._part(self._of(array), at.elts if isinstance(at, ast.Tuple) else [at])
            case ast.Call(func=ast.Name(id="old"), args=[ast.Name(id=name)]):
                return self._node("argument", len(self._names) + self._names[name])
            case ast.Call(func=ast.Name(id="rows" | "columns" as name), args=[array]):
                return self._node("extent", self._of(array), int(name == "columns"))
            case ast.Call(func=ast.Name(id="extent"), args=[array, ast.Constant(value=int() as dimension)]):
                return self._node("extent", self._of(array), int(dimension))
            case ast.Call(func=ast.Name(id="max"), args=[ast.Call(func=ast.Name(id="abs"), args=[array])]):
                return self._node("largest", self._of(array))
            case ast.Call(func=ast.Name(id="max" | "min" as name), args=arguments):
                of_array, of_numbers = _EXTREMES[name]
                found = [self._of(one) for one in arguments]
                return self._joined(of_numbers, found) if found[1:] else self._node(of_array, *found)
            case ast.Call(func=ast.Name(id=name), args=arguments) if name in _CALLED:
                return self._node(_CALLED[name], *[self._of(one) for one in arguments])
        raise _UnknownError

    def _joined(self, operation: str, nodes: Sequence[int]) -> int:
        return reduce(lambda left, right: self._node(operation, left, right), nodes)

    def _part(self, array: int, at: Sequence[ast.expr]) -> int:
        """Return the node of array[at]. The array is indexed one dimension at a time.

        An index removes its dimension, a slice does not.
        """
        dimension = 0
        for one in at:
            if not isinstance(one, ast.Slice):
                array = self._node("index", array, self._of(one), dimension)
                continue
            bounds = [NONE if bound is None else self._of(bound) for bound in (one.lower, one.upper, one.step)]
            if bounds != [NONE] * 3:
                array = self._node("slice", array, *bounds, dimension)
            dimension += 1
        return array
