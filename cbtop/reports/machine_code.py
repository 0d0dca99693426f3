"""Print what is known about the machine code of each PTX entry: as lines of text, and as values for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from cbtop.profiler.analysis.machine_code.cubin import KernelCode
from cbtop.profiler.analysis.machine_code.examination import Entry, Examination
from cbtop.profiler.analysis.machine_code.intensity import Intensity
from cbtop.profiler.analysis.machine_code.lanes import LaneAddresses
from cbtop.profiler.analysis.machine_code.occupancy import Occupancy
from cbtop.profiler.analysis.machine_code.resources import Spills
from cbtop.profiler.analysis.machine_code.sass import Code
from cbtop.profiler.analysis.machine_code.waste import change_text, limiter_text
from cbtop.profiler.analysis.roofline import MEMORY
from cbtop.units import NOT_MEASURED, counted, number


def entry_lines(examination: Examination, name: str, *, verbose: bool) -> Iterator[str]:
    """Return lines of text about the machine code of an entry."""
    one = examination.entries[name]
    made_by = f"{examination.architecture}, {examination.assembler}"
    if one.kernel is None:
        yield f"resources, occupancy, accesses, intensity: {NOT_MEASURED}"
    else:
        yield f"resources ({made_by}): {_resources(one.kernel, one.spills)}"
        yield f"occupancy (derived): {_occupancy(one)}"
        yield f"accesses (static): {NOT_MEASURED if one.code is None else _accesses(one.code)}"
        yield f"intensity (estimate): {_intensity(one.intensity)}"
    yield f"transactions of a warp (derived): {_transactions(one.lanes)}"
    for waste in one.waste:
        possible = "possible " if waste.is_possible else ""
        yield f"{possible}waste {waste.id}: {waste.what}; {waste.impact}"
        if verbose:
            yield f"  fix: {waste.fix}"


def entry_json(examination: Examination, name: str) -> dict[str, object]:
    """Return the JSON fields about the machine code of an entry."""
    one = examination.entries[name]
    kernel, code = one.kernel, one.code
    intensity = one.intensity if isinstance(one.intensity, Intensity) else None
    return {
        "architecture": examination.architecture,
        "assembler": examination.assembler or None,
        "registers": None if kernel is None else kernel.registers,
        "spill_store_bytes": None if one.spills is None else one.spills.store_bytes,
        "spill_load_bytes": None if one.spills is None else one.spills.load_bytes,
        "stack_bytes": None if kernel is None else kernel.frame_bytes,
        "shared_bytes": None if kernel is None else kernel.shared_bytes,
        "constant_bytes": None if kernel is None else kernel.constant_bytes,
        "barriers": None if kernel is None else kernel.barriers,
        "occupancy": [asdict(each) | {"source": "derived"} for each in one.occupancy],
        "accesses": None if code is None else code.widths,
        "tensor_core_instructions": None if code is None else code.tensor,
        "transactions": [asdict(each) | {"source": "derived"} for each in one.lanes.accesses],
        "unknown_addresses": {space: one.lanes.unknown(space) for space in ("global", "shared")},
        "flop_per_requested_byte": None if intensity is None else intensity.flop_per_byte,
        "bound": None if intensity is None else intensity.bound,
        "waste": [asdict(each) for each in one.waste],
    }


def _resources(kernel: KernelCode, spilled: Spills | None) -> str:
    registers = NOT_MEASURED if kernel.registers is None else counted(kernel.registers, "register")
    frame = NOT_MEASURED if kernel.frame_bytes is None else counted(kernel.frame_bytes, "byte")
    if spilled is None:
        spills = f"spills {NOT_MEASURED}"
    elif spilled:
        spills = f"spills {spilled.store_bytes:,} bytes stored and {spilled.load_bytes:,} loaded"
    else:
        spills = "no spills"
    parts = [registers, spills, f"stack {frame}", f"shared {counted(kernel.shared_bytes, 'byte')}"]
    return ", ".join([*parts, f"constants {counted(kernel.constant_bytes, 'byte')}"])


def _occupancy(one: Entry) -> str:
    if not one.occupancy:
        return f"{NOT_MEASURED}: the limits of this architecture are not known"
    most = "at most, because the launch adds shared memory: " if one.has_dynamic_shared else ""
    if len(one.occupancy) > 1:
        sizes = ", ".join(f"{each.warps} at {each.threads}" for each in one.occupancy)
        return f"{most}warps an SM of {one.occupancy[0].max_warps}, by threads of a block: {sizes}"
    return most + _of_block(one.occupancy[0])


def _of_block(one: Occupancy) -> str:
    if not one.blocks:
        return f"a block of {one.threads} threads can't be launched: {limiter_text(one)}"
    blocks = f"{counted(one.blocks, 'block')} of {one.threads} threads, {one.warps} of {one.max_warps} warps an SM"
    changes = [change_text(change) for change in (one.gain, one.loss) if change is not None]
    return "; ".join([f"{blocks}, limited by {limiter_text(one)}", *changes])


def _accesses(code: Code) -> str:
    parts = []
    for space, widths in code.widths.items():
        bits = ", ".join(f"{instructions} of {width} bits" for width, instructions in widths.items())
        parts.append(f"{space}s: {bits}")
    if code.bulk_copies:
        parts.append(f"bulk copies: {code.bulk_copies}")
    parts.append(f"tensor cores: {', '.join(f'{count} {name}' for name, count in code.tensor.items()) or 'not used'}")
    return "; ".join(parts)


def _transactions(lanes: LaneAddresses) -> str:
    parts = []
    for space, unit, count in (("global", "sectors", lanes.global_count), ("shared", "passes", lanes.shared_count)):
        known, unknown = lanes.of_space(space), lanes.unknown(space)
        if count and not known:
            parts.append(f"{space} {NOT_MEASURED}: no address follows from the thread's id alone")
        elif count:
            total, needed = sum(one.transactions for one in known), sum(one.needed for one in known)
            parts.append(f"{space} {total} {unit}, {needed} needed, in {len(known)} of {count} loads and stores")
            parts[-1] += f" ({unknown} with an unknown address)" * bool(unknown)
    return "; ".join(parts) or "no loads or stores"


def _intensity(one: Intensity | str) -> str:
    if isinstance(one, str):
        return f"{NOT_MEASURED}: {one}"
    bound = {None: "the bound depends on the GPU", MEMORY: "memory-bound, unless caches serve the loads"}
    return f"{number(one.flop_per_byte)} FLOP a requested byte: {bound.get(one.bound, 'compute-bound')}"
