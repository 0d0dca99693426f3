"""Count the instructions, barriers and shared memory in a kernel's text. An instruction counts once, however often it
runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cbtop.profiler.analysis.ptx.lane_values import threads_of
from cbtop.profiler.analysis.ptx.model import Module, PtxFunction

_BARRIER = re.compile(r"(?:bar|barrier)\.(?:(?:cta|cluster)\.)?(?:sync|arrive|wait|red)\b")
_IDENTIFIER = re.compile(r"[a-zA-Z_$%][\w$]*")


@dataclass(frozen=True, slots=True)
class EntrySummary:
    """The counts of an entry (kernel). `has_dynamic_shared` says that a launch adds to `shared_bytes`."""

    name: str
    line: int
    instructions: int
    barriers: int
    shared_bytes: int
    has_dynamic_shared: bool
    required_threads: tuple[int, ...] | None  # the block size that .reqntid requires
    max_threads: tuple[int, ...] | None  # the largest block size that .maxntid allows
    # Lints compute addresses in this many threads. None if the block's shape is unknown.
    checked_threads: int | None
    is_assumed: bool  # whether the block size is assumed, because neither a launch nor .reqntid gives it


def summary_of(module: Module, entry: PtxFunction, launch: Sequence[int] | None = None) -> EntrySummary:
    """Return the counts of an entry. Shared variables of the module count if the entry names them.

    `launch` has the threads of a block along x, y and z, if known.
    """
    outside = {one.name: one for one in module.variables if one.space == "shared"}
    named: set[str] = set()
    if outside:
        for one in entry.instructions:
            for operand in one.operands:
                named.update(outside.keys() & set(_IDENTIFIER.findall(operand)))
    shared = [one for one in entry.variables if one.space == "shared"] + [outside[name] for name in sorted(named)]
    threads = threads_of(entry, launch)
    return EntrySummary(
        name=entry.name,
        line=entry.line,
        instructions=len(entry.instructions),
        barriers=sum(bool(_BARRIER.match(one.opcode)) for one in entry.instructions),
        shared_bytes=sum(one.size_bytes or 0 for one in shared),
        has_dynamic_shared=any(one.size_bytes is None for one in shared),
        required_threads=entry.limits.get("reqntid"),
        max_threads=entry.limits.get("maxntid"),
        checked_threads=None if threads is None else threads.count,
        is_assumed=threads is None or not threads.is_whole_block,
    )
