"""Tests of the control flow of PTX functions: basic blocks, edges and dominators."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.analysis.ptx.control_flow import MAX_BLOCKS, ControlFlow
from cbtop.profiler.analysis.ptx.model import PtxError
from cbtop.profiler.analysis.ptx.parser import parse


def flow_of(body: str) -> ControlFlow:
    text = f".version 8.7\n.target sm_90\n.entry k()\n{{\n.reg .pred %p<9>; .reg .b32 %r<9>;\n{body}\n}}"
    return ControlFlow(parse(text).functions[0])


def test_a_branch_a_loop_and_an_early_exit_have_their_edges() -> None:
    flow = flow_of("@%p1 bra B;\nA: add.s32 %r1, %r1, 1;\n@!%p2 bra A;\n@%p3 exit;\nB: ret;")
    assert [block.successors for block in flow.blocks] == [[3, 1], [1, 2], [4, 3], [4], []]
    assert flow.dominators == [0, 0, 1, 0, 0]
    assert flow.post_dominators == [4, 2, 4, 4, 4]
    assert flow.in_loop == {1}
    assert flow.influence(0) == {1, 2, 3}
    assert flow.influence(1) == {1}


def test_an_indexed_branch_goes_to_each_of_its_targets() -> None:
    flow = flow_of("t: .branchtargets A, B;\nbrx.idx %r1, t;\nA: exit;\nB: trap;")
    assert flow.blocks[0].successors == [1, 2]


def test_code_after_a_jump_is_not_reached_and_an_endless_loop_reaches_no_exit() -> None:
    flow = flow_of("bra A;\nadd.s32 %r1, %r1, 1;\nA: bra A;")
    assert flow.reachable == {0, 2}
    assert not flow.reachable & flow.reaching_exit
    assert flow.post_dominators[0] is None


def test_a_function_with_too_many_blocks_is_rejected() -> None:
    with pytest.raises(PtxError, match=f"k has more than {MAX_BLOCKS} basic blocks"):
        flow_of("".join(f"L{at}: @%p1 bra L0;\n" for at in range(MAX_BLOCKS + 1)))


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=7))
def test_a_block_dominates_those_that_are_not_reached_without_it(jumps: list[tuple[int, bool]]) -> None:
    last = len(jumps)
    body = "".join(
        f"L{at}: add.s32 %r1, %r1, 1;\n{'@%p1 ' if conditional else ''}bra L{min(target, last)};\n"
        for at, (target, conditional) in enumerate(jumps)
    )
    flow = flow_of(f"{body}L{last}: ret;")
    for one in flow.reachable:
        without = flow.reached_from([0], frozenset({one}))
        for other in flow.reachable:
            assert flow.dominates(one, other) is (other not in without)
