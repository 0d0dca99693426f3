"""Lint: an access to shared memory outside of the variable that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem
from cbtop.profiler.analysis.ptx.model import shown
from cbtop.profiler.analysis.ptx.opcodes import opcode

_ACCESSES = frozenset({"ld", "st", "atom", "red"})


def _find(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield accesses at a known distance from a shared variable of known size that are outside of it.

    If the distance depends on the thread, the block size must be known. Accesses that run only for some parameters or
    loaded values are left out, because compilers unroll loops to constant indexes that no launch reaches.
    """
    values = analysis.data.lane_values
    for at, one in analysis.reachable() if values else ():
        parsed = opcode(one.opcode)
        if parsed.base not in _ACCESSES or parsed.space not in ("shared", "") or not parsed.bytes:
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
        if len(offsets) > 1:
            threads = analysis.threads_at(at) if values and values.threads.is_whole_block else None
            offsets = tuple(offsets[thread] for thread in threads or ())
        outside = [one for one in offsets if one < 0 or one + parsed.bytes > variable.size_bytes]
        if outside and not one.guard and analysis.depends_on_threads_alone(at):
            yield Problem(
                at,
                f"{parsed.bytes} bytes at byte {max(outside, key=abs)} of {shown(variable.name)}, which has "
                f"{variable.size_bytes} bytes",
            )


SHARED_BOUNDS = Lint(
    "shared-bounds", LintSeverity.CORRECTNESS,
    "An access is outside of the shared variable that it names.",
    "make the variable as large as its largest index, or mend the index", _find,
)  # fmt: skip
