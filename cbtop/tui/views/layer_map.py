"""Draw the map of layers: a bar for each brick in each layer, and a sentence about the slowest layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from rich.cells import cell_len

from cbtop import units
from cbtop.comparison.comparison import Comparison
from cbtop.comparison.noise import Change
from cbtop.profiler.analysis.layers import BETWEEN
from cbtop.text import comparison_text
from cbtop.tui.views.baseline import baseline_lines, change_role, change_text
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.widgets.lines import BLANK, Line, clean, fit, fit_line, join_fitting, rule, width_of
from cbtop.tui.widgets.upright import Bar, Spacing, upright, usual_top
from cbtop.viewmodels.layers import MIN_LAYERS, MIN_STEPS, ODD, LayerRow, LayersView

_NAME_WIDTH = 18
_FIGURE_WIDTH = 9
MAX_BAR_HEIGHT = 6
SMALL_STRIP = 3  # number of lines that one brick takes, which are the lines of its bars and the blank line above them
_SCALED = 3  # Bars of at least this height in lines have a scale on their left.
AROUND = 6  # At most this many lines of the map are not bars.
_ROOMY = 140  # In a map of at least this width in cells, the median has a column.
WHOLE = "whole layer"
BACKWARD_SIGN = "◂"  # the sign of the backward pass, as in the bar of a training step
NUMBERED = 5  # Every fifth layer has its number above its bar.


@dataclass(frozen=True, slots=True)
class Strip:
    """One row of the map, with a bar per layer.

    The bars are for one brick, for all bricks, or for the time between bricks.
    """

    name: str
    role: str
    us: tuple[float | None, ...]
    median_us: float | None


def how_many(layers: LayersView) -> str:
    """Return the number of layers as text: `12 layers`, or `6 layers, forward and backward` in training."""
    backward = sum(row.is_backward for row in layers.rows)
    forward = len(layers.rows) - backward
    if not backward or not forward:
        return units.counted(len(layers.rows), "layer")
    passes = "forward and backward" if forward == backward else f"{backward} of them also backward"
    return f"{units.counted(forward, 'layer')}, {passes}"


def _number(row: LayerRow, before: str = "") -> str:
    """Return the number of a layer. A sign marks its backward pass, because the forward pass has the same number."""
    return f"{BACKWARD_SIGN if row.is_backward else ''}{before}{row.index}"


def slowest_line(layers: LayersView, width: int) -> Line:
    """Return a line such as `Layer 17: p50 2.4× that of its peers, +1.1 ms in DownProjection …`, cut to the width.

    If all layers are similar, or if there are too few steps, the line says so instead of naming a layer.
    """
    row = layers.slowest
    if row is None or row.to_median is None or row.median_us is None:
        return fit_line((("  no layer has three others like it to be compared with", "dim"),), width)
    if row.excess is None:
        most = f"the longest is {clean(row.name)}, p50 {units.number(row.to_median)}× that of its peers"
        text = f"  no layer stands out; {most}"
        return fit_line(((text, "dim"),), width)
    if layers.steps is not None and layers.steps < MIN_STEPS:
        text = f"  {clean(row.name)}: p50 {units.number(row.to_median)}× that of its peers in"
        return fit_line(((f"{text} {units.counted(layers.steps, 'step')}: too few to tell", "dim"),), width)
    many = layers.stands_out(row)
    if not many:
        like = len(layers.like(row))
        why = f"too few like it to tell ({like})" if like < MIN_LAYERS else "as far as others are"
        text = f"  {clean(row.name)}: p50 {units.number(row.to_median)}× that of its peers: {why}"
        return fit_line(((text, "dim"),), width)
    name, us = row.excess
    line: Line = (
        (f"  ▼ {clean(row.name)}", "strong warn"),
        (f": p50 {units.number(row.to_median)}× that of its peers, ", ""),
        (f"+{units.duration(us)} in {clean(name)}", "strong"),
    )
    medians = f" ({units.duration(row.p50_us)} against {units.duration(row.median_us)})"
    others = many - 1
    more = f"; {others} more ▼" if others else ""
    more = next((text for text in (medians + more, more, medians) if width_of(line) + cell_len(text) <= width), "")
    return fit_line((*line, (more, "dim")) if more else line, width)


def whole_layers(layers: LayersView, width: int, height: int) -> list[Line]:
    """Return the bars of the whole layers, with the layers' numbers, the median and the slowest layer.

    If `height` is 1, only the bars are returned. If lines are free, they show the bricks with the most time.
    """
    figures, spacing = _spacing(layers, width)
    whole, *others = strips_of(layers)
    tall = min(MAX_BAR_HEIGHT, max(1, height - 1))
    lines = [
        _ruler(layers, spacing, figures=figures),
        *_strip_lines(layers, whole, spacing, tall, at=None, is_current=False, figures=figures),
    ]
    others.sort(key=lambda strip: -sum(us or 0.0 for us in strip.us))
    for strip in others[: max(0, height - len(lines)) // SMALL_STRIP]:
        drawn = _strip_lines(layers, strip, spacing, SMALL_STRIP - 1, at=None, is_current=False, figures=figures)
        lines += [BLANK, *drawn]
    return lines[-height:]


def _spacing(layers: LayersView, width: int) -> tuple[int, Spacing]:
    """Return the number of columns with figures at the right of the map, and the layout of the bars to their left."""
    figures = 2 if width >= _ROOMY else 1
    room = width - _NAME_WIDTH - 3 - figures * (_FIGURE_WIDTH + 2) - 6
    return figures, Spacing.of(len(layers.rows), max(1, room))


def layer_at(layers: LayersView, width: int, x: int) -> LayerRow | None:
    """Return the layer whose bar is in the column `x` of a map with `width` cells, or None outside of the bars."""
    spacing = _spacing(layers, width)[1]
    column = x - _NAME_WIDTH - 3
    if not 0 <= column < spacing.width:
        return None
    return layers.rows[min(column // spacing.cells * spacing.group, len(layers.rows) - 1)]


def _whole(layers: LayersView) -> Strip:
    """Return a row of the map with the bars of whole layers."""
    us = tuple(row.us for row in layers.rows)
    return Strip(WHOLE, "strong", us, layers.median(us))


def strips_of(layers: LayersView) -> list[Strip]:
    """Return all rows of the map: whole layers, then each brick in execution order, then the time between bricks."""
    between = tuple(row.between_us for row in layers.rows)
    strips = [_whole(layers)]
    for at, brick in enumerate(layers.bricks):
        us = tuple(row.cells[at] for row in layers.rows)
        strips.append(Strip(clean(brick.name), CATEGORY_LOOKS[brick.category].role, us, layers.median(us)))
    return [*strips, Strip(BETWEEN, "gap", between, layers.median(between))]


def map_lines(
    layers: LayersView,
    strips: Sequence[Strip],
    at: int,
    line: int,
    width: int,
    height: int,
    baseline: Comparison | None,
) -> list[Line]:
    figures, spacing = _spacing(layers, width)
    worst = baseline.worst_layer if baseline else None
    marked = worst.layer if worst else None
    ruler = _ruler(layers, spacing, marked, figures=figures)
    head = [slowest_line(layers, width), *_worst_line(baseline, width), ruler]
    foot = [rule((("under the cursor", "dim"),), width), _detail(layers, strips[line], at, width, baseline)]
    free = height - len(head) - len(foot)
    shown, left_out = _chosen(strips, line, free)
    each = (free - bool(left_out)) // max(1, len(shown))
    tall, air = (min(MAX_BAR_HEIGHT, each - 1), 1) if each > _SCALED else (max(1, each), 0)
    lines = list(head)
    for strip in shown:
        lines += [BLANK] * air
        lines += _strip_lines(layers, strip, spacing, tall, at, is_current=strip is strips[line], figures=figures)
    if left_out:
        lines.append(((f"  {left_out} shorter ones: no room", "dim"),))
    lines += [BLANK] * max(0, min(height - len(lines) - len(foot), 1))
    return [fit_line(each, width) for each in (*lines, *foot)]


def _worst_line(baseline: Comparison | None, width: int) -> list[Line]:
    """Return a line about the layer that has slowed down most since the baseline, and its worst brick.

    If no layer has become slower, the line has the reason. Returns [] without a baseline.
    """
    if baseline is None:
        return []
    if baseline.why_not:
        return baseline_lines(baseline, width)[:1]
    worst = baseline.worst_layer
    head: Line = (("  Δ ", "accent"), ("(derived) ", "dim"))
    if worst is None or worst.layer is None:
        then, count = clean(comparison_text.baseline(baseline)), baseline.slower_layers
        none = f"no layer is slower than in {then}, beyond noise"
        all_alike = f"{count} of {len(baseline.layers)} layers are slower, as a longer cache makes them"
        return [(*head, (all_alike if count else none, "dim"))]
    unit, change = f"µs/{baseline.unit}", worst.change.decisive
    more = f"{units.number(change.delta)} ± {units.number(change.half)} {unit}"
    inside = next((one for one in baseline.slower if one.layer == worst.layer), None)
    brick = f", most of it in {clean(inside.brick[0])}" if inside and inside.brick else ""
    beside = "" if change is worst.change else comparison_text.RELATIVE_TO_OTHERS
    line: Line = (*head, (clean(worst.layer), "strong bad"), (f" is {more} slower than the baseline{beside}", ""))
    return [(*line, (f" ({units.percent(change.percent)}){brick}", "dim"))]


def _chosen(strips: Sequence[Strip], line: int, free: int) -> tuple[list[Strip], int]:
    """Choose rows of bars that fit into `free` lines.

    Whole layers are chosen first, then the row under the cursor, then the rows with the most time. Returns the chosen
    rows in their original order, and the number of rows that were not chosen.
    """
    if len(strips) <= free:
        return list(strips), 0
    by_time = sorted(strips[1:], key=lambda strip: -sum(us or 0.0 for us in strip.us))
    kept = {id(strip) for strip in (strips[0], strips[line], *by_time)[: max(1, free - 1)]}
    chosen = [strip for strip in strips if id(strip) in kept]
    return chosen, len(strips) - len(chosen)


def _ruler(layers: LayersView, spacing: Spacing, slower: str | None = None, *, figures: int) -> Line:
    """Return a line with the layers' numbers, each above its bar, and with the headings of the figures."""
    odd = [row.is_odd for row in layers.rows]
    line: Line = ((" " * (_NAME_WIDTH + 3), ""), *numbers(layers.rows, odd, spacing, slower))
    heads = ("median", "slowest")[-figures:]
    return (*line, *(("  " + fit(title, _FIGURE_WIDTH, "right"), "dim") for title in heads))


