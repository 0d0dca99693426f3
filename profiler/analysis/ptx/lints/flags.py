"""Lints about flags in memory: values that one thread stores and other threads wait for."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem
from cbtop.profiler.analysis.ptx.model import PtxInstruction
from cbtop.profiler.analysis.ptx.opcodes import address_in, is_strong, opcode, registers_in

_SHARED_MEMORY = ("global", "shared", "")  # the state spaces of memory that other threads can write
_WIDE = ("gpu", "gl", "sys", "cluster")


def _weak_spin(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield ordinary (weak) loads from a fixed address in loops that end only when the value changes. The hardware
    may never load it again.
    """
    for loop, loads in _spins(analysis):
        weak = [at for at in loads if not is_strong(analysis.instructions[at])]
        if weak and len(weak) == len(loads):
            yield Problem(
                weak[0],
                f"a loop of {len(loop)} block{'s' * (len(loop) > 1)} waits for this load, which is neither volatile "
                "nor an acquire; it can be done once, before the loop",
            )


def _spins(analysis: FunctionAnalysis) -> Iterator[tuple[frozenset[int], list[int]]]:
    """Yield the loops that only wait for a value in memory, and the numbers of their loads."""
    flow, data = analysis.flow, analysis.data
    for loop in flow.loops:
        if not loop <= flow.reachable:
            continue
        inside = [at for number in loop for at in range(flow.blocks[number].start, flow.blocks[number].end)]
        written = {name for at in inside for name in data.writes[at]}
        loads = [at for at in sorted(inside) if _reads_memory(analysis.instructions[at])]
        if not loads or any(_acts(analysis.instructions[at]) for at in inside):
            continue
        if any(
            set(registers_in(address_in(analysis.instructions[at]), analysis.function.registers)) & written
            for at in loads
        ):
            continue
        if not _is_carried(analysis, loop, written) and loop & flow.reaching_exit:
            yield loop, loads


def _reads_memory(one: PtxInstruction) -> bool:
    parsed = opcode(one.opcode)
    return parsed.base == "ld" and parsed.space in _SHARED_MEMORY and "nc" not in parsed.parts


def _acts(one: PtxInstruction) -> bool:
    """Whether an instruction does more than compute a value, such as a store, a call or a synchronisation."""
    parsed = opcode(one.opcode)
    if parsed.base in ("fence", "membar", "nanosleep"):
        return False
    return (not parsed.has_result and parsed.base not in ("bra", "brx", "ret", "exit")) or parsed.base in (
        "atom", "call", "mbarrier", "shfl", "vote", "redux", "elect", "match", "tex", "barrier", "bar",
    )  # fmt: skip


def _is_carried(analysis: FunctionAnalysis, loop: frozenset[int], written: set[str]) -> bool:
    """Whether a register carries a value from one pass of a loop to the next, as a counter does."""
    names = sorted(written)
    live = analysis.data.live_at_ends(names)
    flow = analysis.flow
    entries = {one for one in loop if not set(flow.blocks[one].predecessors) <= loop}
    for entry in entries:
        first_writes: set[str] = set()
        block = flow.blocks[entry]
        before = {name for place, name in enumerate(names) if live[entry] >> place & 1}
        reads: set[str] = set()
        for at in range(block.start, block.end):
            reads |= set(analysis.data.reads[at]) - first_writes
            first_writes |= set(analysis.data.writes[at])
        if (reads | (before - first_writes)) & written:
            return True
    return False


