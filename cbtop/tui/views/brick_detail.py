"""The panel with all figures of one brick and their provenance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.cells import cell_len

from cbtop import units
from cbtop.protocol.vocabulary import Provenance
from cbtop.text import counters_text, module_text
from cbtop.text.statistics import BRICK_PANEL, HOST_REPORT, Statistic
from cbtop.tui.views.brick_pictures import durations, heading_line, kernels, layers_part, trend
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.views.once_a_second import Pictures
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import BLANK, Line, clean, fit, fit_line, rule, width_of, wrap_line
from cbtop.tui.widgets.parts import GAP, ScreenPart, beside, parts_lines
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.checks import CheckRow
from cbtop.viewmodels.source import SourceView

Fact = tuple[str, str, str]  # a fact about a brick: (name, value, colour role)

# Keys of the figures that depend on a roof. If the roof is uncertain, they are grey, and numbers have a `~`.
ROOFED = ("percent_of_roof", "bound")
# minimum number of lines of the panel, and number of lines that all of its content needs
LEAST_LINES, ALL_LINES = 5, 26
TWO_COLUMNS = 110  # In a panel of at least this width in cells, pictures are to the right of the figures.

_FACT_WIDTH = 26
_LABEL_WIDTH = 17


class BrickDetail(Drawing):
    """The panel with details of the brick under the cursor of the table next to the panel."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._brick: BrickRow | None = None
        self._source: SourceView | None = None
        self._pictures = Pictures()

    def let_go(self) -> None:
        """Drop the cached pictures of the previous moment."""
        self._pictures.let_go()

    def show_brick(self, brick: BrickRow | None, source: SourceView) -> None:
        self._brick = brick
        self._source = source
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        if self._brick is None or self._source is None:
            return [rule((("no brick", "dim"),), width)]
        return detail_lines(self._brick, self._source, width, height, self._pictures)


def detail_lines(
    brick: BrickRow, source: SourceView, width: int, height: int, pictures: Pictures | None = None
) -> list[Line]:
    """Return the panel of `brick` in at most `height` lines, without the least useful parts if there is too little
    room.

    `pictures` caches drawings. Without it, each is made again.
    """
    pictures = pictures or Pictures()
    pictures.begin(source, brick.key)
    look = CATEGORY_LOOKS[brick.category]
    title: Line = ((f"{look.glyph} ", look.role), (clean(brick.name), "strong"))
    where = " · ".join(filter(None, (brick.category.display_name, clean(brick.backend))))
    head = rule(fit_line(title, min(width_of(title), width - 6)), width, ((where, look.role),))
    each = width if width < TWO_COLUMNS else width // 2
    bars = ScreenPart(partial(durations, brick, pictures), 4, 10)
    layers = layers_part(brick, source, pictures)
    seconds = ScreenPart(partial(trend, brick, source), 4, 8 if brick.trend_us else 0)
    of_burst = [one for one in source.kernels if one.brick == brick.name]
    launched = ScreenPart(partial(kernels, of_burst), 2, sum(1 + len(one.kernels) for one in of_burst))
    module = _fixed(_modules(brick, each)) if brick.modules else _fixed([])
    counted = _fixed(_counters(brick, source, each))
    groups = _groups(brick, source, each)
    if width >= TWO_COLUMNS:
        groups[0] = groups[0][: height - 1]  # rather cut the figures of time than leave them out
    time, work, budget, checks = (_fixed(lines) for lines in groups)
    drawn = (bars, layers, seconds, launched)
    if width < TWO_COLUMNS:
        order = (bars, layers, seconds, budget, time, work, counted, module, launched, checks)
        by_rank = (bars, budget, time, module, layers, work, seconds, launched, counted, checks)
        if brick.budget_us_per_token is None:
            by_rank = (bars, time, module, layers, work, seconds, launched, counted, checks, budget)
        return [head, *parts_lines(order, by_rank, width, height - 1)]
    by_use = (time, budget, work, module, counted, checks)
    left = parts_lines((time, work, counted, module, budget, checks), by_use, each, height - 1)
    right = parts_lines(drawn, drawn, width - each - len(GAP), height - 1)
    return [head, *beside((left, right), (each, width - each - len(GAP)))]


def _fixed(lines: list[Line]) -> ScreenPart:
    """Return a part of the panel that consists of `lines`. If there is room, a blank line is added at the end."""
    return ScreenPart(lambda width, height: [*lines, BLANK], len(lines), len(lines) + 1)


