"""Tests of the counters of loops, and of the comparisons of counters whose result changes at most once."""

from __future__ import annotations

import pytest

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.induction import CountedLoop, counted_loops, natural_loops
from cbtop.profiler.analysis.ptx.lints.loop_split import SPLIT_LOOP
from cbtop.profiler.analysis.ptx.parser import parse

BODY = "@%p1 st.global.u32 [%rd1], %r1;"


def analysed(
    loop: str, *, start: str = "mov.u32 %r1, 0;", end: str = "setp.ne.s32 %p2, %r1, %r2;"
) -> FunctionAnalysis:
    """Return the analysis of an entry with one loop, whose counter %r1 grows by 4 after `loop`."""
    text = f""".version 8.7
.target sm_90
.address_size 64
.visible .entry kernel(.param .u64 p0, .param .u32 p1, .param .u32 p2)
{{
    .reg .pred %p<6>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [p0];
    ld.param.u32 %r2, [p1];
    ld.param.u32 %r3, [p2];
    mov.u32 %r4, %tid.x;
    {start}
LOOP:
    {loop}
    add.s32 %r1, %r1, 4;
    {end}
    @%p2 bra LOOP;
    ret;
}}
"""
    module = parse(text)
    return FunctionAnalysis(module, module.entries[0])


def only_loop(analysis: FunctionAnalysis) -> CountedLoop:
    (loop,) = counted_loops(analysis)
    return loop


def test_a_counter_has_its_step() -> None:
    assert only_loop(analysed("")).steps == {"%r1": 4}


def test_a_counter_may_be_copied_and_may_go_down() -> None:
    loop = only_loop(analysed("sub.s32 %r6, %r5, 3; mov.u32 %r5, %r6;", start="mov.u32 %r1, 0; mov.u32 %r5, %r2;"))
    assert loop.steps == {"%r1": 4, "%r5": -3}


def test_a_register_that_some_iterations_change_is_no_counter() -> None:
    assert "%r5" not in only_loop(analysed("@%p3 add.s32 %r5, %r5, 1;")).steps
    assert "%r5" not in only_loop(analysed("@%p3 bra NEXT; add.s32 %r5, %r5, 1; NEXT:")).steps


@pytest.mark.parametrize(
    ("check", "direction"),
    [
        ("setp.lt.s32 %p1, %r1, %r3;", -1),
        ("setp.ge.s32 %p1, %r1, %r3;", 1),
        ("setp.gt.s32 %p1, %r3, %r1;", -1),
        ("add.s32 %r5, %r1, %r4; setp.le.s32 %p1, %r5, %r3;", -1),
        ("shl.b32 %r5, %r1, 2; sub.s32 %r6, %r3, %r5; setp.gt.s32 %p1, %r6, %r4;", -1),
        ("setp.lt.s32 %p3, %r1, %r3; setp.lt.s32 %p4, %r4, %r3; and.pred %p1, %p3, %p4;", -1),
        ("setp.lt.s32 %p3, %r1, %r3; not.pred %p1, %p3;", 1),
        ("setp.lt.s32 %p1, %r4, %r3;", 0),
        ("setp.lt.u32 %p1, %r1, %r3;", -1),
        ("setp.eq.s32 %p1, %r1, %r3;", None),
        ("add.s32 %r5, %r1, -2; setp.lt.u32 %p1, %r5, %r3;", None),  # from below 0 to large numbers and back
        ("ld.global.u32 %r5, [%rd1]; setp.lt.s32 %p1, %r1, %r5;", None),
        ("mul.lo.s32 %r5, %r1, %r1; setp.lt.s32 %p1, %r5, %r3;", None),
        ("and.b32 %r5, %r1, 7; setp.lt.s32 %p1, %r5, %r3;", None),
        ("setp.lt.s32 %p3, %r1, %r3; setp.ge.s32 %p4, %r1, %r4; and.pred %p1, %p3, %p4;", None),
    ],
)
def test_a_check_has_a_direction_if_it_changes_at_most_once(check: str, direction: int | None) -> None:
    analysis = analysed(f"{check} {BODY}")
    assert only_loop(analysis).direction("%p1") == direction
    assert len([*SPLIT_LOOP.find(analysis)]) == bool(direction)