def numbers(rows: Sequence[LayerRow], odd: Sequence[bool], spacing: Spacing, slower: str | None = None) -> Line:
    """Return a line with the layers' numbers, each above its bar.

    A mark is added to the layer named `slower`, and to each layer with a true value in `odd`.
    """
    cells, roles = [" "] * spacing.width, ["dim"] * spacing.width

    def write(column: int, text: str, role: str) -> None:
        end = column + len(text)
        if end <= spacing.width and not "".join(cells[max(0, column - 1) : end + 1]).strip():
            cells[column:end], roles[column:end] = text, [role] * len(text)

    for at, row in enumerate(rows):
        if row.name == slower:
            write(spacing.column(at), f"Δ{_number(row)}", "strong bad")
            write(spacing.column(at), "Δ", "strong bad")
    for at, row in enumerate(rows):
        if odd[at]:
            write(spacing.column(at), f"▼{_number(row)}", "strong warn")
            write(spacing.column(at), "▼", "strong warn")  # If the number does not fit, the mark is still written.
    for at, row in enumerate(rows):
        if at % NUMBERED == 0:
            write(spacing.column(at), _number(row), "dim")
    drawn = groupby(zip(cells, roles, strict=True), key=itemgetter(1))
    return tuple(("".join(cell for cell, _ in same), role) for role, same in drawn)


