"""Find waste in a kernel's machine code: what it is, how much, and how to avoid it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cbtop.profiler.analysis.machine_code.cubin import KernelCode
from cbtop.profiler.analysis.machine_code.lanes import Access, LaneAddresses
from cbtop.profiler.analysis.machine_code.occupancy import (
    BARRIERS,
    BLOCKS,
    REGISTERS,
    SHARED,
    WARPS,
    Occupancy,
    OccupancyChange,
)
from cbtop.profiler.analysis.machine_code.resources import Advisory, Spills
from cbtop.profiler.analysis.machine_code.sass import Code

WASTEFUL = 2  # report an access that takes at least this many times the transactions that it needs
LOW_PERCENT = 25  # percentage of an SM's warps; a kernel with fewer warps can seldom hide the latency of memory
RESOURCES = {
    WARPS: "the number of warps",
    BLOCKS: "the number of blocks",
    REGISTERS: "registers",
    SHARED: "shared memory",
    BARRIERS: "barriers",
}
SPILL_FIX = (
    "give ptxas more registers (fewer threads in __launch_bounds__, a higher maxnreg), or keep fewer values live"
)
LOCAL_FIX = "index arrays of a thread by constants only, or unroll the loops that index them"
NARROW_FIX = "load a vector type (float4, or a tile whose pointers are known to be multiples of 16 bytes)"
UNCOALESCED_FIX = "let consecutive threads access consecutive addresses, or pass the data through shared memory"
CONFLICT_FIX = "pad the rows of the array by one element, or swizzle its columns"
OCCUPANCY_FIX = {
    REGISTERS: "use fewer registers of a thread, or smaller blocks",
    SHARED: "use less shared memory, or fewer stages of a pipeline",
    BARRIERS: "use fewer barriers of a block",
    BLOCKS: "use larger blocks",
    WARPS: "use blocks whose warps divide those of an SM",
}
ADVISORY_FIX = (
    "let no instruction but wgmma use its registers between wgmma.fence and wgmma.wait_group, in one function"
)
# kind of waste -> what it means, in the order of the documentation
WASTES = {
    "spills": "registers are spilled",
    "local-memory": "a thread's array is in local memory",
    "serialized-wgmma": "`ptxas` says that wgmma instructions run one after the other, such as C7510",
    "assembler-advisory": "`ptxas` reports another potential loss",
    "uncoalesced": "a warp touches twice the sectors that hold its bytes, or more",
    "bank-conflicts": "a warp takes twice the passes, or more",
    "not-vectorized": "a thread accesses adjacent addresses one by one",
    "low-occupancy": "fewer than a quarter of an SM's warps",
}


@dataclass(frozen=True, slots=True)
class Waste:
    """A kind of waste in a kernel: what is wasted, its impact, and a way to avoid it.

    `is_possible` says that it may cost no time. `line` is a line of the PTX, or None for the whole kernel.
    """

    id: str
    what: str
    impact: str
    fix: str
    is_possible: bool = False
    line: int | None = None


def waste_of(
    kernel: KernelCode | None,
    spills: Spills | None,
    advisories: list[Advisory],
    occupancy: Occupancy | None,
    code: Code | None,
    lanes: LaneAddresses,
) -> Iterator[Waste]:
    """Return the waste in a kernel. Unknown data is None, and waste that only this data shows is not reported."""
    if spills:
        yield Waste(
            "spills",
            f"{spills.store_bytes:,} bytes of registers are stored to local memory and {spills.load_bytes:,} loaded",
            f"{spills.store_bytes + spills.load_bytes:,} bytes of traffic a thread, each time that code runs",
            SPILL_FIX,
        )
    elif kernel is not None and kernel.frame_bytes and code is not None and _local_accesses(code):
        loads, stores = code.count("local load"), code.count("local store")
        yield Waste(
            "local-memory",
            f"{kernel.frame_bytes} bytes of local memory hold what registers could",
            f"{loads} loads and {stores} stores of local memory, which is as slow as global memory",
            LOCAL_FIX,
        )
    for one in advisories:
        if one.is_loss:
            place = "" if one.line is None else f" (PTX line {one.line})"
            yield Waste(
                "serialized-wgmma" if "wgmma" in one.text else "assembler-advisory",
                f"{one.text}{place}",
                "tensor cores wait for each instruction" if "wgmma" in one.text else f"{one.code} of ptxas",
                ADVISORY_FIX if "wgmma" in one.text else "see the assembler's message",
                line=one.line,
            )
    yield from _uncoalesced(lanes)
    yield from _conflicts(lanes)
    if code is not None:
        yield from _narrow(code)
    if occupancy is not None and occupancy.percent < LOW_PERCENT:
        yield _low(occupancy)


def change_text(change: OccupancyChange) -> str:
    """Return a change as text, for example "8 registers fewer give 3 blocks"."""
    amount, more = abs(change.amount), "fewer" if change.amount < 0 else "more"
    if change.resource == SHARED:
        what = f"{amount} bytes of shared memory {'less' if change.amount < 0 else 'more'}"
    else:
        what = f"{amount} register{'s' * (amount != 1)} {more}"
    verb = "gives" if amount == 1 else "give"
    return f"{what} {verb} {change.blocks} block{'s' * (change.blocks != 1)}"


def limiter_text(occupancy: Occupancy) -> str:
    return " and ".join(RESOURCES[one] for one in occupancy.limiters)


def _local_accesses(code: Code) -> int:
    return code.count("local load") + code.count("local store")


def _uncoalesced(lanes: LaneAddresses) -> Iterator[Waste]:
    wasteful = [one for one in lanes.of_space("global") if one.transactions >= WASTEFUL * one.needed]
    if wasteful:
        worst = max(wasteful, key=_factor)
        yield Waste(
            "uncoalesced",
            f"{len(wasteful)} loads and stores of global memory spread a warp's bytes over too many sectors",
            f"up to {_factor(worst):.1f}x the traffic: {_worst(worst, 'sectors')}",
            UNCOALESCED_FIX,
            # The rest of these memory sectors is perhaps used, by an access with an unknown address.
            is_possible=len(lanes.of_space("global")) < lanes.global_count,
            line=worst.line,
        )


def _conflicts(lanes: LaneAddresses) -> Iterator[Waste]:
    wasteful = [one for one in lanes.of_space("shared") if one.transactions >= WASTEFUL * one.needed]
    if wasteful:
        worst = max(wasteful, key=_factor)
        yield Waste(
            "bank-conflicts",
            f"threads of a warp use the same banks in {len(wasteful)} loads and stores of shared memory",
            f"up to {_factor(worst):.1f}x the time: {_worst(worst, 'passes')}",
            CONFLICT_FIX,
            line=worst.line,
        )


def _worst(one: Access, unit: str) -> str:
    return f"{one.transactions} {unit} instead of {one.needed} (PTX line {one.line})"


def _factor(one: Access) -> float:
    return one.transactions / one.needed


def _narrow(code: Code) -> Iterator[Waste]:
    for space in sorted({one.space for one in code.narrow}):
        groups = [one for one in code.narrow if one.space == space]
        accesses, possible = sum(one.accesses for one in groups), sum(one.possible_accesses for one in groups)
        kind = space.removeprefix("global ")
        yield Waste(
            "not-vectorized",
            f"{accesses} {kind}s of {min(one.width for one in groups)} bits access adjacent addresses of a thread",
            f"{accesses} instructions do what {possible} could, if the addresses are aligned",
            NARROW_FIX,
            is_possible=True,
        )


def _low(occupancy: Occupancy) -> Waste:
    gain = "" if occupancy.gain is None else f"; {change_text(occupancy.gain)}"
    return Waste(
        "low-occupancy",
        f"{occupancy.warps} of {occupancy.max_warps} warps an SM, limited by {limiter_text(occupancy)}{gain}",
        f"{occupancy.percent:.0f} % of the warps that could hide the latency of memory",
        OCCUPANCY_FIX[occupancy.limiters[0]],
        is_possible=True,
    )