def test_a_value_from_before_the_loop_does_not_follow_its_counter() -> None:
    analysis = analysed(f"setp.lt.s32 %p1, %r5, %r3; {BODY}", start="mov.u32 %r1, %r2; add.s32 %r5, %r1, 4;")
    assert only_loop(analysis).direction("%p1") == 0


@pytest.mark.parametrize(
    ("check", "start", "end", "is_all_but_last"),
    [
        ("setp.lt.s32 %p1, %r1, %r2;", "mov.u32 %r1, 0;", "setp.lt.s32 %p2, %r1, %r2;", True),
        ("add.s32 %r5, %r1, 3; setp.lt.s32 %p1, %r5, %r2;", "mov.u32 %r1, 0;", "setp.lt.s32 %p2, %r1, %r2;", True),
        ("add.s32 %r5, %r1, 5; setp.lt.s32 %p1, %r5, %r2;", "mov.u32 %r1, 0;", "setp.lt.s32 %p2, %r1, %r2;", False),
        ("setp.lt.s32 %p1, %r1, %r3;", "mov.u32 %r1, 0;", "setp.lt.s32 %p2, %r1, %r2;", False),
        ("setp.lt.s32 %p1, %r1, %r2;", "mov.u32 %r1, 0;", "setp.ne.s32 %p2, %r1, %r2;", False),
        ("setp.ge.s32 %p1, %r1, %r2;", "mov.u32 %r1, 0;", "setp.lt.s32 %p2, %r1, %r2;", False),
    ],
)
def test_all_iterations_but_the_last_are_proved_by_the_end_of_the_loop(
    check: str, start: str, end: str, is_all_but_last: bool
) -> None:
    (problem,) = SPLIT_LOOP.find(analysed(f"{check} {BODY}", start=start, end=end))
    assert ("is true in all iterations but the last of" in problem.message) is is_all_but_last


def test_a_check_of_a_pipeline_or_before_cheap_work_is_not_reported() -> None:
    check = "setp.lt.s32 %p1, %r1, %r3;"
    for work in ("cp.async.ca.shared.global [%r4], [%rd1], 4;", "add.s32 %r6, %r6, 1;", "bra DONE;"):
        analysis = analysed(f"{check} @%p1 {work} DONE:")
        assert only_loop(analysis).direction("%p1") == -1
        assert [*SPLIT_LOOP.find(analysis)] == []


def test_what_leaves_the_loop_is_not_split() -> None:
    check = "setp.ge.s32 %p1, %r1, %r3; @%p1 bra OUT; st.global.u32 [%rd1], %r1;"
    end = "setp.ne.s32 %p2, %r1, %r2; @!%p2 bra OUT; bra LOOP; OUT: ret;"
    assert [*SPLIT_LOOP.find(analysed(check, end=end))] == []


def test_a_check_belongs_to_the_loop_whose_counter_it_compares() -> None:
    analysis = analysed(
        f"mov.u32 %r7, 0; INNER: setp.lt.s32 %p1, %r1, %r3; {BODY} add.s32 %r7, %r7, 1; "
        "setp.lt.s32 %p5, %r7, 8; @%p5 bra INNER;"
    )
    outer, inner = counted_loops(analysis)
    assert (outer.steps, inner.steps) == ({"%r1": 4}, {"%r7": 1})
    assert (outer.direction("%p1"), inner.direction("%p1")) == (-1, 0)
    assert len(natural_loops(analysis.flow)) == 2
    assert len([*SPLIT_LOOP.find(analysis)]) == 1
