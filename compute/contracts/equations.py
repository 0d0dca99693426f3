"""Parse the equations of a contract. They are read to find mistakes, and are not evaluated."""

# Rules
# - A line is a statement, and an indented line continues it. `;` separates statements, and `#` begins a comment.
# - A statement is an equation (`out[t, i] = x[t, i] * weight[i]`), or defines a name in words (`bf16(x): rounded`).
# - Each name is an argument, a name that a statement defines, or an index. Indices are on the left side, or follow
#   `over`. A reduction ends at the first `+` or `-`, and its indices are not known after it.
# - On the right side, an argument that the operation changes has its value from before the call.

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

import yaml

from cbtop.compute.contracts import expressions
from cbtop.compute.contracts.reader import LOADER

MAX_DEPTH = 50  # of brackets and signs
REDUCTIONS = ("sum", "mean", "product", "max", "min", "variance", "argmax", "argmin", "softmax")
FUNCTIONS = (
    *expressions.FUNCTIONS, "old", "exp", "log", "tanh", "sigmoid", "erf", "sin", "cos", "softmax", "floor", "round",
    "sign", "sum", "mean", "variance",
)  # fmt: skip
CONSTANTS = ("pi", "infinity")
KEYWORDS = ("over", "of", "where", "if", "else", "and", "or", "not")
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)|(?P<name>[^\W\d²³][^\W²³]*)"
    r"|(?P<sign>//|<=|>=|==|!=|[-+*/%^.,;:()\[\]|<>=²³])|(?P<end>$)|(?P<other>\S))"
)
# The left side of a statement in words, such as `k[g, p], v[g, p]: `.
PLACE = r"\s*[^\W\d]\w*\s*(?:[(\[][^()\[\]]*[)\]])?\s*"
IN_WORDS = re.compile(rf"{PLACE}(?:,{PLACE})*:")


class Line(NamedTuple):
    """A line of a file, or only the part with equations. Lines and columns are counted from 1."""

    number: int
    column: int
    text: str


class EquationError(ValueError):
    """A statement is not an equation. The message is one line and begins with the line and the column in the file."""


class Token(NamedTuple):
    kind: str
    text: str
    line: int
    column: int

    def error(self, what: str) -> EquationError:
        return EquationError(f"line {self.line}, column {self.column}: {what}")

    @property
    def seen(self) -> str:
        return "the end" if self.kind == "end" else repr(self.text)


@dataclass(frozen=True, slots=True)
class KnownNames:
    """The names that a statement may use: of values, and of functions."""

    values: Collection[str]
    functions: Collection[str]


def lines_of(text: str) -> list[Line]:
    """Return the lines of the key `equations` in the text of a contract file, which must be valid YAML."""
    text = text.removesuffix("\n") + "\n"  # a block at the end of the file then ends at the line after it
    root: Any = yaml.compose(text, LOADER)
    node = next(value for key, value in root.value if key.value == "equations")
    begin, end = node.start_mark, node.end_mark
    lines = text.splitlines()
    if node.style in ("|", ">"):
        whole = [Line(number, 1, lines[number - 1]) for number in range(begin.line + 2, end.line + 1)]
        indents = [len(one.text) - len(one.text.lstrip()) for one in whole if one.text.strip()]
        return [Line(one.number, min(indents) + 1, one.text[min(indents) :]) for one in whole if one.text.strip()]
    if node.style in ("'", '"'):
        return [Line(begin.line + 1, begin.column + 2, node.value)]
    ends = [*[len(line) for line in lines[begin.line : end.line]], end.column]
    first = Line(begin.line + 1, begin.column + 1, lines[begin.line][begin.column : ends[0]])
    rest = [Line(begin.line + 1 + at, 1, lines[begin.line + at][: ends[at]]) for at in range(1, len(ends))]
    return [first, *[one for one in rest if one.text.strip()]]


