"""Examine a PTX module: assemble it, and find the resources, occupancy and waste of each kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cbtop.profiler.analysis.machine_code.cubin import CubinError, KernelCode
from cbtop.profiler.analysis.machine_code.intensity import Intensity, intensity_of
from cbtop.profiler.analysis.machine_code.lanes import LaneAddresses, lanes_of
from cbtop.profiler.analysis.machine_code.occupancy import BlockShape, Occupancy, occupancy_of
from cbtop.profiler.analysis.machine_code.resources import Advisory, Assembled, Spills, assembled, of_function
from cbtop.profiler.analysis.machine_code.sass import INSTRUCTION_BYTES, Code, Instruction, code_of, disassembled
from cbtop.profiler.analysis.machine_code.tools import Tool, ToolError, missing, tools
from cbtop.profiler.analysis.machine_code.waste import Waste, waste_of
from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.model import Module
from cbtop.profiler.analysis.ptx.summary import summary_of

# Compute the occupancy for these block sizes if a kernel declares none.
THREADS = (128, 256, 512, 1024)


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
    """The resources and memory accesses of a kernel. An unknown value is None, or a text with the reason."""

    kernel: KernelCode | None  # the resources that the kernel's machine code needs; None without machine code
    spills: Spills | None
    # The occupancy for the declared block size, or for each size in THREADS. Empty if the GPU's limits are unknown.
    occupancy: tuple[Occupancy, ...]
    has_dynamic_shared: bool  # whether the launch may add shared memory, which may lower the occupancy
    code: Code | None
    lanes: LaneAddresses  # addresses computed from the PTX
    intensity: Intensity | str
    waste: tuple[Waste, ...]


@dataclass(frozen=True, slots=True)
class Examination:
    """The results for all kernels of a module, for one GPU architecture."""

    architecture: str
    assembler: str  # name and version of the assembler; "" without machine code
    entries: Mapping[str, Entry]
    problems: tuple[str, ...]  # one line for each tool that is missing or failed


def examined(
    ptx: bytes,
    module: Module,
    architecture: str,
    toolbox: Toolbox,
    launches: Mapping[str, Sequence[int]] | None = None,
) -> Examination:
    """Assemble the text `ptx` for a GPU architecture such as sm_90a, and examine its kernels. `module` is the parsed
    text.

    `launches` has the block's threads along x, y and z for each entry, if known. If a tool is missing or fails,
    `problems` says so, and the rest is examined.
    """
    result, instructions, problem = _machine_code(ptx, architecture, toolbox)
    kernels = {one.name: one for one in result.kernels} if result is not None else {}
    entries = {
        one.name: _entry(
            FunctionAnalysis(module, one, (launches or {}).get(one.name)),
            result,
            kernels.get(one.name),
            instructions.get(one.name),
        )
        for one in module.entries
    }
    assembler = "" if result is None else result.assembler
    return Examination(architecture, assembler, entries, (problem,) if problem else ())


def _machine_code(
    ptx: bytes, architecture: str, toolbox: Toolbox
) -> tuple[Assembled | None, dict[str, list[Instruction]], str]:
    """Return the machine code, the instructions of each kernel, and a line about a disassembler that is missing or
    failed.
    """
    if not toolbox.assemblers:
        return None, {}, missing("ptxas")
    try:
        result = assembled(ptx, architecture, toolbox.assemblers)
    except (ToolError, CubinError) as error:
        return None, {}, str(error)
    if not toolbox.disassemblers:
        return result, {}, missing("nvdisasm")
    try:
        return result, disassembled(result.cubin, toolbox.disassemblers), ""
    except ToolError as error:
        return result, {}, str(error)


def _entry(
    analysis: FunctionAnalysis,
    result: Assembled | None,
    kernel: KernelCode | None,
    instructions: list[Instruction] | None,
) -> Entry:
    code: Code | None = None
    intensity: Intensity | str = "not disassembled"
    if instructions is not None and kernel is not None:
        code = code_of(instructions)
        intensity = intensity_of(instructions[: kernel.code_bytes // INSTRUCTION_BYTES])
    occupancy: tuple[Occupancy, ...] = ()
    spills: Spills | None = None
    advisories: list[Advisory] = []
    if result is not None and kernel is not None:
        occupancy = _occupancy(result.architecture, kernel, analysis.launch)
        spills, advisories = result.spills.get(kernel.name), of_function(result.advisories, kernel.name)
    has_dynamic_shared = summary_of(analysis.module, analysis.function).has_dynamic_shared
    if has_dynamic_shared:  # the launch may add shared memory, so saving something else may not give more blocks
        occupancy = tuple(replace(one, gain=None) for one in occupancy)
    lanes = lanes_of(analysis)
    declared = occupancy[0] if len(occupancy) == 1 else None
    waste = waste_of(kernel, spills, advisories, declared, code, lanes)
    return Entry(kernel, spills, occupancy, has_dynamic_shared, code, lanes, intensity, tuple(waste))


def _occupancy(architecture: str, kernel: KernelCode, launch: Sequence[int] | None) -> tuple[Occupancy, ...]:
    if not kernel.registers:
        return ()
    found = []
    declared = math.prod(launch) if launch else kernel.max_threads
    for threads in (declared,) if declared else THREADS:
        one = occupancy_of(
            architecture, BlockShape(threads, kernel.registers, kernel.shared_bytes, kernel.barriers or 0)
        )
        if one is not None:
            found.append(one)
    return tuple(found)
