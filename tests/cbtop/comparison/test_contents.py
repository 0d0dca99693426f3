"""Tests of the merged contents of several runs: if the runs differ, a number becomes a range or unknown."""

from __future__ import annotations

from cbtop.comparison.contents import Break, Compiled, Contents, Total, contents_together
from tests.cbtop.comparison.made_contents import ONE, contents, kernel, layers, phase

COPY = kernel("Layer 1", "elementwise_kernel")


def test_a_piece_that_one_run_lacks_is_a_range_from_zero() -> None:
    found = contents_together([contents(), contents(phase(layers() | {COPY: ONE}, steps=9))]).phases[0]
    assert (found.pieces[COPY], found.pieces[kernel("Layer 1", "gemm")]) == ((0, 1), ONE)
    assert (found.totals[Total.LAUNCHES], found.steps) == ((6, 7), 3)


def test_a_total_that_one_run_lacks_is_unknown() -> None:
    other = phase(totals={Total.BRICKS: (6, 6)})
    assert Total.LAUNCHES not in contents_together([contents(), contents(other)]).phases[0].totals


def test_a_run_that_lacks_a_phase_takes_nothing_away_unless_all_must_have_it() -> None:
    both = contents(phase(), phase(name="prefill"))
    cut = contents(phase(), phase({}, {}, name="prefill", steps=2))
    for runs in ([both, contents()], [both, cut], [cut, both, both]):
        assert contents_together(runs).of("prefill") == phase(name="prefill")
    assert contents_together([both, contents()], needs_all=True).of("prefill") is None
    strict = contents_together([both, cut], needs_all=True).of("prefill")
    assert strict is not None
    assert strict.steps == 2


def test_conditions_are_those_that_all_runs_share() -> None:
    runs = [contents(conditions=(("torch", "2.13"), ("Triton", one))) for one in ("3.6", "3.7")]
    assert contents_together(runs).conditions == {"torch": "2.13"}


def test_the_most_graph_breaks_of_any_run_count_if_all_runs_were_watched() -> None:
    broken = Compiled(2, 0, (Break("Layer 1", "print", 2),))
    watched = [Contents(compiled=one) for one in (Compiled(1, 1, ()), broken)]
    assert contents_together(watched).compiled == Compiled(2, 1, broken.breaks)
    assert contents_together([*watched, Contents()]).compiled is None


def test_the_contents_of_a_single_run_are_its_own() -> None:
    assert contents_together([contents()]) == contents()