def _unfenced_flag(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield relaxed or volatile stores to global memory (a flag) that follow a weak store (its data) without a
    fence.
    """
    flow = analysis.flow
    pending: dict[int, frozenset[int]] = {number: frozenset() for number in flow.reachable}
    work = sorted(flow.reachable)
    found: dict[int, int] = {}
    while work:
        number = work.pop()
        now = set(pending[number])
        for at in range(flow.blocks[number].start, flow.blocks[number].end):
            one = analysis.instructions[at]
            parsed = opcode(one.opcode)
            if _is_wide_fence(one) or parsed.base == "call":
                now.clear()
            elif parsed.base == "st" and parsed.space in ("global", ""):
                if not is_strong(one):
                    now = {at}
                elif now and not _has(one, "release") and not _has(one, "mmio"):
                    found[at] = min(now)
        for successor in flow.blocks[number].successors:
            if successor in pending and not now <= pending[successor]:
                pending[successor] |= frozenset(now)
                work.append(successor)
    for at, earlier in sorted(found.items()):
        yield Problem(
            at,
            f"this store can be seen before the one at line {analysis.instructions[earlier].line}: there is no fence "
            "between",
        )


def _unfenced_wait(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield weak loads that follow a loop of relaxed or volatile loads (a wait for a flag) without a fence."""
    flow = analysis.flow
    for loop, loads in _spins(analysis):
        if not all(is_strong(analysis.instructions[at]) for at in loads):
            continue
        inside = [at for number in loop for at in range(flow.blocks[number].start, flow.blocks[number].end)]
        if any(_is_wide_fence(analysis.instructions[at]) for at in inside):
            continue
        after = [one for number in loop for one in flow.blocks[number].successors if one not in loop]
        if (at := _first_weak_load(analysis, after)) is not None:
            yield Problem(
                at,
                f"this load can be done before the wait at line {analysis.instructions[loads[0]].line} ends: there "
                "is no fence between",
            )


def _first_weak_load(analysis: FunctionAnalysis, blocks: list[int]) -> int | None:
    """Return the first weak load of global memory that a path from these blocks reaches before a fence."""
    flow = analysis.flow
    done = set(blocks)
    work = list(blocks)
    found = []
    while work:
        number = work.pop()
        for at in range(flow.blocks[number].start, flow.blocks[number].end):
            one = analysis.instructions[at]
            if _is_wide_fence(one) or opcode(one.opcode).base == "call":
                break
            if _reads_memory(one) and opcode(one.opcode).space != "shared" and not is_strong(one):
                found.append(at)
                break
        else:
            for successor in flow.blocks[number].successors:
                if successor not in done:
                    done.add(successor)
                    work.append(successor)
    return min(found, default=None)


def _is_wide_fence(one: PtxInstruction) -> bool:
    """Whether an instruction orders memory accesses for threads of other blocks."""
    parts = opcode(one.opcode).parts
    if parts[0] in ("fence", "membar"):
        return any(part in _WIDE for part in parts)
    return any(_has(one, order) for order in ("acquire", "release", "acq_rel"))


def _has(one: PtxInstruction, part: str) -> bool:
    return part in opcode(one.opcode).parts


WEAK_SPIN = Lint(
    "weak-spin", LintSeverity.CORRECTNESS,
    "A loop waits for a value in memory with a load that is neither volatile nor an acquire. The load can be done "
    "once, and the loop then never ends.",
    "load the flag with ld.acquire.gpu, or volatile with a fence after the loop", _weak_spin,
)  # fmt: skip
UNFENCED_FLAG = Lint(
    "unfenced-flag", LintSeverity.LIKELY,
    "A volatile or relaxed store that looks like a flag follows a weak store without a fence. Another block can see "
    "the flag before the data.",
    "store the flag with st.release.gpu, or put fence.acq_rel.gpu (__threadfence) before it", _unfenced_flag,
)  # fmt: skip
UNFENCED_WAIT = Lint(
    "unfenced-wait", LintSeverity.LIKELY,
    "A loop waits for a flag with volatile or relaxed loads, and weak loads follow without a fence. They can return "
    "data from before the flag was set.",
    "load the flag with ld.acquire.gpu, or put fence.acq_rel.gpu (__threadfence) after the loop", _unfenced_wait,
)  # fmt: skip
