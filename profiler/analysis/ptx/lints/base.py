"""A lint and its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis


class LintSeverity(StrEnum):
    """The certainty of an error, highest first."""

    CORRECTNESS = "correctness"  # proved on a path: a result can be wrong, or a thread can wait forever
    LIKELY = "likely"  # wrong unless something holds that the PTX does not say
    ADVICE = "advice"  # correct, but slower or longer than necessary


class Problem(NamedTuple):
    """A place that a lint reports, and what happens there. The place is the number of an
    instruction in the function, or None for the function itself."""

    instruction: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Lint:
    """A check of one function. `what` says what is wrong, `fix` how to repair it."""

    id: str
    severity: LintSeverity
    what: str
    fix: str
    find: Callable[[FunctionAnalysis], Iterator[Problem]]


@dataclass(frozen=True, slots=True)
class LintFinding:
    """A problem in a function. `line` is a line of the PTX, from 1; `source` a file and a line of its debug lines."""

    lint: Lint
    function: str
    line: int
    source: tuple[str, int] | None
    message: str


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
