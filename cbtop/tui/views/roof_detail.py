"""The panel of the roofline: the brick under the cursor compared with every roof, and the possible saving of each
brick.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from cbtop import units
from cbtop.profiler.analysis.roofline import COMPUTE, LIMITING_PERCENT, MEMORY, NO_ROOF, SHARED
from cbtop.text import time_text
from cbtop.tui.views.figures import figure
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.widgets.bars import bar
from cbtop.tui.widgets.columns import Column, head_line, place, row_line
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import BLANK, Line, clean, clip, fit_line, rule, width_of, wrap_line
from cbtop.tui.widgets.parts import ScreenPart, parts_lines
from cbtop.viewmodels.bricks import BrickRow, SizePoint
from cbtop.viewmodels.roofline import CeilingRow, advice_at_a_peak, peaks_over, why_no_roof
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdicts.base import gain_inside

LEAST_LINES = 5  # The panel has at least this many lines.
FAR_PERCENT = 30.0  # A brick is far below all roofs if it reaches less than this percentage of every roof.
_BELOW = "launches, waiting, small shapes, scattered reads, or work beside the arithmetic, as unpacking weights."
_ADVICE = {
    MEMORY: "Move fewer bytes (smaller weights, a fused kernel), or let more sequences share each read.",
    SHARED: "Steps ran at once and share the roofs: together they may be at one, each far below it.",
}


@dataclass(frozen=True, slots=True)
class _Saving:
    """The time that a brick would save if it reached its roof. All figures are derived."""

    brick: BrickRow
    us_per_token: float
    tokens_per_sec: float | None


class RoofDetail(Drawing):
    """The panel with details of the brick under the cursor of the table above."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._brick: BrickRow | None = None
        self._source: SourceView | None = None

    def show_brick(self, brick: BrickRow | None, source: SourceView) -> None:
        """Show the details of `brick` from now on."""
        self._brick, self._source = brick, source
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        source, brick = self._source, self._brick
        if source is None or brick is None:
            return []
        ceilings, savings = _over(brick, source.roofline.ceilings), _savings(source)
        said = _said(brick, ceilings, source.roofline.ceilings, width)
        roofs = ScreenPart(partial(_roofs, brick, ceilings, said), 3, 3 + max(1, len(ceilings)) + len(said))
        if savings:
            saved = ScreenPart(partial(_saved, savings), 3, 2 + len(savings))
        else:
            why_not = any(point.roof_unsure for point in source.roofline.points)
            saved = ScreenPart(_not_saved, 2, 2 if why_not else 0)
        role = CATEGORY_LOOKS[brick.category].role
        by_cached = _growing("as the cache grows", brick.by_cached, "position", role)
        by_batch = _growing("as the batch grows", brick.by_batch, "sequence", role)
        parts = roofs, by_cached, by_batch, saved
        return parts_lines(parts, parts, width, height)


def _roofs(
    brick: BrickRow, ceilings: Sequence[CeilingRow], said: Sequence[Line], width: int, height: int
) -> list[Line]:
    """Return a table of the roofs with the share of each roof that the brick reaches.

    Below the table come the lines in `said`.
    """
    look = CATEGORY_LOOKS[brick.category]
    title: Line = ((f"{look.glyph} ", look.role), (clean(brick.name), "strong"), (" under each roof", "dim"))
    rates = f"{units.number(brick.gb_per_sec)} GB/s · {units.number(brick.gflops)} GFLOP/s"
    rows = sorted(ceilings, key=lambda ceiling: (ceiling.kind, ceiling.value))
    placed = place(_roof_columns(brick), width - 2)
    lines = [rule(title, width, ((rates, ""),)), ((" ", ""), *head_line(placed, "", descending=True))]
    if not rows:
        lines[1] = (("  n/a: no roof was measured", "dim"),)
    lines += [((" ", ""), *row_line(placed, row)) for row in rows]
    return [*[*lines, *said][: height - 1], BLANK]


