"""Count memory accesses and arithmetic in machine code, as `nvdisasm` prints it.

Each instruction counts once, however often it runs.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cbtop.profiler.analysis.machine_code.tools import Tool, ToolError, run

INSTRUCTION_BYTES = 16  # bytes of each instruction, from compute capability 7.0
WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
DEFAULT_WIDTH = 32  # bits per thread if an access has no width in its name
MAX_WIDTH = 128  # at most this many bits per thread in one access, on every architecture
SPACES = {  # first part of an instruction's name -> kind of memory access
    "LDG": "global load",
    "STG": "global store",
    "LDGSTS": "global load",  # copies from global to shared memory without a register
    "LDS": "shared load",
    "STS": "shared store",
    "LDL": "local load",
    "STL": "local store",
    "LD": "generic load",
    "ST": "generic store",
}
MERGEABLE = ("global load", "global store")
# The size of a bulk copy is in memory, so the instruction does not show it.
BULK_COPIES = ("UBLKCP", "UTMALDG", "UTMASTG", "UTMAREDG", "UBLKRED")
TENSOR = re.compile(r"(?:[HIBDQO]MMA|[HIBQ]GMMA|UTC[HIQO]MMA)$")
REGISTER = re.compile(r"U?R\d+")
ADDRESS = re.compile(r"(?:desc\[UR\d+\])?\[([^\]]*)\]")
OFFSET = re.compile(r"\+?(-?0x[0-9a-f]+)$")
PREDICATE = re.compile(r"!?U?P[T0-9]")
WRITERS_OF_ONE = ("FADD", "FMUL", "FFMA", "MOV", "IADD3", "S2R", "LOP3", "SHF", "MUFU")
LOADS = ("LDG", "LDS", "LDL", "LD", "LDC", "LDCU", "ULDC")
WRITTEN_REGISTERS = 8  # an instruction writes at most this many registers, other than loads and WIDE_WRITERS
WIDE_WRITERS = ("HGMMA", "IGMMA", "QGMMA", "BGMMA", "LDTM", "CALL")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of the machine code."""

    address: int  # bytes from the start of the function to the instruction
    predicate: str
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def width(self) -> int:
        """Bits per thread that the instruction moves, if it accesses memory."""
        return next((WIDTHS[part] for part in self.opcode.split(".")[1:] if part in WIDTHS), DEFAULT_WIDTH)

    @property
    def branch_target(self) -> int | None:
        """The address that a branch jumps to, or None for other instructions."""
        last = self.operands.rpartition(",")[2].strip()
        return int(last, 16) if self.name == "BRA" and re.fullmatch("0x[0-9a-f]{1,12}", last) else None


@dataclass(frozen=True, slots=True)
class Narrow:
    """Several accesses of a thread to adjacent addresses, which could be merged into fewer and wider ones."""

    space: str  # a value of SPACES
    accesses: int
    width: int  # bits per access
    possible_width: int  # possible bits per access
    # Address of the first instruction to merge, in bytes from the start of the function.
    address: int

    @property
    def possible_accesses(self) -> int:
        return self.accesses * self.width // self.possible_width


