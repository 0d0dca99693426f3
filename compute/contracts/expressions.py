"""Evaluate small expressions over named values, such as `rows(out) == rows(x)`.

Only the syntax that is listed here is allowed. Python's `eval` is not used.
"""

# Rules
# - Syntax that is not listed is refused when an expression is read, not when it is evaluated.
# - There is no loop, power, attribute or text. So the work of an expression is at most its number of nodes times the
#   sizes of its arrays.
# - An expression becomes a Python function of a tuple of values. This function defines the meaning of the expression.
#   Calls of kernels use the nodes of `conditions` instead. These nodes have the same meaning and are faster.

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

MAX_CHARACTERS = 200
Values = Sequence[Any]
Evaluate = Callable[[Values], Any]


class ExpressionError(ValueError):
    """The text is not a valid expression. The message is one line."""


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression that is ready to be evaluated, with its syntax tree.

    In an expression, `old(x)` is the value of the argument x before the call. `earlier` holds the names of all
    arguments that the expression uses in this way.
    """

    text: str
    tree: ast.expr
    evaluate: Evaluate
    earlier: frozenset[str]


def parsed(text: str, names: Sequence[str]) -> Expression:
    """Return the expression `text`. It is evaluated on a tuple of values, which are in the order of `names`.

    If the expression contains `old(x)`, the values from before the call must follow, in the same order. Raises
    ExpressionError.
    """
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"an expression has {len(text)} characters; {MAX_CHARACTERS} at most are read")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ExpressionError(f"{text!r} is no expression") from None
    reader = _Reader(text, {name: place for place, name in enumerate(names)})
    return Expression(text, tree.body, reader.read(tree.body), frozenset(reader.earlier))


def _at(values: Any, places: Any) -> Any:
    """Return a column that holds the element values[t, places[t]] for each row t."""
    return np.take_along_axis(values, places[:, None], axis=1)


def _lengths(values: Any) -> Any:
    """Return the L2 norm of each row, which is the square root of the sum of its squares, in float64."""
    return np.linalg.norm(np.asarray(values, np.float64), axis=1)


def _extreme(choose: Callable[..., Any]) -> Callable[..., float]:
    """Return a function that applies `choose` to the elements of one array, or to several numbers."""
    return lambda *values: float(choose(values[0] if len(values) == 1 else values))


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "finite": lambda values: np.isfinite(values).all(),
    "all": np.all,
    "count": np.count_nonzero,
    "abs": abs,
    "sqrt": np.sqrt,
    "max": _extreme(np.max),
    "min": _extreme(np.min),
    "lengths": _lengths,
    "at": _at,
    "size": lambda values: values.size,
    "rows": lambda values: values.shape[0],
    "columns": lambda values: values.shape[1],
    "extent": lambda values, dimension: values.shape[dimension],
}
_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class _Reader:
    """Makes nested functions from allowed syntax, and refuses all other syntax."""

    def __init__(self, text: str, places: Mapping[str, int]) -> None:
        self._text = text
        self._places = places
        self.earlier: set[str] = set()

    def read(self, node: ast.expr) -> Evaluate:
        match node:
            case ast.Constant(value=bool() | int() | float() as number) if math.isfinite(number):
                return lambda _: number
            case ast.Name(id=name):
                return operator.itemgetter(self._place(name))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                return _applied(_OPERATORS[type(op)], self.read(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _applied(_OPERATORS[type(op)], self.read(left), self.read(right))
            case ast.BoolOp(op=op, values=operands):
                return reduce(_both if isinstance(op, ast.And) else _either, [self.read(one) for one in operands])
            case ast.Compare(left=left, ops=ops, comparators=right):
                return self._comparison([left, *right], ops)
            case ast.Subscript(value=value, slice=at):
                return _applied(operator.getitem, self.read(value), self._index(at))
            case ast.Call(func=ast.Name(id="old"), args=[ast.Name(id=name)], keywords=[]):
                self.earlier.add(name)
                return operator.itemgetter(len(self._places) + self._place(name))
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
                return _applied(FUNCTIONS[name], *(self.read(argument) for argument in arguments))
            case ast.Call(func=ast.Name(id=name)):
                raise ExpressionError(
                    f"{self._text!r} calls {name!r} in a way that is not known; there are {', '.join(FUNCTIONS)} and "
                    "old(argument)"
                )
        raise ExpressionError(
            f"{self._text!r} has {ast.unparse(node)!r}; numbers, arguments, comparisons, arithmetic, slices and "
            "calls of functions are wanted"
        )

    def _place(self, name: str) -> int:
        if name not in self._places:
            raise ExpressionError(f"{self._text!r} has {name!r}; arguments are {', '.join(self._places)}")
        return self._places[name]

    def _comparison(self, operands: Sequence[ast.expr], ops: Sequence[ast.cmpop]) -> Evaluate:
        if unknown := [op for op in ops if type(op) not in _OPERATORS]:
            raise ExpressionError(f"{self._text!r} compares by {type(unknown[0]).__name__}; wanted: < <= > >= == !=")
        pairs = []
        for op, left, right in zip(ops, operands, operands[1:], strict=False):
            compare, first = _OPERATORS[type(op)], self.read(left)
            # Most comparisons have a constant on the right side. They are faster if the constant is not looked up
            # each time.
            if isinstance(right, ast.Constant):
                pairs.append(_against(compare, first, self.read(right)(())))
            else:
                pairs.append(_applied(compare, first, self.read(right)))
        return reduce(_both, pairs)

    def _index(self, node: ast.expr) -> Evaluate:
        match node:
            case ast.Tuple(elts=elements):
                parts = [self._index(element) for element in elements]
                return lambda values: tuple([part(values) for part in parts])
            case ast.Slice(lower=lower, upper=upper, step=step):
                bounds = [None if bound is None else self.read(bound) for bound in (lower, upper, step)]
                return lambda values: slice(*[bound if bound is None else bound(values) for bound in bounds])
        return self.read(node)


def _applied(function: Callable[..., Any], *operands: Evaluate) -> Evaluate:
    match operands:
        case [one]:
            return lambda values: function(one(values))
        case [one, two]:
            return lambda values: function(one(values), two(values))
    return lambda values: function(*[operand(values) for operand in operands])


def _against(compare: Callable[..., Any], operand: Evaluate, constant: Any) -> Evaluate:
    return lambda values: compare(operand(values), constant)


def _both(one: Evaluate, two: Evaluate) -> Evaluate:
    return lambda values: one(values) and two(values)


def _either(one: Evaluate, two: Evaluate) -> Evaluate:
    return lambda values: one(values) or two(values)
