"""Tests of memory accesses of a warp: the sectors and passes equal those of a simulation of each thread."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.analysis.machine_code.lanes import Access, LaneAddresses, lanes_of, needed_passes, passes, sectors
from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.parser import parse

HEAD = """\
.version 7.8
.target sm_80
.address_size 64
.visible .entry kernel(.param .u64 kernel_param_0)
.reqntid 128, 1, 1
{
.reg .pred %p<4>;
.reg .b32 %r<20>;
.reg .f32 %f<20>;
.reg .b64 %rd<20>;
.shared .align 16 .b8 tile[16384];
ld.param.u64 %rd1, [kernel_param_0];
cvta.to.global.u64 %rd2, %rd1;
mov.u32 %r1, %tid.x;
mov.u32 %r2, tile;
"""


def lanes_in(*lines: str) -> LaneAddresses:
    module = parse(HEAD + "\n".join(f"{line};" for line in (*lines, "ret")) + "\n}\n")
    return lanes_of(FunctionAnalysis(module, module.entries[0]))


def transactions(lanes: LaneAddresses) -> list[tuple[int, int]]:
    return [(one.transactions, one.needed) for one in lanes.accesses]


@pytest.mark.parametrize(
    ("stride", "opcode", "expected"),
    [
        (4, "ld.global.f32 %f1", (4, 4)),
        (8, "ld.global.f32 %f1", (8, 4)),
        (32, "ld.global.f32 %f1", (32, 4)),
        (4096, "ld.global.f32 %f1", (32, 4)),
        (16, "ld.global.v4.f32 {%f1, %f2, %f3, %f4}", (16, 16)),
        (0, "ld.global.f32 %f1", (1, 1)),  # All threads read the same address, so there is one sector.
    ],
)
def test_sectors_follow_from_the_stride_of_threads(stride: int, opcode: str, expected: tuple[int, int]) -> None:
    lanes = lanes_in(f"mul.wide.u32 %rd3, %r1, {stride}", "add.s64 %rd4, %rd2, %rd3", f"{opcode}, [%rd4]")
    assert transactions(lanes) == [expected]
    assert (lanes.global_count, lanes.shared_count) == (1, 0)


def test_bytes_that_another_access_of_the_array_uses_are_not_wasted() -> None:
    loads = [f"ld.global.f32 %f{number + 1}, [%rd4+{4 * number}]" for number in range(4)]
    lanes = lanes_in("mul.wide.u32 %rd3, %r1, 16", "add.s64 %rd4, %rd2, %rd3", *loads)
    assert transactions(lanes) == [(16, 16)] * 4


def test_the_index_of_a_grid_is_known() -> None:
    lanes = lanes_in(
        "mov.u32 %r3, %ctaid.x",
        "mov.u32 %r4, %nctaid.x",
        "mad.lo.s32 %r5, %r3, %r4, %r1",
        "mul.wide.s32 %rd3, %r5, 4",
        "add.s64 %rd4, %rd2, %rd3",
        "ld.global.f32 %f1, [%rd4]",
    )
    assert transactions(lanes) == [(4, 4)]


@pytest.mark.parametrize("shift", [7, 6])
def test_bits_above_those_of_the_thread_are_added(shift: int) -> None:
    lanes = lanes_in(
        "mov.u32 %r3, %ctaid.x",
        f"shl.b32 %r4, %r3, {shift}",
        "or.b32 %r5, %r4, %r1",
        "mul.wide.s32 %rd3, %r5, 4",
        "add.s64 %rd4, %rd2, %rd3",
        "ld.global.f32 %f1, [%rd4]",
    )
    # Blocks have 128 threads, whose numbers need 7 bits. With a shift by 6, the bits overlap.
    assert transactions(lanes) == ([(4, 4)] if shift == 7 else [])


def test_an_address_from_memory_is_not_known() -> None:
    lanes = lanes_in(
        "mul.wide.u32 %rd3, %r1, 8",
        "add.s64 %rd4, %rd2, %rd3",
        "ld.global.u64 %rd5, [%rd4]",
        "ld.global.f32 %f1, [%rd5]",
    )
    assert lanes.global_count == 2
    assert transactions(lanes) == [(8, 8)]


@pytest.mark.parametrize(
    ("stride", "opcode", "expected"),
    [
        (4, "ld.shared.f32 %f1", (1, 1)),
        (8, "ld.shared.f32 %f1", (2, 1)),
        (128, "ld.shared.f32 %f1", (32, 1)),
        (132, "ld.shared.f32 %f1", (1, 1)),  # Rows are padded by one word, so that no two threads use the same bank.
        (0, "ld.shared.f32 %f1", (1, 1)),
        (2, "ld.shared.u16 %r9", (1, 1)),
        (8, "ld.shared.v2.f32 {%f1, %f2}", (2, 2)),
        (16, "ld.shared.v4.f32 {%f1, %f2, %f3, %f4}", (4, 4)),
        (32, "ld.shared.v4.f32 {%f1, %f2, %f3, %f4}", (8, 4)),
    ],
)
def test_passes_follow_from_the_stride_of_threads(stride: int, opcode: str, expected: tuple[int, int]) -> None:
    lanes = lanes_in(f"mad.lo.s32 %r3, %r1, {stride}, %r2", f"{opcode}, [%r3]")
    assert transactions(lanes) == [expected]


def test_threads_that_do_not_execute_an_access_do_not_count() -> None:
    lanes = lanes_in("setp.lt.u32 %p1, %r1, 2", "mad.lo.s32 %r3, %r1, 128, %r2", "@%p1 st.shared.f32 [%r3], %f1")
    assert transactions(lanes) == [(2, 1)]


ADDRESSES = st.lists(st.integers(0, 4000), min_size=1, max_size=32)


@given(ADDRESSES, st.sampled_from([1, 2, 4]))
def test_passes_are_the_most_words_of_one_bank(numbers: list[int], size: int) -> None:
    addresses = [number * size for number in numbers]
    words = {(address + byte) // 4 for address in addresses for byte in range(size)}
    assert passes(addresses, size) == max(sum(word % 32 == bank for word in words) for bank in range(32))
    assert passes(addresses, size) >= needed_passes(addresses, size) >= 1


@given(ADDRESSES, st.sampled_from([1, 4, 16]))
def test_sectors_hold_every_byte(numbers: list[int], size: int) -> None:
    addresses = [number * size for number in numbers]
    assert sectors(addresses, size) == {(one + byte) // 32 for one in addresses for byte in range(size)}


def test_accesses_of_the_kept_kernels_are_coalesced_and_without_conflicts() -> None:
    module = parse((Path(__file__).parent / "data" / "kernels.ptx").read_text())
    found = {one.name: lanes_of(FunctionAnalysis(module, one)) for one in module.entries}
    assert all(one.transactions == one.needed for lanes in found.values() for one in lanes.accesses)
    assert found["wide"].accesses[0] == Access("global", False, found["wide"].accesses[0].line, 16, 16)
