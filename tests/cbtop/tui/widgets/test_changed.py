"""A terminal is sent the cells that have changed, where they are, and nothing beside them."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.segment import Segment
from textual._compositor import ChopsUpdate
from textual.strip import Strip

from cbtop.tui.widgets.changed import ChangedCells

NOW = ("abcdefghij", "ABCDEFGHIJKLMN")  # two widgets beside each other, on each of two lines
CUT, WIDTH = len(NOW[0]), sum(map(len, NOW))
spans = st.tuples(st.integers(0, WIDTH - 1), st.integers(1, WIDTH)).filter(lambda span: span[0] < span[1])


def sent(first: tuple[int, int], second: tuple[int, int]) -> str:
    chops = [{0: Strip([Segment(NOW[0])]), CUT: Strip([Segment(NOW[1])])} for _ in range(2)]
    update = ChopsUpdate(chops, [(0, *first), (1, *second)], [[CUT, WIDTH]] * 2)
    return ChangedCells.of(update).render_segments(Console(color_system=None))


@given(spans, spans)
def test_what_has_changed_is_sent_to_its_place_and_no_more(first: tuple[int, int], second: tuple[int, int]) -> None:
    screen = [["."] * WIDTH for _ in range(2)]
    for line, column, text in re.findall(r"\x1b\[(\d+);(\d+)H([A-Za-z]*)", sent(first, second)):
        begin = int(column) - 1
        screen[int(line) - 1][begin : begin + len(text)] = text
    for got, (begin, end) in zip(screen, (first, second), strict=True):
        assert "".join(got) == "." * begin + "".join(NOW)[begin:end] + "." * (WIDTH - end)


def test_one_figure_in_a_row_takes_its_own_bytes_alone() -> None:
    assert sent((4, 6), (11, 12)) == "\x1b[1;5Hef\x1b[2;12HB"
