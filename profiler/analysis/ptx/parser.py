"""Parse PTX text, in time linear in its length."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from cbtop.profiler.analysis.ptx.model import (
    SCOPE_MARK,
    TYPE_BITS,
    Module,
    PtxError,
    PtxFunction,
    PtxInstruction,
    Registers,
    Variable,
)

MAX_BYTES = 1 << 26
MAX_DEPTH = 64  # of nested scopes
MAX_VARIABLE_BYTES = 1 << 40
MAX_INNER_REGISTERS = 1 << 16

SPACES = frozenset({"reg", "shared", "local", "global", "const", "param", "tex"})

# Repetitions of characters are possessive (`*+`), and a repeated group divides a text in one way only. So no text can
# make these patterns backtrack for long. Groups are not possessive, because Python 3.11.2 (Debian 12) then goes on at
# a wrong position.
_NAME = r"[a-zA-Z_$%][\w$]*+"
_COMMENT = re.compile(r'"[^"\n]*+"?|//[^\n]*+|/\*(?:[^*]++|\*(?!/))*(?:\*/)?')
_STATEMENT = re.compile(
    rf"""\s*+(?:
      (?P<label>{_NAME})\s*+:(?!:)
    | (?:@(?P<negated>!?)\s*+(?P<guard>{_NAME})\s++)?(?P<opcode>[a-z][\w.:]*+)(?P<operands>[^;]*+);
    | (?P<open>\{{)
    | (?P<close>\}})
    | \.loc\s++(?P<file>\d++)\s++(?P<source_line>\d++)[^\n]*+
    | \.pragma\s*+"[^"\n]*+"(?:\s*+,\s*+"[^"\n]*+")*\s*+;
    | \.reg\b(?P<registers>[^;]*+);
    | \.(?P<directive>\w++)(?P<rest>[^;{{=]*+(?:=[^;]*+)?);
    )""",
    re.VERBOSE,
)
_TOP = re.compile(
    rf"""\s*+(?:
      \.version\s++(?P<version>[\d.]++)
    | \.target\s++(?P<target>[\w]++)(?:\s*+,\s*+\w++)*
    | \.address_size\s++(?P<address_size>32|64)\b
    | \.file\s++(?P<file>\d++)\s++"(?P<path>[^"\n]*+)"[^\n]*+
    | \.section\s++[^{{}};]*+\{{[^}}]*+(?P<section>\}})
    | \.pragma\s*+"[^"\n]*+"\s*+;
    | (?P<function>(?:\.(?:visible|extern|weak|common)\s++)*\.(?P<kind>entry|func)\b)
    | (?P<variable>\.[^;{{=]*+(?:=[^;]*+)?);
    | (?P<label>{_NAME})\s*+:
    | (?P<semicolon>;)
    )""",
    re.VERBOSE,
)
_HEADER = re.compile(  # a function's head, after `.entry` or `.func`
    rf"""(?P<attributes>(?:\s*+\.(?:noreturn|unified|attribute\s*+\([^()]*+\)))*)
    \s*+(?:\((?P<results>[^()]*+)\))?
    \s*+(?P<name>{_NAME})
    \s*+(?:\((?P<parameters>(?:[^()]++|\([^()]*+\))*)\))?
    (?P<limits>[^{{;]*+)(?P<end>[{{;])""",
    re.VERBOSE,
)
_LIMIT = re.compile(r"\.(\w++)((?:\s*+,?\s*+\d++)*)")
_OPERAND = re.compile(r"\{[^{}]*+\}|\[[^\[\]]++\]|\([^()]*+\)|[^\s,{}()\[\]][^,{}()\[\]]*+")
_REGISTER = re.compile(rf"({_NAME})\s*+(?:<\s*+(\d{{1,9}})\s*+>)?")
_TYPES = re.compile(r"(?:\s*+\.\w++)+\s++")
_VARIABLE_NAME = re.compile(rf"({_NAME})((?:\s*+\[[^\[\]]*+\])*)\s*+$")
_IDENTIFIER = re.compile(_NAME)
_FLAT = re.compile(r"[^{}()\[\]]*+")


def parse(text: str) -> Module:
    """Return the module of a PTX text. Raises PtxError with the line if it is not PTX."""
    if len(text) > MAX_BYTES:
        raise PtxError(1, f"the text has more than {MAX_BYTES >> 20} MiB")
    return _Parser(text).module()


def _without_comments(text: str) -> str:
    """Return the PTX text with spaces for its comments. Line breaks and quoted texts stay."""

    def blank(match: re.Match[str]) -> str:
        found = match[0]
        return found if found[0] == '"' else " " + "\n" * found.count("\n")

    return _COMMENT.sub(blank, text) if "/" in text else text


class _Scope:
    """A pair of braces in a function. `names` are the names that it and its outer scopes declare."""

    def __init__(self, number: int, parent: _Scope | None) -> None:
        self.mark = f"{SCOPE_MARK}{number}" if parent else ""
        self.parent = parent
        self.names: dict[str, str] = dict(parent.names) if parent else {}
        self.labels: dict[str, str] = {}

    def declared(self, name: str) -> str:
        """Declare `name` in this scope. Returns its name in the function, which has a suffix in an inner scope."""
        if not self.mark:
            return name
        self.names[name] = name + self.mark
        return name + self.mark

    def renamed(self, operands: str) -> str:
        return _IDENTIFIER.sub(lambda match: self.names.get(match[0], match[0]), operands)

    def label(self, name: str) -> str:
        """Return a label's name in the function, if the label is visible in this scope."""
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return name


class _Parser:
    """The state of a parse: the text without comments, the position in it, and its line."""

    def __init__(self, text: str) -> None:
        self._text = _without_comments(text)
        self._at = 0
        self._line = 1
        self._counted = 0

    def module(self) -> Module:
        version, target, bits = "", "", 64
        functions: list[PtxFunction] = []
        variables: list[Variable] = []
        files: dict[int, str] = {}
        end = len(self._text.rstrip())
        while self._at < end:
            match = _TOP.match(self._text, self._at)
            line = self._line_at(match.end() if match and match["section"] else self._start())
            if match is None:
                self._reject()
            self._at = match.end()
            if match["function"]:
                functions.append(self._function(line, is_entry=match["kind"] == "entry"))
            elif match["variable"]:
                self._variables(match["variable"], line, variables, str)
            elif match["file"]:
                files[_number(match["file"], line)] = match["path"]
            version = match["version"] or version
            target = match["target"] or target
            bits = int(match["address_size"] or bits)
        if not version or not target:
            raise PtxError(1, "this is not PTX: there is no .version with a .target")
        return Module(version, target, bits, tuple(functions), tuple(variables), files)

    def _function(self, line: int, *, is_entry: bool) -> PtxFunction:
        match = _HEADER.match(self._text, self._at)
        if match is None:
            raise PtxError(line, "a function without a name, parameters and a body")
        self._at = match.end()
        parameters: list[Variable] = []
        results: list[Variable] = []
        registers = Registers()
        for declared, into in ((match["parameters"], parameters), (match["results"], results)):
            for text in (declared or "").split(","):
                self._parameter(text, line, into, registers)
        limits = {
            name: tuple(_number(one, line) for one in re.findall(r"\d+", numbers))
            for name, numbers in _LIMIT.findall(match["limits"])
        }
        is_declaration = match["end"] == ";"
        head = PtxFunction(
            match["name"], is_entry, line, tuple(parameters), tuple(results), limits, registers,
            is_declaration=is_declaration, end_line=line,
        )  # fmt: skip
        return head if is_declaration else _Body(self, registers).read(head)

    def _parameter(self, text: str, line: int, into: list[Variable], registers: Registers) -> None:
        text = text.strip()
        if text.startswith(".reg"):
            words = text.split()
            registers.declare(words[-1], words[1].removeprefix("."))
            registers.given.add(words[-1])
        elif text and text != "_":
            self._variables(text, line, into, str)

    def _variables(self, text: str, line: int, into: list[Variable], declared: Callable[[str], str]) -> None:
        """Add the variables of a declaration such as `.shared .align 16 .b8 a[64], b[8]`."""
        if not text.strip():
            return
        head, *initial = text.split("=", 1)
        if not head.lstrip().startswith((".", "_")):
            raise PtxError(line, f"not a declaration: {_short(text)}")
        words: list[str] = []
        for part in head.split(","):
            match = _VARIABLE_NAME.search(part) if len(part) < 1 << 16 else None
            if match is None:
                if initial:
                    return
                raise PtxError(line, f"not a declaration: {_short(part)}")
            words = re.findall(r"\.(\w+)", part[: match.start()]) or words
            space = next((one for one in words if one in SPACES), "")
            type_name = next((one for one in reversed(words) if one in TYPE_BITS), "")
            if not space or not type_name:
                return
            lanes = next((int(one[1:]) for one in words if one in ("v2", "v4", "v8")), 1)
            size = self._size(match[2], lanes * TYPE_BITS[type_name] // 8, line, has_value=bool(initial))
            into.append(Variable(declared(match[1]), space, type_name, size, line))

    def _size(self, lengths: str, element_bytes: int, line: int, *, has_value: bool) -> int | None:
        size: int | None = element_bytes
        for length in re.findall(r"\[([^\[\]]*)\]", lengths):
            if not length.strip():
                return None if not has_value else element_bytes
            size = (size or 0) * _number(length.strip(), line)
            if size > MAX_VARIABLE_BYTES:
                raise PtxError(line, f"a variable of more than {MAX_VARIABLE_BYTES} bytes")
        return size

    # --- position ---------------------------------------------------------------------------------------------------

    def next_statement(self) -> tuple[re.Match[str], int]:
        """Return the next statement of a body and its line."""
        match = _STATEMENT.match(self._text, self._at)
        line = self._line_at(self._start())
        if match is None:
            self._reject()
        self._at = match.end()
        return match, line

    def add_variables(self, text: str, line: int, into: list[Variable], declared: Callable[[str], str]) -> None:
        self._variables(text, line, into, declared)

    def _start(self) -> int:
        """Return the position after the white space at a position."""
        at = self._at
        text = self._text
        while at < len(text) and text[at].isspace():
            at += 1
        self._at = at
        return at

    def _line_at(self, position: int) -> int:
        self._line += self._text.count("\n", self._counted, position)
        self._counted = position
        return self._line

    def _reject(self) -> NoReturn:
        rest = self._text[self._at : self._at + 200].strip()
        found = _short(rest.partition("\n")[0]) if rest else "the end of the text"
        raise PtxError(self._line, f"no PTX statement begins with: {found}" if rest else f"unexpected: {found}")


class _Body:
    """The state of parsing the body of one function."""

    def __init__(self, parser: _Parser, registers: Registers) -> None:
        self._parser = parser
        self._registers = registers
        self._scope = _Scope(0, None)
        self._scopes = 0
        self._depth = 1
        self._inner_registers = 0
        self._instructions: list[PtxInstruction] = []
        self._jumps: list[tuple[int, _Scope]] = []
        self._labels: dict[str, int] = {}
        self._targets: dict[str, tuple[tuple[str, ...], _Scope]] = {}
        self._variables: list[Variable] = []
        self._source: tuple[int, int] | None = None

    def read(self, head: PtxFunction) -> PtxFunction:
        """Read up to the closing brace. Returns `head` with its body."""
        label = ""
        line = head.line
        while self._depth:
            match, line = self._parser.next_statement()
            if match["opcode"]:
                self._instruction(match, line)
            elif match["label"]:
                label = self._label(match["label"], line)
            elif match["file"]:
                self._source = _number(match["file"], line), _number(match["source_line"], line)
            elif match["registers"]:
                self._declare(match["registers"], line)
            elif match["open"]:
                self._open(line)
            elif match["close"]:
                self._close()
            elif match["directive"] == "branchtargets":
                self._targets[label] = tuple(match["rest"].replace(",", " ").split()), self._scope
            elif match["directive"] in SPACES:
                text = f".{match['directive']}{match['rest']}"
                self._parser.add_variables(text, line, self._variables, self._scope.declared)
        self._resolve_jumps()
        targets = {name: tuple(map(scope.label, labels)) for name, (labels, scope) in self._targets.items()}
        return replace(
            head, variables=tuple(self._variables), instructions=self._instructions, labels=self._labels,
            branch_targets=targets, end_line=line,
        )  # fmt: skip

    def _instruction(self, match: re.Match[str], line: int) -> None:
        guard, opcode, text = match["guard"] or "", match["opcode"], match["operands"]
        if self._scope.names:
            guard, text = self._scope.names.get(guard, guard), self._scope.renamed(text)
        if _FLAT.match(text).end() == len(text):  # type: ignore[union-attr]  # it matches every text
            operands = tuple([part.strip() for part in text.split(",")]) if text and not text.isspace() else ()
        else:
            operands = tuple([part.strip() for part in _OPERAND.findall(text)])
            if _OPERAND.sub("", text).strip(" \t\n\r,|@!"):
                raise PtxError(line, f"not an operand list: {_short(text)}")
        if "" in operands:
            raise PtxError(line, f"an operand of {_short(opcode)} is missing")
        if opcode.startswith(("bra", "brx")):
            if not operands:
                raise PtxError(line, f"{opcode} without a target")
            self._jumps.append((len(self._instructions), self._scope))
        self._instructions.append(PtxInstruction(line, guard, bool(match["negated"]), opcode, operands, self._source))

    def _label(self, name: str, line: int) -> str:
        label = name + self._scope.mark
        if label in self._labels:
            raise PtxError(line, f"the label {name} is defined twice")
        self._scope.labels[name] = label
        self._labels[label] = len(self._instructions)
        return label

    def _declare(self, text: str, line: int) -> None:
        """Declare the registers of a declaration such as `.b32 a, %r<10>`."""
        words = _TYPES.match(text)
        if words is None:
            raise PtxError(line, f"registers without a type: {_short(text)}")
        type_name = words[0].rpartition(".")[2].strip()
        for part in text[words.end() :].split(","):
            match = _REGISTER.fullmatch(part.strip())
            if match is None:
                raise PtxError(line, f"not a register: {_short(part)}")
            if match[2] is None:
                self._registers.declare(self._scope.declared(match[1]), type_name)
            elif not self._scope.mark:
                self._registers.declare_range(match[1], int(match[2]), type_name)
            else:
                self._declare_range(match[1], int(match[2]), type_name, line)

    def _declare_range(self, prefix: str, count: int, type_name: str, line: int) -> None:
        """Declare each register of a range such as `%r<10>` in an inner scope. Each gets a new name there."""
        self._inner_registers += count
        if self._inner_registers > MAX_INNER_REGISTERS:
            raise PtxError(line, f"more than {MAX_INNER_REGISTERS} registers in inner scopes")
        for number in range(count):
            self._registers.declare(self._scope.declared(f"{prefix}{number}"), type_name)

    def _open(self, line: int) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PtxError(line, f"scopes are nested deeper than {MAX_DEPTH}")
        self._scopes += 1
        self._scope = _Scope(self._scopes, self._scope)

    def _close(self) -> None:
        self._depth -= 1
        self._scope = self._scope.parent or self._scope

    def _resolve_jumps(self) -> None:
        """Replace the label of each jump by its name in the function."""
        for index, scope in self._jumps:
            one = self._instructions[index]
            label = scope.label(one.operands[-1])
            if label not in self._labels:
                raise PtxError(one.line, f"the label {_short(one.operands[-1])} does not exist")
            self._instructions[index] = one._replace(operands=(*one.operands[:-1], label))


def _number(text: str, line: int) -> int:
    try:
        return int(text, 0)
    except ValueError:
        raise PtxError(line, f"not a number: {_short(text)}") from None


def _short(text: str) -> str:
    text = " ".join(text[:200].split())
    return text if len(text) <= 60 else f"{text[:57]}..."