def equation_faults(
    lines: Sequence[Line], arguments: Sequence[str], outputs: Collection[str] = (), contracts: Collection[str] = ()
) -> list[str]:
    """Return what is wrong with the equations of a contract: at most one message for a statement.

    `outputs` are the arguments that must be defined. `contracts` are other contracts, which are functions here.
    """
    faults: list[str] = []
    statements: list[list[Token]] = []
    for tokens in _joined(lines):
        try:
            statements += _split(list(tokens))
        except EquationError as error:
            faults.append(str(error))
    heads = {name.text for one in statements for name in _heads(one)}
    known = KnownNames({*arguments, *heads, *CONSTANTS}, {*FUNCTIONS, *contracts, *heads})
    for statement in statements:
        try:
            _Statement(statement, known, arguments).read()
        except EquationError as error:
            faults.append(str(error))
    if not faults and (missing := [name for name in outputs if name not in heads]):
        faults.append(f"line {lines[-1].number}, column {lines[-1].column}: no equation defines {missing[0]!r}")
    return faults


def _joined(lines: Sequence[Line]) -> Iterator[Iterator[Token]]:
    """Yield the tokens of each line, together with the indented lines after it. Words after `name:` are left out."""
    begins = [at for at, line in enumerate(lines) if not at or not line.text[:1].isspace()]
    for begin, end in zip(begins, [*begins[1:], len(lines)], strict=True):
        if left := IN_WORDS.match(lines[begin].text):
            yield _tokens(lines[begin]._replace(text=left[0]))
        else:
            yield (token for line in lines[begin:end] for token in _tokens(line))


def _tokens(line: Line) -> Iterator[Token]:
    """Yield the tokens of a line, without its comment."""
    text = line.text.partition("#")[0].rstrip()
    at = 0
    while at < len(text):
        match = TOKEN.match(text, at)
        assert match is not None
        kind = match.lastgroup or ""
        token = Token(kind, match[kind], line.number, line.column + match.start(kind))
        if kind == "other":
            raise token.error(f"{token.text!r} is no part of an equation; words follow # or `name:`")
        at = match.end()
        yield token


def _split(tokens: list[Token]) -> Iterator[list[Token]]:
    """Yield the statements between `;`, each with a token for its end."""
    statement: list[Token] = []
    for token in tokens:
        if token.text == ";":
            if statement:
                yield [*statement, token._replace(kind="end")]
            statement = []
        else:
            statement.append(token)
    if statement:
        last = statement[-1]
        yield [*statement, Token("end", "", last.line, last.column + len(last.text))]


def _heads(statement: Sequence[Token]) -> Iterator[Token]:
    """Yield the names that a statement defines. These are the names before `=` or `:` and outside of brackets."""
    depth = 0
    for token in statement:
        depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
        if not depth and token.text in ("=", ":"):
            return
        if not depth and token.kind == "name":
            yield token


