"""Draw a picture of all bricks of a phase: the durations of each brick's calls, and the sum of each category."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from math import log

from cbtop import units
from cbtop.tui.views.base import SourceDrawing
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.widgets.bars import bar
from cbtop.tui.widgets.lines import BLANK, Line, clean, fit, fit_line, join_fitting, rule, width_of
from cbtop.tui.widgets.parts import ScreenPart, parts_lines
from cbtop.tui.widgets.upright import Bar, Spacing, upright
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.source import SourceView

LEAST_LINES = 6  # The picture has at least this many lines.
MAX_BAR_HEIGHT = 6
_NAME_WIDTH = 20
_FIGURES_WIDTH = 22


class AllBricks(SourceDrawing):
    """The picture of all bricks below the table of bricks."""

    def draw(self, width: int, height: int) -> list[Line]:
        source = self._source
        if source is None:
            return []
        rows = [row for row in source.bricks if row.durations]
        shared = ScreenPart(partial(on_one_scale, rows), 4, 2 + MAX_BAR_HEIGHT * len(rows) if rows else 0)
        categories = ScreenPart(
            partial(_categories, source), 2, 2 + len(source.categories) if source.categories else 0
        )
        return parts_lines((shared, categories), (categories, shared), width, height)


def on_one_scale(rows: Sequence[BrickRow], width: int, height: int) -> list[Line]:
    """Draw a histogram of each brick's calls.

    All histograms have the same time scale. Bricks that do not fit are left out.
    """
    shown = rows[: max(1, height - 2)]
    tall, higher = divmod(max(len(shown), min(height - 2, MAX_BAR_HEIGHT * len(shown))), len(shown))
    inner = max(8, width - _NAME_WIDTH - _FIGURES_WIDTH - 4)
    begin_us = max(min(row.durations[0].from_us for row in shown), 1e-3)
    end_us = max(max(row.durations[-1].to_us for row in shown), begin_us * 2)
    left_out = len(rows) - len(shown)
    about: Line = (
        (f"{left_out} more" if left_out else "each brick's most frequent duration fills its line", "faint"),
    )
    lines = [rule((("how long calls took, all bricks on one scale", "dim"),), width, about)]
    for at, row in enumerate(shown):
        lines += _histogram(row, begin_us, end_us, inner, tall + (at < higher))
    return [*lines, _axis(begin_us, end_us, inner)]


def _histogram(row: BrickRow, begin_us: float, end_us: float, inner: int, tall: int) -> list[Line]:
    look = CATEGORY_LOOKS[row.category]
    counts = [0.0] * inner
    for one in row.durations:
        first = _column(one.from_us, begin_us, end_us, inner)
        last = max(first + 1, _column(one.to_us, begin_us, end_us, inner))
        # Distribute a bar's count over all cells that it covers.
        for column in range(first, min(last, inner)):
            counts[column] += one.count / (last - first)
    bars = [Bar(count or None, look.role) for count in counts]
    drawn = upright(bars, Spacing(inner, 1, 1), tall, max(counts))
    name: Line = ((f" {look.glyph} ", look.role), (fit(clean(row.name), _NAME_WIDTH - 3), "strong"))
    blank: Line = ((" " * _NAME_WIDTH, ""),)
    said = (
        ((f"p50 {units.duration(row.p50_us)}", ""),),
        ((f"p99 {units.duration(row.p99_us)}", "dim"),),
    )
    lines: list[Line] = [
        (*(name if at == tall - 1 else blank), ("│", "faint"), *_dotless(line)) for at, line in enumerate(drawn)
    ]
    lines[-1] = (*lines[-1], ("  ", ""), *join_fitting(said, _FIGURES_WIDTH))
    return lines


def _dotless(line: Line) -> Line:
    """Remove the dots of cells without calls. Otherwise these dots would dominate the picture."""
    joined = "".join(text for text, _ in line).replace("·", " ")
    role = next((role for text, role in line if text.strip()), "")
    return tuple(
        ("".join(same), role if is_drawn else "") for is_drawn, same in groupby(joined, key=lambda c: c != " ")
    )


def _column(us: float, begin_us: float, end_us: float, inner: int) -> int:
    return int(log(max(us, begin_us) / begin_us) / log(end_us / begin_us) * inner)


def _axis(begin_us: float, end_us: float, inner: int) -> Line:
    """Return the time axis of the histograms.

    Some cells show the time when they begin. The last cell shows the time when it ends.
    """
    text, last = "", units.duration(end_us)
    for column in range(0, inner, 18):
        label = f"╷{units.duration(begin_us * (end_us / begin_us) ** (column / inner))}"
        if column + len(label) + len(last) + 2 <= inner:
            text = text.ljust(column) + label
    return ((" " * (_NAME_WIDTH + 1) + text.ljust(inner - len(last)) + f"{last}╷", "dim"),)


def _categories(source: SourceView, width: int, height: int) -> list[Line]:
    """Return a line for each category with the sums of the category's bricks."""
    largest = max((row.percent or 0.0 for row in source.categories), default=0.0) or 1.0
    lines = [BLANK, rule((("their categories", "dim"),), width)]
    for row in source.categories:
        look = CATEGORY_LOOKS[row.category]
        name: Line = ((f" {look.glyph} ", look.role), (fit(clean(row.name), _NAME_WIDTH - 3), look.role))
        figures: Line = (
            (f"{units.percent(row.percent):>8}", "strong"),
            (f"{units.duration(row.exclusive_us_per_token):>11}", ""),
            (" a token", "dim"),
            (f"{units.count(row.count):>10}", ""),
            (" calls", "dim"),
        )
        room = max(4, width - width_of(name) - width_of(figures) - 3)
        drawn = bar(None if row.percent is None else row.percent / largest, room, look.role)
        lines.append(fit_line((*name, (" ", ""), *drawn, ("  ", ""), *figures), width))
    return lines[:height]
