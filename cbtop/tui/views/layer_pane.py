"""Draw two tables: the bricks of one layer compared with its peers (similar layers), and all layers."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop import units
from cbtop.profiler.analysis.layers import BETWEEN
from cbtop.tui.views.figures import figure
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.widgets.bars import bar
from cbtop.tui.widgets.columns import Column, RowT, head_line, place, row_line
from cbtop.tui.widgets.lines import BLANK, Line, clean, clip, fit_line, join_fitting, rule
from cbtop.tui.widgets.parts import beside, even_widths
from cbtop.viewmodels.layers import ODD, BrickInLayer, LayerRow, LayersView

LEAST_LINES = 5  # The pane has at least this many lines.
_LEAST_LAYERS = 7  # The table of all layers has at least this many lines.
TWO_TABLES = 100  # In a pane of at least this width in cells, the two tables are next to each other.


def pane_height(layers: LayersView, row: LayerRow, width: int) -> int:
    """Return how many lines the pane needs to show both tables completely."""
    bricks, all_layers = 3 + len(layers.inside(row)), 2 + len(layers.rows)
    return max(bricks, all_layers) if width >= TWO_TABLES else bricks + 1 + all_layers


def layer_lines(layers: LayersView, row: LayerRow, width: int, height: int) -> list[Line]:
    """Return a table with the bricks of the layer `row` and the time between them, and a table with all layers.

    The second table is to the right of the first. If there is too little room, the second table is below.
    """
    if width >= TWO_TABLES:
        widths = even_widths(width, 2)
        panes = [_bricks(layers, row, widths[0], height), _layers(layers, row, widths[1], height)]
        return beside(panes, widths)
    lines = _bricks(layers, row, width, height)
    left = height - len(lines) - 1
    return [*lines, BLANK, *_layers(layers, row, width, left)] if left >= _LEAST_LAYERS else lines


def _bricks(layers: LayersView, row: LayerRow, width: int, height: int) -> list[Line]:
    inside = layers.inside(row)
    shown = inside[: height - 2]
    title = _title(row, layers.unit, len(inside) - len(shown), width)
    lines = [title, *_table(_brick_columns(layers.unit), shown, width)]
    between = f"{BETWEEN}: {units.duration(row.between_us)}, {units.percent(_share(row))} of the layer"
    return [*lines, fit_line(((f"    {between}", "gap"),), width)][:height]


def _layers(layers: LayersView, row: LayerRow, width: int, height: int) -> list[Line]:
    by_time = sorted(layers.rows, key=lambda other: -(other.to_median or 0.0))
    shown = by_time[: height - 2]
    left_out = len(by_time) - len(shown)
    more: Line = ((f"{left_out} more", "faint"),) if left_out else BLANK
    head = rule((("layers, the slowest among its peers first", "dim"),), width, more)
    return [head, *_table(_layer_columns(row, layers.unit), shown, width)]


def _title(row: LayerRow, unit: str, left_out: int, width: int) -> Line:
    parts: list[Line] = [((f"{units.duration(row.us)} a {unit}", "strong"),)]
    if left_out:
        parts.append(((units.counted(left_out, "more brick"), "faint"),))
    if row.to_median is not None:
        role = "strong warn" if row.is_odd else "dim"
        parts.append(((f"p50 {units.number(row.to_median)}× that of its peers", role),))
    name = clip(clean(row.name), width // 2)
    return rule(((name, "strong"),), width, join_fitting(parts, width - len(name) - 8, " · "))


def _share(row: LayerRow) -> float | None:
    return 100 * row.between_us / row.us if row.us else None


def _table(columns: Sequence[Column[RowT]], rows: Sequence[RowT], width: int) -> list[Line]:
    placed = place(columns, width - 1)
    return [
        ((" ", ""), *line) for line in (head_line(placed, "", descending=True), *(row_line(placed, r) for r in rows))
    ]


def _brick_columns(unit: str) -> tuple[Column[BrickInLayer], ...]:
    def name(row: BrickInLayer, width: int) -> Line:
        look = CATEGORY_LOOKS[row.brick.category]
        return ((f" {look.glyph} ", look.role), (clip(clean(row.brick.name), width - 3), "strong"))

    def share(row: BrickInLayer, width: int) -> Line:
        return bar(None if row.percent is None else row.percent / 100, width, CATEGORY_LOOKS[row.brick.category].role)

    return (
        Column("brick", 18, 0, name, "", align="left", stretch=1, max_width=28),
        Column("of layer", 8, 1, lambda row, _: figure(units.percent(row.percent)), ""),
        Column(f"µs a {unit}", 9, 2, lambda row, _: figure(units.number(row.us)), ""),
        Column("p50/call", 8, 3, lambda row, _: figure(units.number(row.p50_us)), ""),
        Column("of peers", 8, 4, lambda row, _: figure(units.number(row.usual_p50_us), "dim"), ""),
        Column("×", 6, 2, lambda row, _: _times(row.to_usual), ""),
        Column("share", 8, 5, share, "", align="left", stretch=1, is_drawn=True),
    )


def _layer_columns(current: LayerRow, unit: str) -> tuple[Column[LayerRow], ...]:
    def name(row: LayerRow, width: int) -> Line:
        mark = "▸" if row.id == current.id else "▼" if row.is_odd else " "
        return ((f" {mark} ", "warn" if mark == "▼" else "accent"), (clip(clean(row.name), width - 3), "strong"))

    def excess(row: LayerRow, width: int) -> Line:
        if row.excess is None:
            return figure(units.NONE_THERE)
        return ((clip(f"{clean(row.excess[0])} +{units.duration(row.excess[1])}", width), "warn"),)

    return (
        Column("layer", 12, 0, name, "", align="left", stretch=1, max_width=28),
        Column("calls", 7, 5, lambda row, _: figure(units.number(row.calls)), ""),
        Column(f"µs a {unit}", 9, 2, lambda row, _: figure(units.number(row.us)), ""),
        Column("p50/call", 8, 3, lambda row, _: figure(units.number(row.p50_us)), ""),
        Column("of peers", 8, 4, lambda row, _: figure(units.number(row.median_us), "dim"), ""),
        Column("×", 6, 1, lambda row, _: _times(row.to_median), ""),
        Column("most of it in", 18, 4, excess, "", align="left", stretch=1),
    )


def _times(ratio: float | None) -> Line:
    """Return the ratio of a time to its median over similar layers as text, or n/a."""
    return figure(units.number(ratio), "strong warn" if ratio is not None and ratio >= ODD else "")
