"""Tests of a line with blocks of time: each block is drawn or counted once, and is only at its own time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from cbtop.tui.widgets.lines import plain
from cbtop.tui.widgets.time_row import SHADES, Block, Scale, places, time_row

NAMES = ("DownProjection 1.2 ms", "DownProjection", "Down")


def block(start_ns: int, end_ns: int, *, is_gap: bool = False, names: tuple[str, ...] = NAMES) -> Block:
    return Block(start_ns, end_ns, lambda: names, "ffn", "" if is_gap else "fill-ffn", "" if is_gap else "■")


@st.composite
def rows(draw: st.DrawFn) -> list[Block]:
    """Generate blocks of time with and without gaps between them. Some blocks have zero length."""
    blocks, at = [], draw(st.integers(0, 50))
    for _ in range(draw(st.integers(0, 40))):
        length = draw(st.sampled_from([0, 1, 2, 7, 30, 400, 5_000]))
        is_gap = draw(st.booleans())
        if length or not is_gap:
            blocks.append(
                block(at, at + length, is_gap=is_gap, names=draw(st.sampled_from([NAMES, ("注意力",), ()])))
            )
        at += length + draw(st.sampled_from([0, 0, 1, 90]))
    return blocks


scales = st.builds(
    lambda begin, length, width: Scale(begin, begin + length, width),
    st.integers(-100, 9_000),
    st.integers(1, 60_000),
    st.integers(1, 300),
)


@given(blocks=rows(), scale=scales)
def test_every_block_in_sight_has_one_place_and_none_is_drawn_too_long(blocks: list[Block], scale: Scale) -> None:
    found = places(blocks, scale)
    for one, after in pairwise(found):
        assert one.end <= after.first
    drawn = [number for place in found for number in place.blocks]
    assert drawn == sorted(set(drawn))
    for number, each in enumerate(blocks):
        if each.glyph:
            assert (number in drawn) == scale.sees(each)
    cell_ns = (scale.end_ns - scale.begin_ns) / scale.width
    for place in found:
        assert 0 <= place.first < place.end <= scale.width
        if not place.cells:
            each = blocks[place.blocks[0]]
            assert each.start_ns <= scale.begin_ns + place.first * cell_ns + 1e-6
            assert scale.begin_ns + place.end * cell_ns <= each.end_ns + 1e-6
        else:
            assert all(place.first <= cell < place.end for cell in place.cells)
            for each in (blocks[number] for number in place.blocks):
                in_sight_ns = min(each.end_ns, scale.end_ns) - max(each.start_ns, scale.begin_ns)
                assert in_sight_ns < 2 * cell_ns


@given(blocks=rows(), scale=scales, current=st.none() | st.integers(0, 40))
def test_the_line_has_its_set_width_and_counts_what_it_does_not_draw(
    blocks: list[Block], scale: Scale, current: int | None
) -> None:
    line = time_row(blocks, scale, current)
    assert cell_len(plain(line)) == (scale.width if blocks else cell_len(plain(line)))
    assert cell_len(plain(line)) <= scale.width
    for place in places(blocks, scale):
        count = str(len(place.blocks))
        if place.cells and len(count) <= place.end - place.first:
            assert count in plain(line)


def test_ends_are_drawn_to_an_eighth_of_a_cell_and_what_touches_is_beside_it() -> None:
    scale = Scale(0, 800, 8)
    assert plain(time_row([block(0, 450)], scale)) == "■   ▌   "
    assert plain(time_row([block(0, 590)], scale)) == "■Down▉  "
    line = time_row([block(0, 450), block(450, 800)], scale)
    assert line[1] == ("▌", "fill-ffn ffn")  # One block ends and the next begins in the same cell.
    assert plain(time_row([block(0, 400), block(460, 800)], scale)) == "■   ▐■  "


@pytest.mark.parametrize(
    ("width", "text"), [(60, "■DownProjection 1.2 ms"), (18, "■DownProjection"), (6, "■Down"), (3, "■")]
)
def test_the_longest_name_that_fits_is_written(width: int, text: str) -> None:
    assert plain(time_row([block(0, 1_000)], Scale(0, 1_000, width))).rstrip() == text


def test_a_gap_is_dotted_and_has_its_name() -> None:
    assert plain(time_row([block(0, 100, is_gap=True, names=("idle",))], Scale(0, 100, 14))) == "···· idle ····"
    assert plain(time_row([block(0, 100, is_gap=True, names=("idle",))], Scale(0, 100, 5))) == "·····"


def test_many_blocks_in_a_cell_are_a_number_and_its_shade_is_their_share() -> None:
    many = [block(start, start + 1) for start in range(0, 300, 3)]
    line = plain(time_row(many, Scale(0, 300, 10)))
    assert line == SHADES[1] * 3 + "100" + SHADES[1] * 4
    dark = [block(start, start + 3) for start in range(0, 300, 3)]
    assert plain(time_row(dark, Scale(0, 300, 2))) == SHADES[2] * 2
    assert plain(time_row(many[:1], Scale(0, 300, 10))) == "1" + " " * 9


def test_what_is_under_the_cursor_is_lit_also_in_a_cluster() -> None:
    many = [block(start, start + 1) for start in range(0, 300, 3)]
    assert [role for _, role in time_row(many, Scale(0, 300, 10), 50)].count("lit") == 1
    assert time_row([block(0, 100)], Scale(0, 100, 10), 0)[0][1] == "lit"


def test_of_blocks_far_away_none_is_looked_at() -> None:
    looked: list[int] = []

    class Counted(list[Block]):
        def __getitem__(self, at: Any) -> Any:
            looked.append(at)
            return super().__getitem__(at)

    blocks = Counted(Block(10 * at, 10 * at + 10, tuple, "", "fill", "x") for at in range(4_096))
    assert len(places(blocks, Scale(20_000, 20_050, 50))) == 5
    assert len(looked) < 60
