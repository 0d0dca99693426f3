"""Make the lanes of a timeline as rows of blocks, the time axis, and the legend."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import overload

from cbtop import units
from cbtop.protocol.vocabulary import NodeKind
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.widgets.bars import bar
from cbtop.tui.widgets.lines import BLANK, Line, clean, fit, join_fitting, rule, width_of
from cbtop.tui.widgets.time_row import GAP, SHADES, Block, Scale
from cbtop.tui.widgets.upright import Bar, Spacing, upright, usual_top
from cbtop.viewmodels.lanes import Gap, Lane, TimelineSpan
from cbtop.viewmodels.layers import ODD
from cbtop.viewmodels.timeline import TimelineView

MAX_LONGEST = 48
TICK_CELLS = 12  # Two ticks of the axis are at least this many cells apart.
# A picture of the durations of steps is drawn if there are at least this many steps, and at least this many free
# lines.
LEAST_STEPS, LEAST_STEPS_LINES = 8, 7
OLDEST, NEWEST = "╷oldest", "newest╷"
_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """One row of a lane as blocks. Each block draws a span, or a gap in the row of bricks."""

    lane: Lane
    title: str
    is_bricks: bool
    parts: tuple[TimelineSpan | Gap, ...]
    blocks: Sequence[Block]

    def nearest(self, moment_ns: int) -> int:
        """Return the index of the last block that begins at or before the moment `ns`."""
        return max(0, bisect_right(self.parts, moment_ns, key=lambda part: part.start_ns) - 1)


class Blocks(Sequence[Block]):
    """The blocks of a row in a lane. A block is made when it is accessed, because few blocks are visible."""

    def __init__(self, parts: Sequence[TimelineSpan | Gap]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, at: int) -> Block: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Block, ...]: ...
    def __getitem__(self, at: int | slice) -> Block | tuple[Block, ...]:
        if isinstance(at, slice):
            return tuple(map(_block, self._parts[at]))
        return _block(self._parts[at])


def row_blocks(lanes: Sequence[Lane]) -> list[RowBlocks]:
    """Return the rows of all lanes, from top to bottom."""
    found: list[RowBlocks] = []
    for lane in lanes:
        for number, row in enumerate(lane.rows):
            is_bricks = number == lane.bricks
            parts: list[TimelineSpan | Gap] = list(row.spans)
            if is_bricks:
                parts = sorted([*parts, *lane.gaps], key=lambda part: (part.start_ns, part.end_ns))
            title = row.name if row.name != lane.rows[number - 1].name or not number else f"{row.name} inside"
            found.append(RowBlocks(lane, title, is_bricks, tuple(parts), Blocks(parts)))
    return found


def _block(part: TimelineSpan | Gap) -> Block:
    return _gap(part) if isinstance(part, Gap) else _span(part)


def _span(span: TimelineSpan) -> Block:
    if span.kind is NodeKind.LAYER:
        return Block(span.start_ns, span.end_ns, partial(_layer_names, span), "dim", "track", "│")
    if span.category is None:
        return Block(span.start_ns, span.end_ns, partial(_step_names, span), "strong", "cursor strong", "▸")
    look = CATEGORY_LOOKS[span.category]
    return Block(span.start_ns, span.end_ns, partial(_names, span), look.role, look.fill, look.glyph)


def _gap(gap: Gap) -> Block:
    return Block(gap.start_ns, gap.end_ns, partial(_names, gap), "gap")


def _names(part: TimelineSpan | Gap) -> tuple[str, ...]:
    name = clean(part.name)
    return f"{name} {units.duration(part.duration_ns / 1e3)}", name


def _layer_names(span: TimelineSpan) -> tuple[str, ...]:
    names = _names(span)
    return *names, names[-1].removeprefix("Layer ")


def _step_names(span: TimelineSpan) -> tuple[str, ...]:
    names = _names(span)
    return (f"{names[0]} timed as a whole", *names) if span.is_plain else names


def label_width(width: int) -> int:
    """Return the number of cells that the names of lanes and rows need."""
    return 9 if width < 60 else 16


def axis(scale: Scale, zero_ns: int, labels: int) -> Line:
    """Return the time axis of the timeline. It has ticks at round times counted from `zero_ns`, and their unit."""
    length_ns = max(1, scale.end_ns - scale.begin_ns)
    tick_ns = _tick(length_ns * TICK_CELLS / scale.width)
    size_ns, unit = next((size, unit) for size, unit in _UNITS if tick_ns >= size)
    cells, number = "", -(-(scale.begin_ns - zero_ns) // tick_ns)
    while (at_ns := zero_ns + number * tick_ns) < scale.end_ns:
        column = (at_ns - scale.begin_ns) * scale.width // length_ns
        cells = fit(cells, column) + f"│{number * tick_ns // size_ns:,} {unit}"
        number += 1
    return ((fit(" time", labels), "dim"), (fit(cells, scale.width), "dim"))


def _tick(least_ns: float) -> int:
    """Return the smallest round number of ns (1, 2, 5, 10, 20 …) that is at least `least_ns`."""
    size = 1
    while True:
        for step in (1, 2, 5):
            if step * size >= least_ns:
                return step * size
        size *= 10


def longest(row: RowBlocks, scale: Scale, zero_ns: int, lines: int, width: int) -> list[Line]:
    """Return lines with the longest visible blocks of a row, the longest first.

    The begin of a block counts from `zero_ns`, the zero of the axis.
    """
    seen = [at for at in scale.about(row.parts) if scale.sees(row.parts[at])]
    seen.sort(key=lambda at: -row.parts[at].duration_ns)
    heads: Line = (("began, and took", "faint"),)
    found: list[Line] = [BLANK, rule(((f"the longest of {row.title} in sight", "dim"),), width, heads)]
    for at in seen[: max(0, min(lines - len(found), MAX_LONGEST))]:
        part, block = row.parts[at], row.blocks[at]
        name = f"{block.glyph or GAP} {clean(part.name)}"
        began = "before what is seen" if part.start_ns < scale.begin_ns else units.exact(part.start_ns - zero_ns)
        cells = (
            fit(began, 19, "right"),
            fit(units.exact(part.duration_ns), 18, "right"),
        )
        where = clean(" · ".join(part.where))
        found.append(((f"  {fit(name, 26)}", block.role), (cells[0], "dim"), (cells[1], ""), (f"  {where}", "dim")))
    return found


def sums(row: RowBlocks, scale: Scale, lines: int, width: int) -> list[Line]:
    """Return lines with the visible blocks of a row, summed by name: number and total time, the largest first."""
    found: dict[tuple[str, str], list[int]] = {}
    for part, block in zip(row.parts, row.blocks, strict=True):
        if scale.sees(block):
            inside_ns = min(block.end_ns, scale.end_ns) - max(block.start_ns, scale.begin_ns)
            found.setdefault((f"{block.glyph or GAP} {clean(part.name)}", block.role), []).append(inside_ns)
    by_time = sorted(found.items(), key=lambda one: -sum(one[1]))
    drawn: list[Line] = [BLANK, rule(((f"sums of {row.title} in sight", "dim"),), width)]
    for (name, role), each_ns in by_time[: max(0, lines - len(drawn))]:
        share = sum(each_ns) / max(1, scale.end_ns - scale.begin_ns)
        figures: Line = (
            (f"{len(each_ns):>7,}×", "dim"),
            (f"{units.duration(sum(each_ns) / 1e3):>11}", ""),
            (f"{units.percent(100 * share):>9}", "strong"),
        )
        head: Line = ((f"  {fit(name, 26)}", role), *figures, ("  ", ""))
        drawn.append((*head, *bar(share, max(1, width - width_of(head)), role)))
    return drawn


def like_newest(shown: TimelineView, lines: int, width: int) -> list[Line]:
    """Return a picture of the durations of the last steps in the phase of the newest step.

    Returns [] if there are too few steps or too few lines.
    """
    newest, took_ns = shown.newest, shown.like_newest_ns[-width:]
    if newest is None or len(took_ns) < LEAST_STEPS or lines < LEAST_STEPS_LINES:
        return []
    usual_ns = median(took_ns)
    about: list[Line] = [
        ((f"median {units.duration(usual_ns / 1e3)}", ""),),
        ((f"longest {units.duration(max(took_ns) / 1e3)}", ""),),
    ]
    title = f"the last {len(took_ns):,} steps of {clean(newest.name)}"
    spacing = Spacing.of(len(took_ns), width)
    bars = [Bar(ns, "strong warn" if ns >= ODD * usual_ns else "accent") for ns in took_ns]
    drawn = upright(bars, spacing, lines - 3, usual_top(took_ns, usual_ns))
    ends = fit(OLDEST, spacing.width - len(NEWEST)) + NEWEST
    said = join_fitting(about, max(0, width - width_of(((title, ""),)) - 8), " · ")
    return [BLANK, rule(((title, "dim"),), width, said), *drawn, ((ends, "dim"),)]


def legend(width: int) -> Line:
    """Return the legend of the signs that the timeline uses."""
    parts: list[Line] = [
        ((f"{look.glyph} {category.display_name}", look.role),) for category, look in CATEGORY_LOOKS.items()
    ]
    parts += [((f"{GAP} gap", "gap"),), ((f"{SHADES} several in a cell, and their number", "dim"),)]
    return join_fitting([(("", ""),), *parts], width)
