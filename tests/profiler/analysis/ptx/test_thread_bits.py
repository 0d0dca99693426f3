"""Tests of PTX results that are equal in all threads of a block, although they come from memory or other threads."""

from __future__ import annotations

import pytest

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.parser import parse

READ = "mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; and.b32 %r3, %r2, 28; ld.shared.b32 %r4, [%r3];"


def branches_of(body: str, limits: str = ".reqntid 256") -> int:
    """Return the number of branches on %p1 that some threads take and other threads of the block may not take."""
    declared = ".reg .pred %p<9>; .reg .b32 %r<20>; .shared .align 4 .b8 tile[512];"
    text = f".version 8.7\n.target sm_90\n.entry k(.param .u32 n)\n{limits}\n{{\n{declared}\n{body}\nret;\n}}"
    module = parse(text)
    return len(FunctionAnalysis(module, module.functions[0]).divergent_branches)


def branch_on(register: str) -> str:
    return f"setp.gt.s32 %p1, {register}, 1; @%p1 bra L1; st.shared.b32 [tile], %r1; L1:"


@pytest.mark.parametrize(
    "combined",
    [
        "redux.sync.max.s32 %r9, %r4, -1;",
        "mov.b32 %r8, 0xffffffff; redux.sync.max.s32 %r9, %r4, %r8;",
        "shfl.sync.idx.b32 %r9, %r4, 3, 31, -1;",
        "shfl.sync.bfly.b32 %r5, %r4, 4, 31, -1; mov.b32 %r6, %r5; add.f32 %r7, %r6, %r4;"
        "shfl.sync.bfly.b32 %r8, %r7, 2, 31, -1; add.f32 %r10, %r7, %r8;"
        "shfl.sync.bfly.b32 %r11, %r10, 1, 31, -1; add.f32 %r9, %r11, %r10;",
    ],
)  # fmt: skip
def test_a_combined_result_is_shared_by_all_threads(combined: str) -> None:
    assert branches_of(READ + combined + branch_on("%r9")) == 0
    assert branches_of(READ + combined + branch_on("%r4")) == 1


@pytest.mark.parametrize(
    "combined",
    [
        # With the mask 255, only the first eight lanes of a warp are combined.
        "redux.sync.max.s32 %r9, %r4, 255;",
        # The operation works in groups of eight lanes, so groups have different results.
        "shfl.sync.idx.b32 %r9, %r4, 3, 7175, -1;",
        "shfl.sync.idx.b32 %r9, %r4, %r1, 31, -1;",
        "shfl.sync.up.b32 %r5, %r4, 1, 0, -1; add.f32 %r9, %r5, %r4;",
        "shfl.sync.bfly.b32 %r5, %r4, 4, 31, -1; sub.f32 %r9, %r5, %r4;",
        "atom.shared.add.u32 %r5, [tile], 1; redux.sync.max.s32 %r9, %r5, -1;",
        "shr.u32 %r5, %r1, 5; ld.shared.b32 %r6, [%r5]; redux.sync.max.s32 %r9, %r6, -1;",  # one result a warp
    ],
)
def test_a_result_that_can_differ_is_not_shared(combined: str) -> None:
    assert branches_of(READ + combined + branch_on("%r9")) == 1


def test_nothing_is_shared_if_the_block_is_not_known() -> None:
    shared = READ + "redux.sync.max.s32 %r9, %r4, -1;" + branch_on("%r9")
    assert (branches_of(shared), branches_of(shared, limits="")) == (0, 1)


def test_a_value_of_a_loop_that_threads_leave_in_different_turns_is_not_shared() -> None:
    loop = "L2: ld.shared.b32 %r5, [tile]; setp.lt.s32 %p2, %r5, %r4; @%p2 bra L2;"
    assert branches_of(READ + loop + "add.s32 %r9, %r5, 1;" + branch_on("%r9")) == 2