class _Statement:
    """Reads one statement by recursive descent. Each method reads one rule of the grammar."""

    def __init__(self, tokens: Sequence[Token], known: KnownNames, arguments: Collection[str]) -> None:
        self._tokens, self._at, self._depth = tokens, 0, 0
        self._known, self._arguments = known, arguments
        self._indices: list[str] = []
        self._ended: set[str] = set()  # indices of reductions that have ended
        self._is_left = False  # on the left side, an unknown name is an index

    def read(self) -> None:
        self._is_left = True
        names = [self._place()]
        while self._has(","):
            names.append(self._place())
        self._is_left = False
        if self._has(":"):
            if argument := next((name for name in names if name.text in self._arguments), None):
                raise argument.error(f"{argument.text!r} is an argument, which is defined by '=' and not in words")
            return
        if not self._has("="):
            raise self._next.error(f"'=' is expected and not {self._next.seen}; words follow # or `name:`")
        self._expression()
        if self._next.kind != "end":
            raise self._next.error(f"an operator or the end is expected and not {self._next.seen}")

    def _place(self) -> Token:
        """name ["(" names ")"] or name ["[" indices "]"]"""
        name = self._take("name", "the name of a value")
        if self._has("("):
            self._list(")")
        elif self._has("["):
            self._list("]")
        return name

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _has(self, *texts: str) -> bool:
        """Take the next token if it is one of `texts`. Returns whether it is."""
        is_next = self._next.kind != "end" and self._next.text in texts
        self._at += is_next
        return is_next

    def _take(self, kind: str, what: str) -> Token:
        token = self._next
        if token.kind != kind or token.text in KEYWORDS:
            raise token.error(f"{what} is expected and not {token.seen}")
        self._at += 1
        return token

    def _expect(self, text: str) -> None:
        if not self._has(text):
            raise self._next.error(f"{text!r} is expected and not {self._next.seen}")

    def _expression(self) -> None:
        """sum {"if" condition "else" sum}"""
        self._sum()
        while self._has("if"):
            self._condition()
            self._expect("else")
            self._sum()

    def _condition(self) -> None:
        """["not"] sum {comparison sum}, joined by "and" and "or" """
        is_begun = False
        while not is_begun or self._has("and", "or"):
            is_begun = True
            self._has("not")
            self._sum()
            while self._has(*COMPARISONS):
                self._sum()

    def _sum(self) -> None:
        self._product()
        while self._has("+", "-"):
            self._product()

    def _product(self) -> None:
        self._power()
        while self._has("*", "/", "//", "%", "."):
            self._power()

    def _power(self) -> None:
        """{"-"} value {"[" indices "]"} ["²" | "³" | "^" power]"""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._next.error(f"more than {MAX_DEPTH} brackets and signs are inside each other")
        if self._has("-"):
            self._power()
        else:
            self._value()
            while self._has("["):
                self._list("]")
            if self._has("^"):
                self._power()
            else:
                self._has("²", "³")
        self._depth -= 1

    def _value(self) -> None:
        token = self._next
        if token.kind == "number":
            self._at += 1
        elif self._has("("):
            self._bracketed(")")
        elif self._has("|"):
            self._bracketed("|")
        else:
            self._take("name", "a value")
            if self._next.text == "over" and self._next.kind == "name":
                self._reduction(token)
            elif self._has("("):
                self._check_name(token, self._known.functions, "function")
                self._list(")")
            elif not (self._is_left and token.text not in self._known.values):
                self._check_name(token, [*self._known.values, *self._indices], "value")
            else:
                self._indices.append(token.text)

    def _bracketed(self, end: str) -> None:
        self._expression()
        self._expect(end)

    def _reduction(self, name: Token) -> None:
        """name "over" index [comparison sum] {"," index …} ["where" condition] "of" product"""
        self._check_name(name, REDUCTIONS, "reduction")
        self._expect("over")
        count = len(self._indices)
        while True:
            self._indices.append(self._take("name", "an index").text)
            if self._has(*COMPARISONS):
                self._sum()
            if not self._has(","):
                break
        if self._has("where"):
            self._condition()
        self._expect("of")
        self._product()
        self._ended.update(self._indices[count:])
        del self._indices[count:]

    def _list(self, end: str) -> None:
        """Expressions or slices, between commas, until `end`."""
        while True:
            if self._next.text != ":":
                self._expression()
            while self._has(":"):
                if self._next.text not in (":", ",", end):
                    self._expression()
            if not self._has(","):
                break
        self._expect(end)

    def _check_name(self, token: Token, known: Collection[str], kind: str) -> None:
        if token.text in known:
            return
        if token.text in self._ended:
            raise token.error(f"{token.text!r} is an index of a reduction that has ended; add brackets after `of`")
        close = get_close_matches(token.text, known, n=1)
        meant = f"did you mean {close[0]}?" if close else f"{kind}s are {', '.join(sorted(set(known)))}"
        raise token.error(f"{token.text!r} is not a known {kind}; {meant}")
