"""Tests of the chart below the table of bricks. The chart shows the calls of all bricks on a common time axis."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cbtop.tui.views.all_bricks import AllBricks, on_one_scale
from cbtop.tui.widgets.lines import plain, width_of
from cbtop.viewmodels.durations import DurationBar
from tests.cbtop import samples

SHORT = replace(samples.BRICKS[0], name="Short", durations=(DurationBar(1.0, 2.0, 90), DurationBar(2.0, 4.0, 10)))
LONG = replace(samples.BRICKS[0], name="Long", durations=(DurationBar(512.0, 1_024.0, 50),))


def test_longer_times_are_farther_right_and_the_most_frequent_is_highest() -> None:
    lines = [plain(line) for line in on_one_scale([SHORT, LONG], 120, 8)]
    short, long = lines[1:4], lines[4:7]
    assert "Short" in short[-1]
    assert "Long" in long[-1]

    def columns(line: str) -> list[int]:
        return [at for at, cell in enumerate(line[:90]) if cell in "▁▂▃▄▅▆▇█"]

    assert max(columns(short[-1])) < min(columns(long[-1]))
    assert len(columns(short[0])) < len(columns(short[-1]))
    assert columns(long[0]) == columns(long[-1])
    assert "╷1.00 µs" in lines[-1]
    assert lines[-1].rstrip().endswith("1.02 ms╷")


@pytest.mark.parametrize("width", [60, 119, 180])
@pytest.mark.parametrize("height", [6, 9, 20, 60])
def test_it_keeps_within_its_place_and_counts_bricks_without_room(width: int, height: int) -> None:
    drawing = AllBricks()
    drawing.show_source(samples.LIVE)
    lines = drawing.draw(width, height)
    assert len(lines) <= height
    assert max(map(width_of, lines)) <= width
    many = [replace(SHORT, name=f"brick {at}") for at in range(9)]
    assert "5 more" in plain(on_one_scale(many, width, 6)[0])
