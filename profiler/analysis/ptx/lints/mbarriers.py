"""Lint: fewer arrivals at an mbarrier than its initialisation says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lane_values import LaneValue
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem
from cbtop.profiler.analysis.ptx.model import PtxInstruction
from cbtop.profiler.analysis.ptx.opcodes import opcode

_Place = tuple[str, int]


def _find(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield the initialisation of an mbarrier if all its arrivals are known and too few to end its first phase.

    An arrival is unknown in a loop, at an unknown address, by unknown threads, or from outside.
    """
    values = analysis.data.lane_values
    if values is None or not values.threads.is_whole_block:
        return
    needed: dict[_Place, tuple[int, int]] = {}
    arrived: dict[_Place, int] = defaultdict(int)
    waits: set[_Place] = set()
    for at, one in analysis.reachable():
        kind = _kind(one)
        if not kind:
            continue
        place = _place(analysis, at)
        threads = () if kind == "wait" else analysis.threads_at(at)
        count = _count(analysis, one, kind)
        if place is None or threads is None or count is None or kind == "unknown":
            return
        if kind == "init":
            if place in needed or len(threads) != 1:
                return
            needed[place] = at, count
        elif kind == "wait":
            waits.add(place)
        elif analysis.flow.block_of[at] in analysis.flow.in_loop:
            return
        else:
            arrived[place] += count * len(threads)
    for place, (at, count) in sorted(needed.items()):
        if place in waits and arrived[place] < count:
            yield Problem(
                at, f"this mbarrier expects {count} arrivals, but all its threads together make {arrived[place]}"
            )


def _kind(one: PtxInstruction) -> str:
    """Return what an instruction does with an mbarrier: init, wait, arrive, unknown, or ""."""
    parts = opcode(one.opcode).parts
    if parts[0] == "mbarrier":
        if "init" in parts:
            return "init"
        if "test_wait" in parts or "try_wait" in parts:
            return "wait"
        if "arrive" in parts:
            return "unknown" if "shared::cluster" in parts else "arrive"
        return "" if parts[1] in ("expect_tx", "inval", "complete_tx", "pending_count") else "unknown"
    return "unknown" if any("mbarrier" in part and "complete_tx" not in part for part in parts) else ""


def _place(analysis: FunctionAnalysis, at: int) -> _Place | None:
    address = analysis.address(at)
    if address is None or len(address.terms) != 1 or not address.is_uniform:
        return None
    ((name, factor),) = address.terms.items()
    return (name, address.lanes[0]) if name.startswith("shared:") and factor == 1 else None


def _count(analysis: FunctionAnalysis, one: PtxInstruction, kind: str) -> int | None:
    """Return how many arrivals an instruction makes or expects at an mbarrier, per thread."""
    address = next((place for place, text in enumerate(one.operands) if text[0] == "["), len(one.operands))
    after = one.operands[address + 1 :]
    if kind == "wait" or (kind == "arrive" and (not after or "expect_tx" in one.opcode)):
        return 1
    values = analysis.data.lane_values
    value: LaneValue | None = values.of_address(after[0]) if values and after else None
    return value.lanes[0] if value is not None and value.is_number and value.is_uniform else None


MBARRIER_COUNT = Lint(
    "mbarrier-count", LintSeverity.CORRECTNESS,
    "An mbarrier is initialised for more arrivals than its threads ever make, and a thread waits for it forever.",
    "initialise the mbarrier with the number of arrivals in one phase", _find,
)  # fmt: skip
