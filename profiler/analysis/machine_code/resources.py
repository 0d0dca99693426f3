"""Assemble PTX, and read the resources of each kernel from the machine code and from the assembler's report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cbtop.profiler.analysis.machine_code.cubin import KernelCode, kernels_of
from cbtop.profiler.analysis.machine_code.tools import Tool, ToolError, run

PROPERTIES = re.compile(
    r"Function properties for (\S+)\n[^\n]*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
ADVISORY = re.compile(r"^ptxas[^\n:]*: \((C\d+)\) ([^\n]*)$", re.MULTILINE)
OF_FUNCTION = re.compile(r"\bfunction '([^']*)'")
AT_LINE = re.compile(r"\bline (\d+)")
ARCHITECTURE = re.compile(r"sm_[0-9]{2,3}[af]?")
SERIALIZED = "wgmma.mma_async instructions are serialized due to "
SETMAXNREG = "'setmaxnreg' ignored"
REASONS = {  # part of an assembler's message -> the reason in our words
    "insufficient register resources": "there are not enough registers for the accumulators",
    "defining accumulator registers": "another instruction writes an accumulator before wgmma.wait_group",
    "reading accumulator registers": "another instruction reads an accumulator before wgmma.wait_group",
    "defining input registers": "another instruction writes an input register before wgmma.wait_group",
    "ill formed pipeline stage": "wgmma.fence, commit_group and wait_group do not enclose the instructions",
    "in divergent path": "the instructions are in a branch that not every thread takes",
    "Extern calls": "the kernel calls a function of another module",
    "crossing function boundary": "the instructions and their wait_group are in different functions",
}
INJECTED = "wgmma.wait_group is injected"


@dataclass(frozen=True, slots=True)
class Spills:
    """The bytes that a thread stores to local memory and loads again, because it has too few registers. Each
    instruction counts once.
    """

    store_bytes: int
    load_bytes: int

    def __bool__(self) -> bool:
        return self.store_bytes + self.load_bytes > 0


@dataclass(frozen=True, slots=True)
class Advisory:
    """A note of the assembler. Without a function or line, `function` is empty and `line` is None."""

    code: str  # the assembler's number, such as C7510
    function: str
    line: int | None  # line in the PTX
    text: str
    is_loss: bool  # whether the assembler expects a loss of performance


@dataclass(frozen=True, slots=True)
class Assembled:
    """The machine code that an assembler made from a PTX module, and its report."""

    architecture: str
    assembler: str  # name and version
    cubin: bytes
    kernels: tuple[KernelCode, ...]
    spills: Mapping[str, Spills]  # function -> its spills
    advisories: tuple[Advisory, ...]


def assembled(ptx: bytes, architecture: str, assemblers: Sequence[Tool]) -> Assembled:
    """Assemble the text `ptx` for a GPU architecture such as sm_90a, by the first assembler that accepts it.

    If none does, raises ToolError with the problem of the first one. Raises CubinError if the result cannot be read.
    """
    if not ARCHITECTURE.fullmatch(architecture):
        raise ToolError(f"{architecture} is not an architecture such as sm_90")
    problem: ToolError | None = None
    for tool in assemblers:
        try:
            ran = run(tool, ["-v", "-arch", architecture, "-o", "output"], ptx, writes="output")
        except ToolError as error:
            problem = problem or error
            continue
        cubin = ran.written or b""
        log = (ran.output + ran.notes).decode("utf-8", "replace")
        return Assembled(architecture, tool.label, cubin, kernels_of(cubin), spills_of(log), advisories_of(log))
    raise problem or ToolError("no assembler was given")


def spills_of(log: str) -> dict[str, Spills]:
    """Return the spills of each function, read from the report of `ptxas -v` or NVRTC."""
    return {name: Spills(int(stores), int(loads)) for name, _, stores, loads in PROPERTIES.findall(log)}


def advisories_of(log: str) -> tuple[Advisory, ...]:
    """Return the numbered notes in a report of `ptxas`, with known messages in plain words."""
    return tuple(_advisory(code, text) for code, text in ADVISORY.findall(log))


def of_function(advisories: Iterable[Advisory], name: str) -> list[Advisory]:
    return [one for one in advisories if one.function == name]


def _advisory(code: str, text: str) -> Advisory:
    function, line = OF_FUNCTION.search(text), AT_LINE.search(text)
    return Advisory(
        code,
        function[1] if function else "",
        int(line[1]) if line else None,
        _in_words(text),
        "Potential Performance Loss" in text,
    )


def _in_words(text: str) -> str:
    if SERIALIZED in text:
        cause = text.partition(SERIALIZED)[2]
        words = next((words for part, words in REASONS.items() if part in cause), cause)
        return f"wgmma instructions run one after the other: {words}"
    if INJECTED in text:
        return "the assembler added a wgmma.wait_group, because a register is used before the code waits for it"
    if SETMAXNREG in text:
        return f"setmaxnreg has no effect: {text.partition(SETMAXNREG)[2].strip(' ;.')}"
    return text.removeprefix("Potential Performance Loss: ")
