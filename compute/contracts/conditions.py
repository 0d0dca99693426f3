"""The conditions of a contract as one Python function, written from their expressions once they were read."""

# Rules
# - It is written from syntax that `expressions` let pass, node by node: names become places, numbers their repr, and
#   nothing of a file's text is in it.
# - What it means is what `Expression.evaluate` means. Where it cannot be written (slices in two dimensions, `count`,
#   `at`), or what it calls raises, that is asked.
# - Shapes are read in Python, arrays by the compiled passes (`python -m benchmarks contracts`).

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cbtop.compute.contracts import passes
from cbtop.compute.contracts.expressions import Expression, Values

Failed = Callable[[Values], int]  # of the values of a call: bit n is set where condition n does not hold
Holds = Callable[[Values], bool]

_SYMBOLS: Mapping[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.USub: "-",
    ast.Not: "not", ast.And: "and", ast.Or: "or", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_OF_ELEMENTS = (ast.Add, ast.Sub, ast.Mult, ast.Div)  # floor and remainder of 0 are others in NumPy
_ASKED = ("finite", "size", "rows", "columns", "extent", "lengths")  # of arrays alone
_RAISED = (ArithmeticError, IndexError, NameError, TypeError, ValueError)


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan  # as NumPy's


def _most(first: float, *others: float) -> float:
    found = float(first)
    for other in map(float, others):
        if not found >= other:
            found = other if other > found else math.nan
    return found


def _least(first: float, *others: float) -> float:
    return -_most(-float(first), *[-float(other) for other in others])


_CALLED: Mapping[str, Callable[..., Any]] = {
    "root": _root,
    "most": _most,
    "least": _least,
    "finite": passes.finite,
    "finite_between": passes.finite_between,
    "largest": passes.largest,
    "largest_between": passes.largest_between,
    "lengths": passes.lengths,
}


class _UnwrittenError(Exception):
    """An expression that the function cannot be written for."""


def failing(
    expressions: Sequence[Expression], names: Sequence[str], others: Sequence[Expression], meaning: Sequence[Holds]
) -> Failed:
    """The function for `expressions` over values called `names`; `meaning` says of each whether it holds. `others`
    tell more of which names are those of arrays."""
    writer = _Writer(names, [expression.tree for expression in (*expressions, *others)])
    lines = []
    for number, expression in enumerate(expressions):
        try:
            written = writer.number(expression.tree)
            compile(written, "", "eval")
        except (_UnwrittenError, SyntaxError, MemoryError, RecursionError):  # the last: brackets in brackets
            lines.append(f"    if not m{number}(values): failed |= {1 << number}")
            continue
        lines += [
            "    try:",
            *(f"        {line}" for line in writer.taken()),
            f"        if not {written}: failed |= {1 << number}",
            "    except RAISED:",
            f"        if not m{number}(values): failed |= {1 << number}",
        ]
    head = ["def failed_of(values):", "    failed = 0", *writer.head()]
    text = "\n".join([*head, *lines, "    return failed"])
    known: dict[str, Any] = {
        "RAISED": _RAISED, **_CALLED, **writer.compared,
        **{f"m{number}": holds for number, holds in enumerate(meaning)},
    }  # fmt: skip
    exec(compile(text, f"<conditions over {', '.join(names)}>", "exec"), known)
    found: Failed = known["failed_of"]
    return found


class _Writer:
    """Writes expressions in Python; knows which values and shapes they need, and which comparisons."""

    def __init__(self, names: Sequence[str], trees: Sequence[ast.expr]) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._arrays = {name for tree in trees for node in ast.walk(tree) for name in _asked_of(node)}
        self._values: set[int] = set()
        self._shapes: set[int] = set()
        self._kept: dict[str, str] = {}
        self._taken: list[str] = []
        self.compared: dict[str, Any] = {}

    def head(self) -> list[str]:
        values = [f"    a{place} = values[{place}]" for place in sorted(self._values)]
        return values + [f"    s{place} = a{place}.shape" for place in sorted(self._shapes)]

    def taken(self) -> list[str]:
        """What has to be taken before what was written last."""
        taken, self._taken = self._taken, []
        return taken

    def number(self, node: ast.expr) -> str:
        """`node`, which is one number or truth."""
        match node:
            case ast.Constant(value=value):
                return repr(value)
            case ast.UnaryOp(op=op, operand=operand):
                return f"({_SYMBOLS[type(op)]} {self.number(operand)})"
            case ast.BinOp(left=left, op=op, right=right):
                return f"({self.number(left)} {_SYMBOLS[type(op)]} {self.number(right)})"
            case ast.BoolOp(op=op, values=operands):
                return f"({f' {_SYMBOLS[type(op)]} '.join([self.number(one) for one in operands])})"
            case ast.Compare(left=left, ops=ops, comparators=others):
                pairs = [f" {_SYMBOLS[type(op)]} {self.number(one)}" for op, one in zip(ops, others, strict=True)]
                return f"({self.number(left)}{''.join(pairs)})"
            case ast.Subscript(value=ast.Name() as array, slice=ast.Tuple(elts=at)) if not _has_slices(at):
                return f"{self._value(array)}[{', '.join([self.number(one) for one in at])}]"
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return self._called(name, arguments, node)
            case ast.Name(id=name) if name not in self._arrays:
                return self._value(node)
        raise _UnwrittenError

    def _called(self, name: str, arguments: Sequence[ast.expr], node: ast.expr) -> str:
        match name, arguments:
            case "old", [ast.Name(id=of)] if of not in self._arrays:
                return self._value(node)
            case "rows", [array]:
                return f"len({self._value(array)})"
            case "size", [array]:
                return f"{self._value(array)}.size"
            case "columns", [array]:
                return f"{self._shape(array)}[1]"
            case "extent", [array, dimension]:
                return f"{self._shape(array)}[{self.number(dimension)}]"
            case "finite", [array]:
                return self._passed("finite", array)
            case "max", [ast.Call(func=ast.Name(id="abs"), args=[array])] if self._is_array(array):
                return self._once(self._passed("largest", array))
            case "max" | "min", [_, _, *_]:
                of = "most" if name == "max" else "least"
                return f"{of}({', '.join([self.number(one) for one in arguments])})"
            case "abs", [one]:
                return f"abs({self.number(one)})"
            case "sqrt", [one]:
                return f"root({self.number(one)})"
            case "all", [ast.Compare(left=left, ops=[op], comparators=[right])]:
                return self._comparison(left, _SYMBOLS[type(op)], right)
        raise _UnwrittenError

    def _value(self, node: ast.expr) -> str:
        """An argument, or an old one, by its place."""
        match node:
            case ast.Name(id=name):
                place = self._places[name]
            case ast.Call(func=ast.Name(id="old"), args=[ast.Name(id=name)]):
                place = len(self._places) + self._places[name]
            case _:
                raise _UnwrittenError
        self._values.add(place)
        return f"a{place}"

    def _shape(self, node: ast.expr) -> str:
        value = self._value(node)
        self._shapes.add(int(value[1:]))
        return f"s{value[1:]}"

    def _is_array(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name) | ast.Call(func=ast.Name(id="old"), args=[ast.Name(id=name)]):
                return name in self._arrays
        return isinstance(node, ast.Subscript)

    def _passed(self, name: str, node: ast.expr) -> str:
        """A pass over an array, or over a[:, first:end] of one."""
        match node:
            case ast.Subscript(
                value=array, slice=ast.Tuple(elts=[ast.Slice(None, None, None), ast.Slice(first, end, None)])
            ):
                bounds = self.number(first) if first else "0", self.number(end) if end else f"{self._shape(array)}[1]"
                return f"{name}_between({self._value(array)}, {', '.join(bounds)})"
        return f"{name}({self._value(node)})"

    def _once(self, written: str) -> str:
        """What reads an array, kept for those that ask for it again: where it raised, NameError sends these on."""
        if written not in self._kept:
            self._kept[written] = f"v{len(self._kept)}"
            self._taken.append(f"{self._kept[written]} = {written}")
        return self._kept[written]

    def _comparison(self, left: ast.expr, symbol: str, right: ast.expr) -> str:
        """`all` of a comparison, by a function of its own."""
        elements = _Elements(self)
        nodes = (node for side in (left, right) for node in ast.walk(side) if isinstance(node, ast.expr))
        first = next((node for node in nodes if _calls(node, "lengths") or self._is_array(node)), None)
        if first is None:
            raise _UnwrittenError
        elements.written(first)  # the first operand is an array
        condition = f"{elements.written(left)} {symbol} {elements.written(right)}"
        name = f"all{len(self.compared)}"
        self.compared[name] = passes.comparison(condition, len(elements.operands))
        return f"{name}({', '.join(elements.operands)})"

    def array(self, node: ast.expr) -> str | None:
        """What is asked for its elements; None where `node` is made of such things, or of numbers."""
        match node:
            case ast.Call(func=ast.Name(id="lengths"), args=[of]):
                return self._once(f"lengths({self._value(of)})")
            case ast.Name() | ast.Call(func=ast.Name(id="old")):  # a number, maybe: the pass sees that
                return self._value(node)
        return None


class _Elements:
    """What is computed of the elements of arrays, and of numbers that are computed before."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
        self.operands: list[str] = []

    def written(self, node: ast.expr) -> str:
        if (array := self._writer.array(node)) is not None:
            return self._operand(array)
        if not any([isinstance(one, ast.Name) for one in ast.walk(node)]):
            return f"element(p0, {self._writer.number(node)}, i)"
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return f"(-{self.written(operand)})"
            case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OF_ELEMENTS) and _has_arrays(node):
                return f"({self.written(left)} {_SYMBOLS[type(op)]} {self.written(right)})"
            case ast.Call(func=ast.Name(id="abs"), args=[one]):
                return f"abs({self.written(one)})"
        return self._operand(self._writer.number(node))

    def _operand(self, written: str) -> str:
        if written not in self.operands:
            self.operands.append(written)
        return f"element(p0, r{self.operands.index(written)}, i)"


def _has_arrays(node: ast.AST) -> bool:
    """Whether elements may be asked for: of names, but not of what is a number of an array, as its extents."""
    match node:
        case ast.Call(func=ast.Name(id="lengths")) | ast.Name():
            return True
        case ast.Call(func=ast.Name(id="abs" | "sqrt"), args=arguments):
            return any([_has_arrays(one) for one in arguments])
        case ast.Call() | ast.Subscript():
            return _calls(node, "old")
    return any([_has_arrays(one) for one in ast.iter_child_nodes(node)])


def _calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _has_slices(at: Sequence[ast.expr]) -> bool:
    return any([isinstance(one, ast.Slice) for one in at])


def _asked_of(node: ast.AST) -> Iterator[str]:
    """The names in `node` that are those of arrays: they are asked for what arrays alone have."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[ast.Name(id=array), *_]) if name in _ASKED:
            yield array
        case ast.Call(func=ast.Name(id=name), args=[ast.Call(func=ast.Name(id="old"), args=[ast.Name(id=array)])]):
            if name in _ASKED:
                yield array
        case ast.Subscript(value=ast.Name(id=array)):
            yield array
