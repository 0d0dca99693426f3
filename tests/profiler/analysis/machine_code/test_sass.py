"""Tests of the counts in machine code: memory accesses, tensor-core instructions and arithmetic intensity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbtop.profiler.analysis.machine_code.cubin import kernels_of
from cbtop.profiler.analysis.machine_code.intensity import Intensity, intensity_of
from cbtop.profiler.analysis.machine_code.resources import Spills, assembled
from cbtop.profiler.analysis.machine_code.sass import (
    INSTRUCTION_BYTES,
    Instruction,
    Narrow,
    code_of,
    disassembled,
    instructions_of,
)
from cbtop.profiler.analysis.machine_code.tools import ToolError, tools
from cbtop.profiler.analysis.roofline import COMPUTE, MEMORY

DATA = Path(__file__).parent / "data"
PRINTED = (DATA / "kernels.json").read_bytes()
KERNELS = {one.name: one for one in kernels_of((DATA / "kernels.cubin").read_bytes())}


def code(*lines: str) -> list[Instruction]:
    """Return instructions that are parsed from lines such as "@P0 LDG.E R0, [R2.64]"."""
    made = []
    for number, line in enumerate(lines):
        predicate, rest = line.split(" ", 1) if line.startswith("@") else ("", line)
        opcode, _, operands = rest.partition(" ")
        made.append(Instruction(number * INSTRUCTION_BYTES, predicate, opcode, operands.replace(" ", "")))
    return made


def intensity_in(name: str) -> Intensity:
    found = intensity_of(instructions_of(PRINTED)[name][: KERNELS[name].code_bytes // INSTRUCTION_BYTES])
    assert isinstance(found, Intensity)
    return found


def test_accesses_of_memory_are_counted_by_their_width() -> None:
    found = {name: code_of(instructions).widths for name, instructions in instructions_of(PRINTED).items()}
    assert found["narrow"] == {"global load": {32: 4}, "global store": {32: 1}}
    assert found["wide"] == {"global load": {128: 1}, "global store": {32: 1}}
    assert found["shared_rows"]["shared load"] == {32: 5}
    assert found["indexed"]["local store"] == {128: 4}


def test_local_accesses_of_a_kernel_that_spills_are_the_spills_that_ptxas_reports() -> None:
    spilled = code_of(instructions_of(PRINTED)["spilled"])
    assert Spills(spilled.moved_bytes("local store"), spilled.moved_bytes("local load")) == Spills(124, 136)


def test_adjacent_narrow_accesses_are_found_and_a_wide_one_is_not() -> None:
    found = {name: code_of(instructions).narrow for name, instructions in instructions_of(PRINTED).items()}
    assert found["narrow"] == (Narrow("global load", 4, 32, 128, 0x80),)
    assert found["narrow"][0].possible_accesses == 1
    assert found["wide"] == found["shared_rows"] == ()


@pytest.mark.parametrize(
    "lines",
    [
        ("LDG.E R0, [R2.64]", "LDG.E R1, [R2.64+0x8]"),  # not adjacent
        ("LDG.E R0, [R2.64+0x4]", "LDG.E R1, [R2.64+0x8]"),  # The first address is not a multiple of 8 bytes.
        ("LDG.E R0, [R2.64]", "LDG.E R1, [R4.64+0x4]"),  # of different addresses
        ("LDG.E R2, [R2.64]", "LDG.E R1, [R2.64+0x4]"),  # The first load overwrites its own address register.
        ("LDG.E R0, [R2.64]", "IMAD.WIDE R2, R4, R5, R6", "LDG.E R1, [R2.64+0x4]"),
        ("LDG.E R0, [R2.64]", "IADD3 R3, R3, 0x4, RZ", "LDG.E R1, [R2.64+0x4]"),  # its second register
        ("LDG.E R0, [R2.64]", "@P0 BRA 0x20", "LDG.E R1, [R2.64+0x4]"),
        ("LDG.E R0, [R2.64]", "@P0 LDG.E R1, [R2.64+0x4]"),  # One of the two loads is conditional.
        # These two accesses cannot be merged, because 128 bits are the widest access.
        ("LDG.E.128 R0, [R4.64]", "LDG.E.128 R8, [R4.64+0x10]"),
        ("LDG.E R0, [R2.64]", "LDG.E.CONSTANT R1, [R2.64+0x4]"),  # of different caches
        ("LDS R0, [R2]", "LDS R1, [R2+0x4]"),
    ],
)
def test_accesses_that_no_wider_one_replaces_are_not_found(lines: tuple[str, ...]) -> None:
    assert code_of(code(*lines)).narrow == ()


def test_adjacent_accesses_are_found_between_other_instructions() -> None:
    lines = (
        "LDG.E R0, [R2.64]",
        "FADD R5, R6, R7",
        "LDG.E R1, desc[UR4][R2.64+0x4]",
        "STG.E [R8.64], R0",
        "STG.E [R8.64+0x4], R1",
    )
    found = code_of(code(*lines)).narrow
    assert [(one.space, one.accesses, one.possible_width) for one in found] == [
        ("global load", 2, 64),
        ("global store", 2, 64),
    ]


def test_tensor_core_instructions_and_bulk_copies_are_counted() -> None:
    lines = (
        "HMMA.16816.F32 R4, R36, R2, R4",
        "HGMMA.64x128x16.F32 R88, gdesc[UR20], R88",
        "HFMA2.MMA R1, RZ, RZ, 0, 1",
    )
    found = code_of(code(*lines, "UTMALDG.2D [UR8], [UR4]"))
    assert (found.tensor, found.bulk_copies) == ({"HMMA": 1, "HGMMA": 1}, 1)


def test_other_json_is_an_error() -> None:
    for printed in (b"", b"{}", b"[]", b"[1, 2]", b'[{}, [{"function-name": "f"}]]', b"[" * 100_000, b"\xff"):
        with pytest.raises(ToolError):
            instructions_of(printed)


def test_instructions_have_the_addresses_of_their_places() -> None:
    instructions = instructions_of(PRINTED)["wide"]
    assert [one.address for one in instructions[:3]] == [0, 16, 32]
    assert json.loads(PRINTED)[1][0]["length"] == len(instructions_of(PRINTED)["shared_rows"]) * INSTRUCTION_BYTES


# --- arithmetic intensity: equal to that of the CUDA source --------------------------------------------------------


def test_intensity_is_that_of_the_source() -> None:
    # The source has three additions, four loads of 4 bytes and a store of 4 bytes.
    assert intensity_in("narrow").flop_per_byte == 3 / 20
    assert intensity_in("wide").flop_per_byte == 3 / 20
    # Spilled registers do not count as access to global memory.
    assert intensity_in("spilled").flop_per_byte == 80 / 164
    # The unrolled loop has one addition for each load of 4 bytes.
    assert intensity_in("shared_rows").flop_per_byte == 1 / 4
    assert intensity_in("narrow").bound == MEMORY


LOOP = (
    "LDG.E.128 R4, [R2.64]",
    "LDG.E.128 R8, [R2.64+0x10]",
    "HMMA.16816.F32 R12, R4, R8, R12",
    "@P0 BRA 0x0",
    "EXIT",
)


def test_a_tile_of_a_product_counts_its_tensor_core_flop() -> None:
    found = intensity_of(code(*LOOP))
    assert isinstance(found, Intensity)
    assert (found.flop, found.requested_bytes) == (2 * 16 * 8 * 16, 2 * 16 * 32)
    group = intensity_of(code("LDGSTS.E.128 [R1], [R2.64]", "HGMMA.64x128x16.F32 R88, gdesc[UR20], R88"))
    assert isinstance(group, Intensity)
    # Four warps run this instruction together, so each warp has a quarter of its floating-point operations.
    assert group.flop == 2 * 64 * 128 * 16 / 4


def test_much_arithmetic_for_few_bytes_is_bound_by_compute() -> None:
    found = intensity_of(code("LDG.E R0, [R2.64]", *["FFMA R4, R4, R5, R6"] * 500))
    assert isinstance(found, Intensity)
    assert found.bound == COMPUTE


def test_many_other_instructions_for_few_bytes_leave_the_bound_open() -> None:
    found = intensity_of(code("LDG.E R0, [R2.64]", *["LOP3 R4, R4, R5, R6"] * 500))
    assert isinstance(found, Intensity)
    assert found.bound is None


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (("FADD R0, R1, R2",), "no access to global memory"),
        (("UBLKCP [UR4], [UR6], UR8",), "bulk copies"),
        (("LDG.E R0, [R2.64]", *LOOP[:2], "FADD R0, R0, R4", "@P0 BRA 0x10", "@P1 BRA 0x0"), "nested loops"),
        ((*LOOP[:4], "LDG.E R0, [R2.64]", "FADD R0, R0, R4", "@P0 BRA 0x40"), "different intensities"),
        (("LDG.E R9, [R2.64]", "FADD R0, R0, R9", "@P0 BRA 0x10"), "no loop accesses global memory"),
    ],
)
def test_an_intensity_that_depends_on_trip_counts_is_not_known(lines: tuple[str, ...], reason: str) -> None:
    found = intensity_of(code(*lines))
    assert isinstance(found, str)
    assert reason in found


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_every_installed_disassembler_gives_the_same_counts(architecture: str) -> None:
    assemblers, disassemblers = tools("ptxas"), tools("nvdisasm")
    if not assemblers or not disassemblers:
        pytest.skip("no ptxas or no nvdisasm on this machine")
    result = assembled((DATA / "kernels.ptx").read_bytes(), architecture, assemblers)
    for tool in disassemblers:
        found = {name: code_of(one) for name, one in disassembled(result.cubin, [tool]).items()}
        spilled, reported = found["spilled"], result.spills["spilled"]
        assert Spills(spilled.moved_bytes("local store"), spilled.moved_bytes("local load")) == reported
        assert found["wide"].widths["global load"] == {128: 1}
        assert found["narrow"].narrow
