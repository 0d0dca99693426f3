"""Lints that compare a block and its tiles with what the hardware demands: whole warps, whole fragments, and 48 KiB
of shared memory.

An array in PTX is a number of bytes, without the rows and columns of a tile. So the bytes that threads access are
checked. A power of two is not required, because rows can be padded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lane_values import WARP_THREADS, Threads
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem, counted
from cbtop.profiler.analysis.ptx.model import PtxInstruction
from cbtop.profiler.analysis.ptx.opcodes import opcode
from cbtop.profiler.analysis.ptx.summary import summary_of

# Most static shared memory of a block. ptxas 12.8 and 13.0 refuse more for sm_80 to sm_120.
MAX_STATIC_BYTES = 48 << 10
WARP_GROUP_THREADS = 4 * WARP_THREADS  # four warps execute a wgmma instruction together (PTX ISA, "wgmma.mma_async")
_OF_A_WARP = frozenset({"mma", "wmma", "ldmatrix", "stmatrix", "movmatrix"})
_ACCESSES = frozenset({
    "ld", "ldu", "st", "atom", "red", "cp", "ldmatrix", "stmatrix", "mma", "wmma", "wgmma", "tcgen05", "tex", "tld4",
    "suld", "sust", "sured", "multimem", "mbarrier", "call", "prefetch", "tensormap", "clusterlaunchcontrol",
})  # fmt: skip


def _partial_fragments(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield tensor-core instructions of incomplete warps. Yields nothing if the threads are unknown."""
    values = analysis.data.lane_values
    for at, one in analysis.reachable() if values else ():
        unit = _threads_of_fragment(one)
        threads = analysis.threads_at(at) if unit else None
        if not threads or values is None:
            continue
        for group, present in Counter(thread // unit for thread in threads).items():
            is_known = values.threads.is_whole_block or (group + 1) * unit <= values.threads.count
            if present < unit and is_known:
                yield Problem(
                    at,
                    f"{one.opcode.partition('.')[0]} needs {unit} threads from thread {group * unit} on, but "
                    f"{present} execute it",
                )
                break


def _threads_of_fragment(one: PtxInstruction) -> int:
    """Return how many threads must run an instruction together, or 0 if a thread can run it alone."""
    parts = opcode(one.opcode).parts
    if parts[0] == "wgmma":
        return WARP_GROUP_THREADS if "mma_async" in parts else 0
    return WARP_THREADS if parts[0] in _OF_A_WARP else 0


def _too_much_shared(analysis: FunctionAnalysis) -> Iterator[Problem]:
    if not analysis.function.is_entry:
        return
    size = summary_of(analysis.module, analysis.function).shared_bytes
    if size > MAX_STATIC_BYTES:
        yield Problem(None, f"{size:,} bytes of shared variables; a block can have {MAX_STATIC_BYTES:,}")


def _idle_threads(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield an entry if threads of its block have no work. A block of one thread is left out, because it is serial on
    purpose.
    """
    values = analysis.data.lane_values
    if values is None or not analysis.function.is_entry or not values.threads.is_whole_block:
        return
    shape = values.threads
    lanes = -(-shape.count // WARP_THREADS) * WARP_THREADS
    if lanes > shape.count > 1:
        yield Problem(
            None,
            f"a block of {shape.count} threads takes {counted(lanes // WARP_THREADS, 'warp')}: "
            f"{lanes - shape.count} of {lanes} lanes are idle",
        )
    busy = _busy_threads(analysis, shape)
    if 0 < len(busy) < shape.count:
        idle = shape.count - len(busy)
        yield Problem(None, f"{idle} of the {shape.count} threads of a block access no memory: its tile has fewer")


def _busy_threads(analysis: FunctionAnalysis, shape: Threads) -> set[int]:
    """Return the threads that may access memory (other than parameters) or use tensor cores."""
    busy: set[int] = set()
    for at, one in analysis.reachable():
        parsed = opcode(one.opcode)
        if parsed.base in _ACCESSES and parsed.space != "param":
            threads = analysis.threads_at(at)
            busy.update(range(shape.count) if threads is None else threads)
            if len(busy) == shape.count:
                break
    return busy


PARTIAL_FRAGMENT = Lint(
    "partial-fragment", LintSeverity.CORRECTNESS,
    "A part of a warp, or of the four warps of wgmma, executes a tensor-core instruction. Its result is undefined.",
    "launch blocks of whole warps (wgmma: a multiple of 128 threads), and let all threads of a warp execute it",
    _partial_fragments,
)  # fmt: skip
SHARED_SIZE = Lint(
    "shared-size", LintSeverity.CORRECTNESS,
    "The shared variables of an entry are larger than a block can declare, so it can't be assembled.",
    "use a smaller tile, or shared memory that the launch adds (extern), up to the limit of the GPU",
    _too_much_shared,
)  # fmt: skip
IDLE_THREADS = Lint(
    "idle-threads", LintSeverity.ADVICE,
    "A block has threads without work: its size is not a multiple of a warp, or its tile has fewer elements.",
    "launch a multiple of 32 threads that the tile fills, or let each thread take several elements", _idle_threads,
)  # fmt: skip