def _strip_lines(
    layers: LayersView, strip: Strip, spacing: Spacing, tall: int, at: int | None, *, is_current: bool, figures: int
) -> list[Line]:
    known = [us for us in strip.us if us is not None]
    usual = strip.median_us or 0.0
    top = usual_top(known, usual)
    bars = [
        Bar(us, _role(us, strip, is_cursor=is_current and at is not None and index in _group(spacing, at)))
        for index, us in enumerate(strip.us)
    ]
    drawn = upright(bars, spacing, tall, top)
    is_tall = tall >= _SCALED
    name: Line = (("▸ " if is_current else "  ", "accent"), (fit(strip.name, _NAME_WIDTH), strip.role))
    lines: list[Line] = []
    for row, line in enumerate(drawn):
        left: Line = name if row == tall - 1 else ((" " * (_NAME_WIDTH + 2), ""),)
        if is_tall and row == 0:
            left = ((fit(units.duration(top) if known else "", _NAME_WIDTH + 2, "right"), "dim"),)
        mark = " " if not is_tall else "┤" if row in (0, tall - 1) else "│"
        lines.append((*left, (mark, "faint"), *line))
    if known:
        slowest = max(range(len(strip.us)), key=lambda index: strip.us[index] or 0.0)
        if figures > 1:
            lines[-1] += (("  " + fit(units.duration(strip.median_us), _FIGURE_WIDTH, "right"), "dim"),)
        lines[-1] += (
            ("  " + fit(units.duration(strip.us[slowest]), _FIGURE_WIDTH, "right"), ""),
            (f"  {_number(layers.rows[slowest], 'L')}", "dim"),
        )
    return lines


