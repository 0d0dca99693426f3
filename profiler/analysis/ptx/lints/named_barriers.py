"""Lint: a numbered barrier waits for more threads than ever arrive at it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lane_values import WARP_THREADS
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem
from cbtop.profiler.analysis.ptx.opcodes import opcode


def _find(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield the barriers with a number and a count of threads that the warps of the block cannot reach together.

    Nothing is yielded if the block size is unknown, or the threads of one of these barriers, or if a called function
    may have one.
    """
    values = analysis.data.lane_values
    if values is None or not values.threads.is_whole_block:
        return
    waits: dict[int, list[tuple[int, int]]] = defaultdict(list)
    warps: dict[int, set[int]] = defaultdict(set)
    for at, one in analysis.reachable():
        parts = opcode(one.opcode).parts
        if parts[0] == "call":
            return
        if parts[0] not in ("bar", "barrier") or "warp" in parts or "cluster" in parts:
            continue
        # `bar.red` has its result first, and the predicate that it combines last.
        operands = one.operands[1:-1] if "red" in parts else one.operands
        threads = analysis.threads_at(at)
        if not all(text.isdecimal() for text in operands) or threads is None:
            return
        number = int(operands[0])
        # An arrival counts the whole warp, even if only some of its threads arrive.
        warps[number] |= {thread // WARP_THREADS for thread in threads}
        if len(operands) > 1 and "arrive" not in parts and threads:
            waits[number].append((at, int(operands[1])))
    for number, places in sorted(waits.items()):
        arriving = len(warps[number]) * WARP_THREADS
        for at, count in places:
            if count > arriving:
                yield Problem(at, f"barrier {number} waits for {count} threads, but {arriving} can arrive at it")


BARRIER_COUNT = Lint(
    "barrier-count", LintSeverity.CORRECTNESS,
    "A numbered barrier waits for more threads than the warps that ever arrive at it have. They wait forever.",
    "give all instructions of a barrier the number of threads that take part in it", _find,
)  # fmt: skip
