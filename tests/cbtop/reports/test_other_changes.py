"""Tests of when a comparison says "no change". It says so only if no figure changed by more than its interval."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from cbtop.comparison.noise import Change
from cbtop.comparison.part_diff import PartDiff
from cbtop.comparison.run_diff import diff_of
from cbtop.reports.other_changes import other_changes
from cbtop.reports.run_diff import diff_json, diff_markdown, diff_text
from tests.cbtop.comparison.made_runs import STEADY, made_run, steady

NOTHING = "nothing has changed beyond noise"


def text_of(**changed: object) -> str:
    """Return the text of the comparison `steady` after these figures were replaced."""
    (part,) = steady().parts
    return diff_text(replace(steady(), parts=(replace(part, **changed),)))  # type: ignore[arg-type]


def quiet() -> PartDiff:
    """Return the first phase of the comparison `steady`. No brick in it has changed."""
    (part,) = steady().parts
    same = Change(100.0, 100.0, 1.0)
    places = tuple(replace(one, change=same, mean=same, p50=same, p99=same) for one in part.places)
    step = replace(part.step, change=same, mean=same, p50=same, p99=same)
    return replace(part, places=places, step=step, wall=same, typical=same, drift=None)


def test_nothing_has_changed_if_no_figure_moved_beyond_its_interval() -> None:
    assert other_changes(quiet(), quiet().places) == []
    assert NOTHING in diff_text(replace(steady(), parts=(quiet(),)))


@pytest.mark.parametrize(("word", "now"), [("slower", 190.0), ("faster", 45.0)])
@pytest.mark.parametrize("moved", ["Layer 4", "DownProjection in Layer 4", "DownProjection"])
def test_each_row_with_a_verdict_is_in_the_conclusion(word: str, now: float, moved: str) -> None:
    part = quiet()
    change = Change(100.0, now, 5.0, (100.0, now))
    places = tuple(
        replace(one, change=change, mean=change, p50=change) if one.name == moved else one for one in part.places
    )
    text = diff_text(replace(steady(), parts=(replace(part, places=places),)))
    assert re.search(rf"^{moved} .* {word}$", text, re.MULTILINE)
    assert text.count(f"\n{word}: ") == 1
    assert f"\n{word}: decode: {moved} is {now / 100:.3f}× ± 0.050 of before" in text
    assert NOTHING not in text


def test_a_change_of_one_brick_is_one_line_not_a_line_for_each_row() -> None:
    part = quiet()
    change = Change(100.0, 45.0, 5.0, (100.0, 45.0))
    of_one = ("DownProjection", "DownProjection in Layer 4", "Layer 4")
    places = tuple(
        replace(one, change=change, mean=change, p50=change) if one.name in of_one else one for one in part.places
    )
    text = diff_text(replace(steady(), parts=(replace(part, places=places),)))
    assert [line.partition(" is ")[0] for line in text.splitlines() if line.startswith("faster: ")] == [
        "faster: decode: DownProjection in Layer 4"
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wall", "decode: wall clock +3.0 % ± 1.5"),
        ("typical", "decode: typical step +3.0 % ± 1.5"),
    ],
)
def test_a_figure_of_the_part_beyond_its_interval_is_named_without_a_verdict(name: str, said: str) -> None:
    for half, is_named in ((1.5, True), (3.0, False)):
        part = replace(quiet(), **{name: Change(100.0, 103.0, half, (100.0, 100.0))})  # type: ignore[arg-type]
        text = diff_text(replace(steady(), parts=(part,)))
        assert (f"beyond its interval, without a verdict: {said}\n" in text) is is_named
        assert (NOTHING in text) is not is_named


@pytest.mark.parametrize(
    ("name", "said"),
    [("change", "typical time"), ("mean", "mean"), ("p50", "median call"), ("p99", "p99")],
)
def test_a_figure_of_a_place_beyond_its_interval_is_named_with_its_sides(name: str, said: str) -> None:
    part = quiet()
    moved = replace(part.bricks[0], **{name: Change(100.0, 98.0, 1.5)})
    places = tuple(moved if one is part.bricks[0] else one for one in part.places)
    (line,) = other_changes(replace(part, places=places), places)
    start = f"beyond its interval, without a verdict: decode: {moved.name}: {said}"
    assert line == f"{start} 100.0 µs → 98.00 µs, -2.0 % ± 1.5"
    hidden = tuple(replace(one, is_below_resolution=True) for one in places)
    assert other_changes(replace(part, places=hidden), hidden) == []


def test_of_many_figures_beyond_their_interval_the_largest_are_named() -> None:
    part = quiet()
    places = tuple(replace(one, mean=Change(100.0, 101.0 + at / 10, 0.5)) for at, one in enumerate(part.places[:9]))
    (line,) = other_changes(replace(part, places=places), places)
    assert line.count("mean") == 6
    assert line.endswith("; and 3 more")
    assert "+1.8 %" in line
    assert "+1.2 %" not in line


def test_a_rate_that_grew_beyond_noise_is_faster() -> None:
    text = text_of(wall=Change(1000.0, 800.0, 10.0, (1000.0, 800.0)))
    assert "faster: decode: a token takes -20.0 % ± 1.0 by the wall clock" in text
    assert NOTHING not in text


@pytest.mark.slow
def test_drift_and_long_calls_are_lines_of_a_diff_in_text_markdown_and_json() -> None:
    found = diff_of([made_run(1, STEADY)], [made_run(4, replace(STEADY, late=0.3))])
    for text in (diff_text(found), diff_markdown(found)):
        assert "drift: the last third of decode steps takes 1.30 ± 0." in text
        assert NOTHING not in text
    (part,) = json.loads(diff_json(found))["parts"]
    assert part["drift"]["now"] == pytest.approx(1.3, abs=0.02)
    assert part["drift"]["base_ratios"] == pytest.approx([1.0], abs=0.02)
    assert part["longer_p99"] == []
    found = diff_of([made_run(1, STEADY)], [made_run(4, replace(STEADY, tail=9.0))])
    assert "longer p99: decode: DownProjection: p99 25" in diff_text(found)
    assert json.loads(diff_json(found))["parts"][0]["longer_p99"] == ["DownProjection"]
    assert json.loads(diff_json(steady()))["parts"][0]["longer_p99"] == []


def test_a_brick_that_is_new_or_gone_is_a_line() -> None:
    base, now = made_run(1, STEADY, 40), made_run(2, STEADY, 40, rename="Other")
    now = replace(now, kernels={brick: ("another",) for brick in now.parts[0].bricks if brick[0] == "Other"})
    text = diff_text(diff_of([base], [now]))
    assert "\nnew: decode: Other, +14" in text
    assert "\ngone: decode: DownProjection, -14" in text
