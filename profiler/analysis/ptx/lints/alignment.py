"""Lint: addresses that are not multiples of the access's size."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lane_values import WARP_THREADS
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem
from cbtop.profiler.analysis.ptx.opcodes import ROW_BYTES, matrix_rows, opcode


def _find(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield an access if the addresses of two threads cannot both be aligned, wherever the array begins.

    Accesses with unknown addresses or threads are left out.
    """
    for at, one in analysis.reachable():
        parsed = opcode(one.opcode)
        rows = matrix_rows(one)
        if (parsed.base not in ("ld", "st", "atom", "red") and not rows) or parsed.space == "param":
            continue
        size = ROW_BYTES if rows else parsed.bytes
        address = analysis.address(at) if size > 1 else None
        if address is None or len({lane % size for lane in address.lanes}) == 1:
            continue
        threads = analysis.threads_at(at) or ()
        offsets = {thread: address.lanes[thread] for thread in threads if not rows or thread % WARP_THREADS < rows}
        first = next(iter(offsets), None)
        other = next((thread for thread in offsets if (offsets[thread] - offsets[first or 0]) % size), None)
        if first is not None and other is not None:
            distance = offsets[other] - offsets[first]
            yield Problem(
                at,
                f"{size} bytes need an address that is a multiple of {size}, but those of threads {first} and "
                f"{other} are {distance} bytes apart",
            )


MISALIGNED = Lint(
    "misaligned", LintSeverity.CORRECTNESS,
    "A vector access, or a row of ldmatrix, has an address that is not a multiple of its size in all threads. The "
    "GPU ends the kernel with an error.",
    "pad the rows of the tile to a multiple of the access, or access single elements", _find,
)  # fmt: skip
