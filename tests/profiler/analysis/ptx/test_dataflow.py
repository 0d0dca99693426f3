"""Tests of the data flow of PTX: values of registers in each thread, and which registers differ between threads."""

from __future__ import annotations

import pytest

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.dataflow import Divergence
from cbtop.profiler.analysis.ptx.lane_values import LaneValue
from cbtop.profiler.analysis.ptx.parser import parse


def analysis_of(body: str, limits: str = ".reqntid 64") -> FunctionAnalysis:
    declared = ".reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<9>; .shared .align 4 .b8 tile[512];"
    text = f".version 8.7\n.target sm_90\n.entry k(.param .u32 n)\n{limits}\n{{\n{declared}\n{body}\nret;\n}}"
    module = parse(text)
    return FunctionAnalysis(module, module.functions[0])


def value_of(body: str, register: str) -> LaneValue | None:
    values = analysis_of(f"mov.u32 %r1, %tid.x;\nld.param.u32 %r2, [n];\n{body}").data.lane_values
    assert values
    return values.of_register(register)


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("shl.b32 %r3, %r1, 2;", [4 * thread for thread in range(64)]),
        ("mad.lo.s32 %r3, %r1, 12, 7;", [12 * thread + 7 for thread in range(64)]),
        ("and.b32 %r3, %r1, 31;", [thread % 32 for thread in range(64)]),
        ("shr.u32 %r3, %r1, 5;", [thread // 32 for thread in range(64)]),
        ("xor.b32 %r3, %r1, 5;", [thread ^ 5 for thread in range(64)]),
        ("rem.u32 %r3, %r1, 7;", [thread % 7 for thread in range(64)]),
        ("sub.s32 %r3, 3, %r1;", [3 - thread for thread in range(64)]),
        ("sub.s32 %r4, 3, %r1; shr.u32 %r3, %r4, 28;", [0] * 4 + [15] * 60),
        ("bfe.u32 %r3, %r1, 1, 2;", [thread >> 1 & 3 for thread in range(64)]),
        ("setp.gt.u32 %p1, %r1, 9; selp.b32 %r3, 1, 2, %p1;", [2] * 10 + [1] * 54),
        ("mov.u32 %r3, %laneid;", [thread % 32 for thread in range(64)]),
    ],
)
def test_values_of_threads_follow_from_arithmetic(instruction: str, expected: list[int]) -> None:
    value = value_of(instruction, "%r3")
    assert value is not None
    assert (value.terms, list(value.lanes)) == ({}, expected)


def test_an_address_is_a_variable_plus_a_number_of_each_thread() -> None:
    value = value_of("mov.u32 %r5, tile; shl.b32 %r4, %r1, 2; add.s32 %r3, %r5, %r4;", "%r3")
    assert value is not None
    assert (value.terms, value.lanes[:3]) == ({"shared:tile": 1}, (0, 4, 8))


def test_parameters_cancel_in_comparisons() -> None:
    value = value_of("add.s32 %r3, %r2, %r1; add.s32 %r4, %r2, 5; setp.lt.s32 %p1, %r3, %r4;", "%p1")
    assert value is not None
    assert value.lanes == (1,) * 5 + (0,) * 59


@pytest.mark.parametrize(
    "instruction",
    [
        "shl.b32 %r4, %r1, 2; ld.shared.u32 %r3, [%r4];",
        "mul.lo.s32 %r3, %r2, %r1;",
        "@%p1 mov.u32 %r3, 1;",
        "mov.u32 %r3, 1; mov.u32 %r3, 2;",
        "and.b32 %r3, %r2, 3; add.s32 %r3, %r3, 1;",
    ],
)
def test_other_values_are_not_known(instruction: str) -> None:
    assert value_of(instruction, "%r3") is None


def test_divergence_comes_from_ids_from_memory_and_from_branches() -> None:
    data = analysis_of(
        """mov.u32 %r1, %tid.x; ld.param.u32 %r2, [n]; mul.lo.s32 %r3, %r1, %r2; mul.lo.s32 %r4, %r2, %r2;
        cvt.u64.u32 %rd1, %r1; ld.global.u32 %r5, [%rd1]; mov.u32 %r6, 0; setp.eq.s32 %p1, %r5, 0;
        @%p1 bra A; mov.u32 %r6, 1;
        A: add.s32 %r7, %r6, 1; setp.lt.u32 %p2, %r1, 64;"""
    ).data
    levels = {name: data.divergence_of(name) for name in ("%r3", "%r4", "%r5", "%r7", "%p2")}
    assert levels == {
        "%r3": Divergence.BY_THREAD,
        "%r4": Divergence.UNIFORM,
        "%r5": Divergence.POSSIBLE,
        "%r7": Divergence.POSSIBLE,
        "%p2": Divergence.UNIFORM,  # The block has 64 threads, so the comparison has the same result in all of them.
    }


def test_the_threads_of_a_branch_are_known() -> None:
    analysis = analysis_of(
        "mov.u32 %r1, %tid.x; setp.gt.u32 %p1, %r1, 2; @%p1 bra A; st.shared.u32 [tile], %r1; A: bar.sync 0;"
    )
    store = next(at for at, one in analysis.reachable() if one.opcode.startswith("st"))
    assert analysis.threads_at(store) == (0, 1, 2)
