"""Facts about single instructions, from their opcodes (PTX ISA 8.8, chapter 9)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from cbtop.profiler.analysis.ptx.model import TYPE_BITS, PtxInstruction, Registers

# Instructions that write no register. Neither does one with an address as its first operand.
NO_RESULT = frozenset({
    "st", "stmatrix", "red", "membar", "fence", "bra", "brx", "ret", "exit", "trap", "brkpt", "prefetch", "prefetchu",
    "applypriority", "discard", "cp", "pmevent", "nanosleep", "setmaxnreg", "griddepcontrol", "sust", "sured",
    "stackrestore", "tensormap", "multimem", "wgmma", "tcgen05", "bar", "barrier",
})  # fmt: skip
ROW_BYTES = 16  # bytes of a matrix row for ldmatrix or stmatrix
STATE_SPACES = frozenset({"global", "shared", "local", "param", "const"})
STRONG_ORDERS = ("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio", "sc")
_WITH_RESULT = re.compile(r"wgmma\.mma_async|tcgen05\.ld\b|multimem\.ld_reduce|(?:bar|barrier)(?:\.cta)?\.red")
_WARP_SYNC = re.compile(
    r"(?:shfl|vote|match|redux|elect)\.sync|bar\.warp\.sync|(?:mma|wmma|ldmatrix|stmatrix|wgmma)\."
)
_ORDERING = re.compile(r"(?:bar|barrier|mbarrier|atom|red|call|cp|multimem|clusterlaunchcontrol|tcgen05|wgmma)\b")
_OWN_COPY = re.compile(r"cp\.async\.(?:ca|cg|commit_group|wait_group|wait_all)\b")
_IDENTIFIER = re.compile(r"[a-zA-Z_$%][\w$#]*")


@dataclass(frozen=True, slots=True)
class Opcode:
    """The parts of an opcode. `space` is a state space, or "" for generic addresses and other instructions.

    `type` is the last type, such as `f32`. `bytes` is the size of a memory access, with all elements of a vector.
    """

    base: str
    parts: tuple[str, ...]
    space: str
    type: str
    lanes: int
    has_result: bool

    @property
    def bytes(self) -> int:
        return self.lanes * TYPE_BITS.get(self.type, 0) // 8


@lru_cache(maxsize=4096)
def opcode(text: str) -> Opcode:
    """Return the parts of an opcode such as `ld.global.nc.v4.f32`."""
    parts = tuple(text.split("."))
    space = next((part.partition("::")[0] for part in parts[1:] if part.partition("::")[0] in STATE_SPACES), "")
    type_name = next((part for part in reversed(parts) if part in TYPE_BITS), "")
    lanes = next((int(part[1:]) for part in parts if part in ("v2", "v4", "v8")), 1)
    has_result = parts[0] not in NO_RESULT or _WITH_RESULT.match(text) is not None
    return Opcode(parts[0], parts, space, type_name, lanes, has_result)


def registers_in(text: str, registers: Registers) -> tuple[str, ...]:
    """Return the registers that an operand names."""
    return tuple([name for name in _IDENTIFIER.findall(text) if registers.type_of(name) is not None])


def results(one: PtxInstruction, registers: Registers) -> tuple[str, ...]:
    """Return the registers that an instruction writes."""
    if not one.operands or one.operands[0][0] == "[":
        return ()
    if one.opcode.startswith("call"):
        first = one.operands[0]
        return registers_in(first, registers) if first[0] == "(" and len(one.operands) > 1 else ()
    return registers_in(one.operands[0], registers) if opcode(one.opcode).has_result else ()


def inputs(one: PtxInstruction, registers: Registers) -> tuple[str, ...]:
    """Return the registers that an instruction reads, including the predicate of its guard."""
    skips_first = bool(results(one, registers))
    found = [one.guard] if one.guard else []
    for operand in one.operands[skips_first:]:
        found += registers_in(operand, registers)
    return tuple(found)


def is_end(one: PtxInstruction) -> bool:
    """Whether a thread that executes the instruction leaves the function."""
    return opcode(one.opcode).base in ("ret", "exit", "trap")


def is_branch(one: PtxInstruction) -> bool:
    return opcode(one.opcode).base in ("bra", "brx")


def is_block_barrier(one: PtxInstruction) -> bool:
    """Whether this is a barrier for all threads of the block, because it gives no number of threads."""
    parts = opcode(one.opcode).parts
    if parts[0] not in ("bar", "barrier") or "warp" in parts or "cluster" in parts or "arrive" in parts:
        return False
    return len(one.operands) == (1 if "sync" in parts else 3)


def is_block_reduction(one: PtxInstruction) -> bool:
    """Whether this barrier of the whole block gives all threads the same result, as `__syncthreads_count` does."""
    return "red" in opcode(one.opcode).parts and is_block_barrier(one)


def is_cluster_arrival(one: PtxInstruction) -> bool:
    """Whether all threads of a cluster, and so of a block, must execute this arrival at the cluster's barrier."""
    return one.opcode.startswith("barrier.cluster.arrive")


def may_diverge_at(one: PtxInstruction) -> bool:
    """Whether threads of a warp may run a barrier at different instructions: `barrier.sync` without `.aligned`."""
    parts = opcode(one.opcode).parts
    return parts[0] == "barrier" and "aligned" not in parts


def is_warp_sync(one: PtxInstruction) -> bool:
    """Whether the instruction synchronises the threads of a warp."""
    return _WARP_SYNC.match(one.opcode) is not None


def may_order(one: PtxInstruction) -> bool:
    """Whether the instruction can order the memory accesses of threads in different warps, for example a barrier."""
    if is_warp_sync(one) and not one.opcode.startswith(("wgmma", "tcgen05")):
        return False
    if _OWN_COPY.match(one.opcode):
        return False  # these copy, and wait for the copies of their own thread
    return _ORDERING.match(one.opcode) is not None or is_strong(one)


def is_strong(one: PtxInstruction) -> bool:
    """Whether this is a load or store for synchronisation, or a fence."""
    parts = opcode(one.opcode).parts
    return parts[0] in ("fence", "membar") or any(part in STRONG_ORDERS for part in parts[1:])


def is_plain_access(one: PtxInstruction, space: str) -> bool:
    """Whether the instruction is an ordinary (weak) load or store of a state space."""
    parsed = opcode(one.opcode)
    return parsed.base in ("ld", "st") and parsed.space == space and not is_strong(one)


def copied_bytes(one: PtxInstruction) -> int:
    """Return how many bytes of shared memory a thread writes by `cp.async`, or 0 for other instructions."""
    if not one.opcode.startswith(("cp.async.ca.shared", "cp.async.cg.shared")) or len(one.operands) < 3:
        return 0
    return int(one.operands[2]) if one.operands[2].isdecimal() else 0


def matrix_rows(one: PtxInstruction) -> int:
    """Return how many threads of a warp give a row address to `ldmatrix` or `stmatrix` (8 per matrix), or 0 for other
    instructions.
    """
    parts = opcode(one.opcode).parts
    if parts[0] not in ("ldmatrix", "stmatrix") or "m8n8" not in parts:
        return 0
    return 8 * next((int(part[1:]) for part in parts if part in ("x1", "x2", "x4")), 1)


def address_in(one: PtxInstruction) -> str:
    """Return the first operand that is an address, without its brackets, or ""."""
    return next((operand[1:-1].strip() for operand in one.operands if operand[0] == "["), "")