@dataclass(frozen=True, slots=True)
class Code:
    """The memory accesses and tensor-core instructions of a kernel's machine code."""

    # Kind of access (see SPACES) -> bits per thread -> number of instructions.
    widths: dict[str, dict[int, int]]
    tensor: dict[str, int]  # name of a tensor-core instruction -> how many there are
    bulk_copies: int
    narrow: tuple[Narrow, ...]

    def count(self, space: str) -> int:
        return sum(self.widths.get(space, {}).values())

    def moved_bytes(self, space: str) -> int:
        """Bytes per thread of all accesses of these kinds, if each instruction runs once."""
        return sum(bits // 8 * number for bits, number in self.widths.get(space, {}).items())


def disassembled(cubin: bytes, disassemblers: Sequence[Tool]) -> dict[str, list[Instruction]]:
    """Return the instructions of each kernel, from the first disassembler that can read the machine code. Raises
    ToolError.
    """
    problem: ToolError | None = None
    for tool in disassemblers:
        try:
            return instructions_of(run(tool, ["-json"], cubin).output)
        except ToolError as error:
            problem = problem or error
    raise problem or ToolError("no disassembler was given")


def instructions_of(printed: bytes) -> dict[str, list[Instruction]]:
    """Return the instructions of each function, read from the output of `nvdisasm -json`. Raises ToolError."""
    try:
        _, functions = json.loads(printed)
        return {str(one["function-name"]): [*_instructions(one["sass-instructions"])] for one in functions}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ToolError(f"nvdisasm printed other JSON than expected: {error}") from error


def code_of(instructions: Sequence[Instruction]) -> Code:
    """Count the accesses and tensor-core instructions of a kernel."""
    widths: dict[str, Counter[int]] = {}
    for one in instructions:
        if one.name in SPACES:
            widths.setdefault(SPACES[one.name], Counter())[one.width] += 1
    tensor = Counter(one.name for one in instructions if TENSOR.fullmatch(one.name))
    return Code(
        widths={space: dict(sorted(widths[space].items())) for space in SPACES.values() if space in widths},
        tensor=dict(tensor),
        bulk_copies=sum(one.name in BULK_COPIES for one in instructions),
        narrow=tuple(_narrow(instructions)),
    )


def _instructions(printed: Sequence[dict[str, str]]) -> Iterator[Instruction]:
    for place, one in enumerate(printed):
        yield Instruction(
            place * INSTRUCTION_BYTES, one.get("predicate", ""), str(one["opcode"]), str(one.get("operands", ""))
        )


# --- accesses of adjacent addresses --------------------------------------------------------------------------------


def _narrow(instructions: Sequence[Instruction]) -> Iterator[Narrow]:
    targets = {one.branch_target for one in instructions}
    # Key of accesses that may be merged -> offset of each access -> address of its instruction.
    groups: dict[tuple[str, str, str, int], dict[int, int]] = {}
    for one in instructions:
        if one.address in targets:
            yield from _merged(groups)
            groups = {}
        space = SPACES.get(one.name, "")
        access = _base_and_offset(one.operands) if space in MERGEABLE and one.name != "LDGSTS" else None
        if access is not None and one.width < MAX_WIDTH:
            key = (space, one.predicate + access[0], _kind(one.opcode), one.width)
            groups.setdefault(key, {}).setdefault(access[1], one.address)
        if _ends_block(one):
            yield from _merged(groups)
            groups = {}
        for key in [key for key in groups if _may_write(one, key[1])]:
            yield from _merged({key: groups.pop(key)})
    yield from _merged(groups)


def _merged(groups: dict[tuple[str, str, str, int], dict[int, int]]) -> Iterator[Narrow]:
    for (space, _, _, width), addresses in groups.items():
        size = width // 8
        offsets = set(addresses)
        for wide in (MAX_WIDTH, MAX_WIDTH // 2):
            number = wide // width
            starts = [
                offset
                for offset in sorted(offsets)
                if number > 1
                and offset % (wide // 8) == 0
                and {offset + size * place for place in range(number)} <= offsets
            ]
            if starts:
                yield Narrow(space, number * len(starts), width, wide, min(addresses[start] for start in starts))
                offsets -= {start + size * place for start in starts for place in range(number)}


def _base_and_offset(operands: str) -> tuple[str, int] | None:
    """Return the registers of an address, and the constant that is added. None if the address has no register."""
    match = ADDRESS.search(operands)
    if match is None or not REGISTER.search(match[1]):
        return None
    offset = OFFSET.search(match[1])
    return (match[1][: offset.start()], int(offset[1], 16)) if offset else (match[1], 0)


def _kind(opcode: str) -> str:
    """Return the parts of an opcode except its width, such as the cache policy."""
    return ".".join(part for part in opcode.split(".") if part not in WIDTHS)


def _ends_block(one: Instruction) -> bool:
    return one.name in (
        "BRA",
        "BRX",
        "JMP",
        "JMX",
        "EXIT",
        "RET",
        "CALL",
        "BAR",
        "BSYNC",
        "WARPSYNC",
        "BSSY",
        "MEMBAR",
    )


def _may_write(one: Instruction, base: str) -> bool:
    """Return whether an instruction can change a register that contains an address."""
    if one.name in WIDE_WRITERS:
        return True
    if one.name in ("STG", "STS", "STL", "ST", "RED", "REDG", "LDGSTS"):
        return False
    written = next((part for part in one.operands.split(",") if not PREDICATE.match(part.strip())), "").strip()
    match = REGISTER.match(written)
    if match is None:
        return False
    kind, first = match[0].rstrip("0123456789"), int(match[0].lstrip("UR"))
    count = WRITTEN_REGISTERS
    if one.name in LOADS:
        count = max(one.width // DEFAULT_WIDTH, 1)
    elif one.name in WRITERS_OF_ONE:
        count = 1
    for register in REGISTER.findall(base):
        number = int(register.lstrip("UR"))
        # A 64-bit address is in two registers, and the machine code names only the first.
        if register.rstrip("0123456789") == kind and first - 1 <= number < first + count:
            return True
    return False