def _said(brick: BrickRow, ceilings: Sequence[CeilingRow], every: Sequence[CeilingRow], width: int) -> list[Line]:
    """Return advice about the roof that limits the brick.

    `every` contains all compute roofs, including roofs for data types that the brick does not use.
    """
    if brick.bound == COMPUTE:
        said = advice_at_a_peak(brick, every)
    elif brick.bound == NO_ROOF:
        said = _below_all(brick, ceilings)
    else:
        said = _ADVICE.get(brick.bound or "", "")
    if brick.bound is None and (why := why_no_roof(brick, every)):
        said = f"% of roof n/a: {why}."
    near = _other_roof(brick, ceilings)
    if near is not None:
        said = f"Limited by {clean(near.name)}, a lower roof than that of its % of roof. {said}"
    if brick.above_roof:
        said = f"Faster than memory: {_where_from(brick, ceilings)}"
    return wrap_line((("  → ", "faint"),), ((said, "strong"),), width - 1) if said else []


def _below_all(brick: BrickRow, ceilings: Sequence[CeilingRow]) -> str:
    """Return what may limit a brick that is far below every roof.

    If the brick is not far below all roofs, the text begins with the largest share of a roof that it reaches.
    """
    shares = [share for ceiling in ceilings if (share := _reached(brick, ceiling)) is not None]
    largest = max(shares, default=0.0)
    if largest < FAR_PERCENT:
        return f"Far below every roof: {_BELOW}"
    return f"At {units.percent(largest)} of the nearest roof. The rest may be {_BELOW}"


def _reached(brick: BrickRow, ceiling: CeilingRow) -> float | None:
    """Return the rate of the brick in percent of the roof `ceiling`."""
    if ceiling.kind == "cache":
        return None
    rate = brick.gflops if ceiling.kind == "compute" else brick.gb_per_sec
    return None if rate is None else 100 * rate / ceiling.value


def _other_roof(brick: BrickRow, ceilings: Sequence[CeilingRow]) -> CeilingRow | None:
    """Return the roof that would limit the brick, if the brick is far below this roof.

    Returns None if the brick is near the roof, or if no roof limits the brick.
    """
    share, kind = brick.percent_of_roof, {MEMORY: "bandwidth", COMPUTE: "compute"}.get(brick.bound or "")
    if kind is None or share is None or share >= LIMITING_PERCENT:
        return None
    return min((one for one in ceilings if one.kind == kind), key=lambda one: one.value, default=None)


def _where_from(brick: BrickRow, ceilings: Sequence[CeilingRow]) -> str:
    """Return a sentence about a brick that is faster than its roof.

    The sentence names the slowest cache that is at least as fast as the brick.
    """
    levels = sorted((one for one in ceilings if one.kind == "cache"), key=lambda one: one.value)
    fast = next((one for one in levels if one.value >= (brick.gb_per_sec or 0.0)), None)
    if fast is None:
        return "look at its FLOP, its bytes, or the roof."
    return f"its data may come from a cache ({fast.name}), or its FLOP and bytes are not what was declared."


def _over(brick: BrickRow, ceilings: Iterable[CeilingRow]) -> list[CeilingRow]:
    """Return the roofs that apply to the brick.

    A compute roof applies only if the brick multiplies the roof's data type.
    """
    peaks = peaks_over(brick, ceilings)
    return [one for one in ceilings if one.kind != "compute" or one in peaks]


def _roof_columns(brick: BrickRow) -> tuple[Column[CeilingRow], ...]:
    def reached(row: CeilingRow) -> float | None:
        rate = brick.gflops if row.kind == "compute" else brick.gb_per_sec
        return None if rate is None else 100 * rate / row.value

    def share(row: CeilingRow) -> Line:
        percent = reached(row)
        role = "dim" if row.is_unsure else "strong warn" if (percent or 0) > 100 else "strong"
        return figure(("~" if row.is_unsure else "") + units.percent(percent), role)

    return (
        Column("roof", 16, 0, lambda row, width: ((clip(clean(row.name), width), ""),), "", align="left", stretch=1,
               max_width=24),
        Column("is", 16, 2, lambda row, _: figure(f"{units.number(row.value)} {row.unit}"), ""),
        Column("it reaches", 10, 1, lambda row, _: share(row), ""),
        Column("rounds", 6, 6, lambda row, _: figure(units.count(row.rounds), "dim"), ""),
        Column("spread", 7, 3, lambda row, _: figure(units.percent(row.spread_percent), "dim"), ""),
        Column("load", 6, 4, lambda row, _: figure(units.percent(row.load_percent), "dim"), ""),
        Column("age", 9, 5, lambda row, _: figure(time_text.age(row.age_s), "dim"), ""),
    )  # fmt: skip


