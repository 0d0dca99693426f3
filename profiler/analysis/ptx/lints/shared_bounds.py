"""Lint: an access to shared memory outside of its variable."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lane_values import WARP_THREADS
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem
from cbtop.profiler.analysis.ptx.model import shown
from cbtop.profiler.analysis.ptx.opcodes import ROW_BYTES, matrix_rows, opcode

_ACCESSES = frozenset({"ld", "st", "atom", "red", "ldmatrix", "stmatrix"})


def _find(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield accesses outside of a shared variable. Its size and the access's distance from it must be known.

    If the distance depends on the thread and the block size is unknown, only thread 0 counts. An access is left out
    if a parameter or a loaded value decides whether it runs, because compilers unroll loops to constant indexes that
    no launch reaches.
    """
    values = analysis.data.lane_values
    for at, one in analysis.reachable() if values else ():
        parsed = opcode(one.opcode)
        rows = matrix_rows(one)
        size = ROW_BYTES if rows else parsed.bytes
        if parsed.base not in _ACCESSES or parsed.space not in ("shared", "") or not size:
            continue
        address = analysis.address(at)
        if address is None or len(address.terms) != 1:
            continue
        ((term, factor),) = address.terms.items()
        kind, _, name = term.partition(":")
        variable = analysis.variables.get(name)
        if kind not in ("shared", "generic") or factor != 1 or variable is None or variable.size_bytes is None:
            continue
        offsets = address.lanes
        if min(offsets) >= 0 and max(offsets) + size <= variable.size_bytes:
            continue
        if len(offsets) > 1:
            threads = analysis.threads_at(at)
            if values is not None and not values.threads.is_whole_block:
                threads = (0,) if threads and threads[0] == 0 else ()  # each block has a thread 0
            offsets = tuple(offsets[thread] for thread in threads or () if not rows or thread % WARP_THREADS < rows)
        outside = [one for one in offsets if one < 0 or one + size > variable.size_bytes]
        if outside and not one.guard and analysis.depends_on_threads_alone(at):
            yield Problem(
                at,
                f"{size} bytes at byte {max(outside, key=abs)} of {shown(variable.name)}, which has "
                f"{variable.size_bytes} bytes",
            )


SHARED_BOUNDS = Lint(
    "shared-bounds", LintSeverity.CORRECTNESS,
    "An access is outside of the shared variable that it names.",
    "make the variable as large as its largest index, or mend the index", _find,
)  # fmt: skip
