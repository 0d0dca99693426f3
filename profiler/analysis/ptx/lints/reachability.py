"""Lints: code that no thread can reach, and loops that no thread can leave."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem


def _endless(analysis: FunctionAnalysis) -> Iterator[Problem]:
    flow = analysis.flow
    if stuck := sorted(flow.reachable - flow.reaching_exit):
        first = min(stuck, key=lambda number: flow.blocks[number].start)
        yield Problem(flow.blocks[first].start, "a thread that comes here never leaves: no path leads to ret or exit")


def _unreachable(analysis: FunctionAnalysis) -> Iterator[Problem]:
    flow = analysis.flow
    previous = True
    for number, block in enumerate(flow.blocks[: flow.exit]):
        is_reached = number in flow.reachable
        if not is_reached and previous and block.end > block.start:
            yield Problem(block.start, "no path from the entry leads here")
        previous = is_reached


NO_EXIT = Lint(
    "no-exit", LintSeverity.CORRECTNESS,
    "A path enters a loop that has no way out, so the kernel never ends.",
    "give the loop a condition that leaves it", _endless,
)  # fmt: skip
UNREACHABLE = Lint(
    "unreachable", LintSeverity.LIKELY,
    "No thread can reach these instructions. A branch or label is probably wrong.",
    "remove the code, or let a branch lead to it", _unreachable,
)  # fmt: skip