def _growing(title: str, points: tuple[SizePoint, ...], unit: str, role: str) -> ScreenPart:
    """Return a part of the panel with the brick's time per token for each size of step, such as the number of cached
    positions.

    The part is empty if all steps had about the same size.
    """
    return ScreenPart(partial(_sizes, title, points, unit, role), 4, 3 + len(points) if len(points) > 1 else 0)


def _sizes(title: str, points: tuple[SizePoint, ...], unit: str, role: str, width: int, height: int) -> list[Line]:
    first, largest = points[0].us_per_token, max(point.us_per_token for point in points)
    lines = [rule(((f"{title}, last 60 s (derived)", "dim"),), width, (("µs/token", "dim"),))]
    for point in points[: height - 2]:
        label = units.counted(last := point.to_size - 1, unit)
        if point.from_size < last:
            label = f"{units.count(point.from_size)} to {label}"
        seconds = units.counted(point.seconds, "second")
        figures: Line = (
            (f"{units.number(point.us_per_token):>9}", "strong"),
            (f"{units.number(point.us_per_token / first):>7}×", ""),
            (f"  {seconds:<10}", "dim"),
        )
        head: Line = ((f"  {label:<26}", ""), *figures, ("  ", ""))
        lines.append((*head, *bar(point.us_per_token / largest, max(1, width - width_of(head)), role)))
    return [*lines, BLANK]


def _savings(source: SourceView) -> list[_Saving]:
    """Return the time that each brick could save by reaching its roof, the largest first. Bricks with an uncertain
    roof are left out.
    """
    found = []
    for brick in source.roofline.points:
        share, at = brick.percent, brick.percent_of_roof
        if (
            brick.us_per_token is None
            or share is None
            or at is None
            or at > 100
            or brick.roof_unsure
            or brick.bound == SHARED
        ):
            continue
        found.append(_Saving(brick, brick.us_per_token * (1 - at / 100), gain_inside(source, share * (1 - at / 100))))
    return sorted(found, key=lambda one: -one.us_per_token)


def _saved(savings: list[_Saving], width: int, height: int) -> list[Line]:
    title: Line = (("what reaching its roof would save (derived)", "dim"),)
    left_out = len(savings) - max(0, height - 2)
    more: Line = ((f"{left_out} more", "faint"),) if left_out > 0 else BLANK
    placed = place(_SAVED_COLUMNS, width - 2)
    rows = savings[: height - 2]
    head: Line = ((" ", ""), *head_line(placed, "", descending=True))
    return [rule(title, width, more), head, *(((" ", ""), *row_line(placed, row)) for row in rows)]


def _not_saved(width: int, height: int) -> list[Line]:
    title: Line = (("what reaching its roof would save (derived)", "dim"),)
    return [rule(title, width), fit_line((("  n/a: the roofs are unsure; C measures them again", "dim"),), width)]


def _brick_name(row: _Saving, width: int) -> Line:
    look = CATEGORY_LOOKS[row.brick.category]
    return ((f"{look.glyph} ", look.role), (clip(clean(row.brick.name), width - 2), "strong"))


_SAVED_COLUMNS: tuple[Column[_Saving], ...] = (
    Column("brick", 16, 0, _brick_name, "", align="left", stretch=1, max_width=28),
    Column("incl µs/tok", 11, 3, lambda row, _: figure(units.number(row.brick.us_per_token)), ""),
    Column("saves µs", 9, 1, lambda row, _: figure(units.number(row.us_per_token), "strong"), ""),
    Column("tokens/s", 9, 2, lambda row, _: figure(_plus(row.tokens_per_sec), "good"), ""),
    Column("limited by", 19, 4, lambda row, _: figure(row.brick.bound or units.NOT_MEASURED, "dim"), "",
           align="left"),
)  # fmt: skip


def _plus(value: float | None) -> str:
    return units.NOT_MEASURED if value is None else f"+{units.number(value)}"
