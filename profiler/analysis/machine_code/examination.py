"""Examine a PTX module: assemble it, and tell the resources, the occupancy and the waste of each entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cbtop.profiler.analysis.machine_code.cubin import CubinError, Kernel
from cbtop.profiler.analysis.machine_code.intensity import Intensity, intensity_of
from cbtop.profiler.analysis.machine_code.occupancy import Block, Occupancy, occupancy_of
from cbtop.profiler.analysis.machine_code.resources import Assembled, Spills, assembled, of_function
from cbtop.profiler.analysis.machine_code.sass import INSTRUCTION_BYTES, Code, Instruction, code_of, disassembled
from cbtop.profiler.analysis.machine_code.tools import Tool, ToolError, missing, tools
from cbtop.profiler.analysis.machine_code.waste import Waste, waste_of
from cbtop.profiler.analysis.ptx.model import Module
from cbtop.profiler.analysis.ptx.summary import summary_of

THREADS = (128, 256, 512, 1024)  # of a block, if the kernel does not declare them


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The assemblers and disassemblers of this machine, newest first."""

    assemblers: Sequence[Tool]
    disassemblers: Sequence[Tool]

    @classmethod
    def of_this_machine(cls) -> Toolbox:
        return cls(tools("ptxas"), tools("nvdisasm"))


@dataclass(frozen=True, slots=True)
class Entry:
    """What the machine code of an entry says. None, or a reason, where that is not known."""

    kernel: Kernel
    spills: Spills | None
    occupancy: tuple[Occupancy, ...]  # of the declared block, or of blocks of THREADS; empty if limits are not known
    has_dynamic_shared: bool  # then the launch adds shared memory, and the occupancy is the most possible
    code: Code | None
    intensity: Intensity | str
    waste: tuple[Waste, ...]


@dataclass(frozen=True, slots=True)
class Examination:
    """The machine code of a module for one architecture."""

    architecture: str
    assembler: str  # name and version; empty if none made machine code
    entries: Mapping[str, Entry]
    problems: tuple[str, ...]  # why something is not known, one line each


def examined(ptx: bytes, module: Module, architecture: str, toolbox: Toolbox) -> Examination:
    """Assemble and examine `ptx`, of which `module` is the contents, for an architecture (sm_90a).

    If a tool is missing or fails, the rest is examined, and `problems` names the tool.
    """
    if not toolbox.assemblers:
        return Examination(architecture, "", {}, (missing("ptxas"),))
    try:
        result = assembled(ptx, architecture, toolbox.assemblers)
    except (ToolError, CubinError) as error:
        return Examination(architecture, "", {}, (str(error),))
    instructions: dict[str, list[Instruction]] = {}
    problems: tuple[str, ...] = ()
    try:
        if toolbox.disassemblers:
            instructions = disassembled(result.cubin, toolbox.disassemblers)
        else:
            problems = (missing("nvdisasm"),)
    except ToolError as error:
        problems = (str(error),)
    dynamic = {one.name for one in module.entries if summary_of(module, one).has_dynamic_shared}
    entries = {
        one.name: _entry(result, one, instructions.get(one.name), one.name in dynamic) for one in result.kernels
    }
    return Examination(architecture, result.assembler, entries, problems)


def _entry(
    result: Assembled, kernel: Kernel, instructions: list[Instruction] | None, has_dynamic_shared: bool
) -> Entry:
    occupancy = _occupancy(result.architecture, kernel)
    code = None if instructions is None else code_of(instructions)
    intensity: Intensity | str = "not disassembled"
    if instructions is not None:
        intensity = intensity_of(instructions[: kernel.code_bytes // INSTRUCTION_BYTES])
    spills = result.spills.get(kernel.name)
    if has_dynamic_shared:  # which may limit the blocks: no saving of another resource is sure to give more
        occupancy = tuple(replace(one, gain=None) for one in occupancy)
    declared = occupancy[0] if len(occupancy) == 1 else None
    waste = waste_of(kernel, spills, of_function(result.advisories, kernel.name), declared, code)
    return Entry(kernel, spills, occupancy, has_dynamic_shared, code, intensity, tuple(waste))


def _occupancy(architecture: str, kernel: Kernel) -> tuple[Occupancy, ...]:
    if not kernel.registers:
        return ()
    found = []
    for threads in (kernel.max_threads,) if kernel.max_threads else THREADS:
        one = occupancy_of(architecture, Block(threads, kernel.registers, kernel.shared_bytes, kernel.barriers or 0))
        if one is not None:
            found.append(one)
    return tuple(found)
