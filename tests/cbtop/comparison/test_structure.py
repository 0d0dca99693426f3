"""Thresholds on the contents of steps (calls, launches, copies) are exact from three steps on.

A threshold on a number that was not recorded gives no result.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.comparison.contents import Break, Compiled, Contents, Piece, PieceKind, Range, Total
from cbtop.comparison.judged import Judged, Outcome
from cbtop.comparison.structure import (
    MAX_DIFFERENCES,
    Structural,
    judge_structure,
    of_lost_records,
    parse_any,
    split,
)
from cbtop.comparison.threshold_grammar import Threshold
from cbtop.errors import UsageError
from tests.cbtop.comparison.made_contents import ONE, contents, kernel, layers, phase
from tests.cbtop.comparison.made_runs import made_run

COPY = kernel("Layer 1", "elementwise_kernel")
COPIED = contents(phase(layers() | {COPY: ONE}))


def judged(text: str, now: Contents, base: Contents | None = None) -> list[Judged]:
    threshold = parse_any(text)
    assert isinstance(threshold, Structural)
    return judge_structure(threshold, base, now)


def only(text: str, now: Contents, base: Contents | None = None) -> Judged:
    (found,) = judged(text, now, base)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("decode.launches==338", ("decode", "launches", "==", 338)),
        (" transfers.h2d == 0 ", ("", "transfers.h2d", "==", 0)),
        ("draft decode.transfers.d2h<=base", ("draft decode", "transfers.d2h", "<=", None)),
        ("graph==base", ("", "graph", "==", None)),
        ("recompilations<=1", ("", "recompilations", "<=", 1)),
    ],
)
def test_a_threshold_on_contents_is_parsed(text: str, expected: tuple[str, str, str, int | None]) -> None:
    found = parse_any(text, ("budgets.toml", 7))
    assert isinstance(found, Structural)
    assert (found.phase, found.what, found.sign, found.value) == expected
    assert found.where == ("budgets.toml", 7)
    assert replace(found, where=("", 1)) == parse_any(text)
    assert Structural(found.text, *expected) == parse_any(text)


def test_any_other_threshold_is_one_on_times() -> None:
    some = [parse_any(text) for text in ("attn.p50<=1.05x", "graph==base", "Launches.p50<=3us", "loss==0")]
    timed, structural = split(some)
    assert [one.text for one in structural] == ["graph==base"]
    assert all(isinstance(one, Threshold) for one in timed)
    assert len(timed) == 3


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("decode.launches<=1.05x", "expected a whole number or `base`"),
        ("launches==-1", "expected a whole number"),
        ("graph<=base", "write graph==base"),
        ("graph==3", "write graph==base"),
        ("decode.graph_breaks==0", "omit 'decode'"),
        ("decode[batch=4].graph==base", "not for a batch: write decode.graph==base"),
        ("decode[batch=4].bricks==39", "not for a batch: write decode.bricks==39"),
        ("UpProjection.calls==1", "graph==base compares the calls of each brick, bricks==39"),
        ("launches", "it has no <=, >= or =="),
    ],
)
def test_a_wrong_threshold_says_how_to_write_it(text: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        parse_any(text)


def test_a_number_holds_only_if_it_is_exactly_that() -> None:
    assert only("decode.launches==6", contents()).outcome is Outcome.HOLDS
    found = only("decode.launches==6", COPIED)
    assert (found.outcome, found.about, found.said) == (Outcome.BROKEN, "decode", "7 launches a step")


def test_beside_a_baseline_a_broken_number_names_the_brick() -> None:
    found = only("launches==base", COPIED, contents())
    assert (found.outcome, found.guilty) == (Outcome.BROKEN, "Layer 1 › DownProjection")
    assert found.said == ("7 launches a step, was 6; Layer 1 › DownProjection: one more kernel elementwise_kernel")


@pytest.mark.parametrize("text", ["transfers.h2d==0", "allocations<=5", "allocations>=0"])
def test_what_was_not_recorded_is_unknown_and_never_zero(text: str) -> None:
    found = only(text, contents())
    assert (found.outcome, found.said.partition(":")[0]) == (Outcome.UNKNOWN, "not known")


def test_steps_that_differ_are_unknown_with_their_range() -> None:
    found = only("launches==7", contents(phase(totals={Total.LAUNCHES: (6, 8)})))
    assert (found.outcome, found.said) == (Outcome.UNKNOWN, "the steps differ: 6 to 8 launches a step")


RANGES = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda pair: (min(pair), max(pair)))
SIGNS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "==": operator.eq}


@given(RANGES, st.integers(0, 9), st.sampled_from(list(SIGNS)))
def test_a_range_holds_if_every_number_in_it_does(number: Range, limit: int, sign: str) -> None:
    found = only(f"bricks{sign}{limit}", contents(phase(totals={Total.BRICKS: number}))).outcome
    each = [SIGNS[sign](value, limit) for value in range(number[0], number[1] + 1)]
    if sign == "==" and len(each) > 1:
        assert found is Outcome.UNKNOWN
    else:
        expected = Outcome.HOLDS if all(each) else Outcome.UNKNOWN if any(each) else Outcome.BROKEN
        assert found is expected


@pytest.mark.parametrize("text", ["launches==6", "graph==base"])
def test_two_recorded_steps_are_too_few(text: str) -> None:
    found = only(text, contents(phase(steps=2)), contents())
    assert (found.outcome, found.said) == (Outcome.UNKNOWN, "2 recorded steps in the new run, of 3 needed")


@pytest.mark.parametrize("text", ["bricks==6", "graph==base"])
def test_a_phase_too_short_in_both_runs_is_a_remark_beside_others(text: str) -> None:
    once = contents(phase(), phase(name="prefill", steps=1))
    found = only(text, once, once)
    assert (found.outcome, found.about) == (Outcome.HOLDS, "decode")
    assert found.said.endswith("; prefill not judged: 1 recorded step, of 3 needed")
    assert only(f"prefill.{text}", once, once).outcome is Outcome.UNKNOWN
    alone = contents(phase(name="prefill", steps=1))
    assert only(text, alone, alone).outcome is Outcome.UNKNOWN
    often = contents(phase(), phase(name="prefill"))
    assert [one.outcome for one in judged(text, once, often)] == [Outcome.HOLDS, Outcome.UNKNOWN]


@pytest.mark.parametrize("text", ["bricks==6", "launches<=base", "graph==base"])
def test_sampled_steps_are_said_beside_what_holds(text: str) -> None:
    sampled = contents(replace(phase(steps=120), plain=120))
    found = only(text, sampled, contents())
    assert found.outcome is Outcome.HOLDS
    assert found.said.endswith("; seen in the 120 recorded of 240 steps")
    of_base = "; seen in the 120 recorded of 240 steps of the baseline"
    assert only(text, contents(), sampled).said.endswith(of_base) is text.endswith("base")


def test_a_graph_names_each_difference_and_says_what_was_equal() -> None:
    found = only("graph==base", COPIED, contents())
    assert (found.outcome, found.guilty) == (Outcome.BROKEN, "Layer 1 › DownProjection")
    assert found.said == "Layer 1 › DownProjection: one more kernel elementwise_kernel"
    equal = only("decode.graph==base", contents(), contents())
    assert (equal.outcome, equal.said) == (Outcome.HOLDS, "3 layers, 6 bricks, 6 kernels are equal")


def test_a_graph_of_bricks_alone_says_that_no_kernel_was_recorded() -> None:
    bricks = contents(phase({piece: n for piece, n in layers().items() if piece.kind is not PieceKind.KERNEL}))
    found = only("graph==base", bricks, bricks)
    assert (found.outcome, found.said) == (
        Outcome.HOLDS,
        "3 layers, 6 bricks are equal; no kernel or operation was recorded",
    )


def test_a_graph_without_any_brick_is_unknown() -> None:
    assert only("graph==base", contents(phase({})), contents(phase({}))).outcome is Outcome.UNKNOWN


def test_a_long_list_of_differences_ends_with_their_number() -> None:
    experts = {Piece(PieceKind.BRICK, "Layer 0", f"Expert {number}"): ONE for number in range(MAX_DIFFERENCES + 5)}
    found = judged("graph==base", contents(phase(layers() | experts)), contents())
    assert len(found) == MAX_DIFFERENCES + 1
    assert found[-1].said == "and 5 more differences"


def test_a_phase_is_unknown_if_one_run_lacks_it_and_an_error_if_both_do() -> None:
    both = contents(phase(), phase(name="prefill"))
    for base, now, whose in ((both, contents(), "new run"), (contents(), both, "baseline")):
        found = {one.about: one for one in judged("graph==base", now, base)}
        assert found["decode"].outcome is Outcome.HOLDS
        assert found["prefill"].said == (
            f"the {whose} has no recorded prefill step; to judge one phase alone: decode.graph==base"
        )
        assert found["prefill"].outcome is Outcome.UNKNOWN
    with pytest.raises(UsageError, match="there is no phase 'verify'; there are decode"):
        judged("verify.graph==base", contents(), contents())


def test_without_any_step_nothing_is_known() -> None:
    assert only("bricks==0", Contents()).outcome is Outcome.UNKNOWN


def test_graph_breaks_are_named_by_place_and_reason() -> None:
    broken = Contents(compiled=Compiled(2, 0, (Break("Layer 1 › Activation", "call to print", 2),)))
    found = only("graph_breaks==0", broken)
    assert (found.outcome, found.guilty) == (Outcome.BROKEN, "Layer 1 › Activation")
    assert found.said == "2; Layer 1 › Activation: call to print"
    assert only("graph_breaks<=base", broken, broken).outcome is Outcome.HOLDS


def test_zero_graph_breaks_hold_only_if_they_were_watched() -> None:
    assert only("graph_breaks==0", Contents()).outcome is Outcome.UNKNOWN
    found = only("recompilations==0", Contents(compiled=Compiled(0, 0, ())))
    assert (found.outcome, found.said) == (Outcome.HOLDS, "0; nothing was compiled")
    assert only("recompilations==base", Contents(compiled=Compiled(0, 0, ())), Contents()).outcome is Outcome.UNKNOWN


def test_a_run_that_lost_records_proves_no_number() -> None:
    whole = made_run(1, steps=8)
    thresholds = [one for one in [parse_any("launches==3")] if isinstance(one, Structural)]
    assert of_lost_records(thresholds, [whole]) == []
    (found,) = of_lost_records(thresholds, [whole, replace(whole, lost=2)])
    assert (found.outcome, found.said) == (Outcome.UNKNOWN, "run 1 lost 2 records")


def test_a_piece_without_a_brick_is_named_by_its_phase() -> None:
    now = contents(phase(layers() | {Piece(PieceKind.KERNEL, name="memset"): ONE}))
    found = only("graph==base", now, contents())
    assert (found.said, found.guilty) == ("one more kernel memset", "decode")