def _groups(brick: BrickRow, source: SourceView, width: int) -> list[list[Line]]:
    """Return groups of lines with the figures of a brick: time, work, budget, and checks."""
    groups = []
    for heading, rows in BRICK_PANEL.items():
        known = [one for one in rows if one not in HOST_REPORT or one.value(brick) is not None]
        facts = _facts(known, brick, is_window=source.window is not None)
        provenance = _provenance(rows)
        if heading == "budget" and brick.budget_us_per_token is None:
            facts, provenance = [("budget", "none set", "")], Provenance.STATIC.value
        groups.append(group_lines(heading, provenance, facts, width))
    return [*groups, _checks(brick, [check for check in source.checks if check.brick == brick.name], width)]


def _modules(brick: BrickRow, width: int) -> list[Line]:
    """Return a heading, and a line for each of the modules that the brick calls at most places."""
    lines = [heading_line("module", Provenance.STATIC.value, width)]
    for text in module_text.modules(brick.modules):
        lines += wrap_line((("  ", ""),), ((clean(text), ""),), width)
    return lines


def _counters(brick: BrickRow, source: SourceView, width: int) -> list[Line]:
    """Return the counters of the brick in a mean call, and why others are missing. Empty if nothing is counted."""
    counters = source.counters
    counted = counters.of(brick.key) if counters else None
    if counters is None or counted is None:
        return []
    facts = [(title, value, "") for title, value in counters_text.facts(counted, brick.avg_inclusive_us)]
    lines = group_lines("counters in a call", "measured and derived", facts, width)
    if counters.why_not:
        lines += wrap_line((("  ", ""),), ((f"n/a: {clean(counters.why_not)}", "dim"),), width)
    return lines


def _facts(rows: Sequence[Statistic], brick: BrickRow, *, is_window: bool) -> list[Fact]:
    """Return (name, value, colour role) of each statistic of the brick.

    Figures that are derived in a window, but measured over the whole time, get `derived` in their names there.
    """
    facts = []
    for statistic in rows:
        derived = " derived" if is_window and statistic.derived_in_window else ""
        value, role = clean(statistic.in_full(brick)), ""
        if statistic.key in ROOFED and brick.roof_unsure:
            value, role = value if statistic.key == "bound" else f"~{value}", "dim"
        if statistic.key == "budget_over_us" and brick.budget_over_us:
            role = "bad"
        mark = " ⚠ above" if statistic.key == "percent_of_roof" and brick.above_roof else ""
        facts.append(((statistic.word or statistic.title) + derived, value + mark, role))
    return facts


def _provenance(rows: Sequence[Statistic]) -> str:
    """Return the provenance of a group of figures as text, such as `measured and derived`."""
    found = {statistic.origin.provenance for statistic in rows}
    return " and ".join(provenance.value for provenance in Provenance if provenance in found)


def group_lines(heading: str, provenance: str, facts: Sequence[Fact], width: int) -> list[Line]:
    """Return a line with the heading and the provenance of a group, followed by its facts in up to three columns."""
    across = max(1, min(3, (width - 2) // _FACT_WIDTH))
    each = (width - 2) // across
    room = each - _LABEL_WIDTH - 1
    rows: list[list[Fact]] = []
    for fact in facts:
        is_full = not rows or len(rows[-1]) == across or cell_len(rows[-1][-1][1]) > room
        if is_full or cell_len(fact[1]) > room:  # Give a long value a line of its own.
            rows.append([])
        rows[-1].append(fact)
    lines: list[Line] = [heading_line(heading, provenance, width)]
    for row in rows:
        line: Line = ((" ", ""),)
        for label, value, role in row:
            role = "faint" if value == units.NOT_MEASURED else role
            size = max(room, cell_len(value)) if len(row) == 1 else room
            line += ((" " + fit(label, _LABEL_WIDTH), "dim"), (fit(value, size), role))
        lines.append(fit_line(line, width))
    return lines


def _checks(brick: BrickRow, checks: list[CheckRow], width: int) -> list[Line]:
    if not checks:
        counts = (brick.checks_passed, "passed"), (brick.checks_failed, "failed")
        summary = ", ".join(f"{count} {word}" for count, word in counts if count) or "none"
        return [heading_line("checks", Provenance.MEASURED.value, width), (("  " + summary, "dim"),)]
    lines: list[Line] = [heading_line("checks", Provenance.MEASURED.value, width)]
    for check in checks:
        role, glyph = ("good", "✓") if check.passed else ("bad", "✗")
        if check.skipped:
            role, glyph = "faint", "–"
        error = f"max error {units.scientific(check.max_error)} of {units.scientific(check.tolerance)}"
        if check.not_finite:
            error = f"met {clean(check.not_finite)}"
        if check.note:
            error += f" ({clean(check.note)})"
        if check.skipped:
            error = f"skipped: {clean(check.skipped)}"
        lines.append((("  " + glyph + " ", role), (clean(check.assertion), ""), ("  " + error, "dim")))
    return [fit_line(line, width) for line in lines]
