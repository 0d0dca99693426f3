"""The class of a lint (a check of PTX code) and of its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis


class LintSeverity(StrEnum):
    """How certain a lint is that it has found an error. The most certain comes first."""

    # Proved on a path through the code: a result can be wrong, or a thread can wait forever.
    CORRECTNESS = "correctness"
    LIKELY = "likely"  # an error, unless something holds that the PTX does not show
    ADVICE = "advice"  # the result is right, but the code is slower or longer than necessary


class Problem(NamedTuple):
    """A line of a function that a lint reports, and the message. `instruction` is its number, or None for the whole
    function.
    """

    instruction: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Lint:
    """A check of a PTX function. `what` describes the error, and `fix` how to repair it."""

    id: str
    severity: LintSeverity
    what: str
    fix: str
    find: Callable[[FunctionAnalysis], Iterator[Problem]]


@dataclass(frozen=True, slots=True)
class LintFinding:
    """A problem that a lint has found. `line` is a line of the PTX, from 1. `source` is the file and line of the
    source, if the PTX has debug lines.
    """

    lint: Lint
    function: str
    line: int
    source: tuple[str, int] | None
    message: str


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