def _group(spacing: Spacing, at: int) -> range:
    return range(at // spacing.group * spacing.group, (at // spacing.group + 1) * spacing.group)


def _role(us: float | None, strip: Strip, *, is_cursor: bool) -> str:
    is_odd = us is not None and strip.median_us is not None and us >= ODD * strip.median_us
    role = "faint" if us is None else "strong warn" if is_odd else strip.role
    return f"{role} cursor" if is_cursor else role


def _detail(layers: LayersView, strip: Strip, at: int, width: int, baseline: Comparison | None) -> Line:
    """Return a line with the figures of the brick and of the layer under the cursor."""
    row, us = layers.rows[at], strip.us[at]
    parts: list[Line] = [((f"  {clean(row.name)}", "strong"), (f" · {strip.name}", strip.role))]
    if us is None:
        return join_fitting([*parts, (("does not run there", "dim"),)], width, "  ")
    parts.append(((units.duration(us), "strong"), (f" a {layers.unit}", "dim")))
    if change := _since(baseline, row.name, strip.name):
        parts.append(((f"Δ {change_text(change)}", change_role(change)),))
    if strip.median_us:
        parts.append(((f"{units.number(us / strip.median_us)}×", ""), (" the median of the layers", "dim")))
    if strip.name != WHOLE and row.us:
        parts.append(((units.percent(100 * us / row.us), ""), (" of the layer", "dim")))
    parts.append((("Enter opens it", "faint"),))
    return join_fitting(parts, width, "  ")


def _since(baseline: Comparison | None, layer: str, line: str) -> Change | None:
    """Return the change of a row of the map in `layer` since the baseline. `line` is the name of the row.

    Return None if the change is unknown.
    """
    changes = baseline.changes if baseline else ()
    return next(
        (c.change for c in changes if c.layer == layer and (clean(c.brick[0]) if c.brick else WHOLE) == line), None
    )
