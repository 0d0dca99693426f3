"""Draw the time breakdown of a step as an equation and as a bar: wall time = bricks + gaps + the rest."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop import units
from cbtop.text import breakdown_text, range_text
from cbtop.tui.views.base import SourceDrawing
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.widgets.bars import BarSegment, stacked
from cbtop.tui.widgets.lines import Line, Span, clean, fit_line, join_fitting, rule, width_of
from cbtop.viewmodels.not_instrumented import not_instrumented
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.time_breakdown import TimeBreakdownView

TITLE = "where a step's time goes"
RESIDUAL_BOUND_PERCENT = 5.0  # A warning is shown if the share of the rest is above this percentage.
GAP_FILL, REST_FILL = "▒", "░"  # the cells of gaps and of the rest, in the bar and before their names
BETWEEN_BOUND_PERCENT = 10.0  # A warning is shown if the share of time between steps is above this percentage.


class TimeBreakdownPanel(SourceDrawing):
    """Draws the time breakdown of a step in three lines: a rule, the bar, and the equation."""

    def draw(self, width: int, height: int) -> list[Line]:
        source = self._source
        if source is None:
            return []
        if source.books is None and source.merged is not None:
            why = "  n/a: what is taken from several ranks adds up to nothing"
            return [rule(((TITLE, "dim"),), width), fit_line(((why, "dim"),), width)]
        if source.books is None:
            return [rule(((TITLE, "dim"),), width), (("  n/a: no step has ended yet", "dim"),)]
        equation = fit_line((("  ", ""), *books_equation(source, source.books, width - 2)), width)
        bar: Line = (("  ", ""), *stacked(books_parts(source), width - 4))
        if height >= 3:
            return [books_rule(source, TITLE, width), bar, equation]
        return [books_rule(source, "a step", width) if beside_books(source) else bar, equation][-height:]


def books_rule(source: SourceView, title: str, width: int) -> Line:
    """Return the rule above the time breakdown. `title` is at its left end, and notes are at its right end."""
    room = width - len(title) - 8
    beside = beside_books(source)
    if not _is_much_between(source) and (between := range_text.between_steps(source.time_range)):
        beside.append(((between, "dim"),))
    return rule(((title, "dim"),), width, join_fitting(beside, room, " · "))


def beside_books(source: SourceView) -> list[Line]:
    """Return notes about the time breakdown, worst first: its parts do not add up, much time is not instrumented,
    much time is between steps, or calls ran outside of the wall time.
    """
    trouble = breakdown_text.books_trouble(source.books)
    found: list[Line] = [((trouble.partition(":")[0], "bad strong"),)] if trouble else []
    if outside := not_instrumented(source):
        found.append(((f"not instrumented: {units.percent(outside.percent)} of the step time", "warn"),))
    if _is_much_between(source):
        found.append(((range_text.between_steps(source.time_range), "warn"),))
    notes = breakdown_text.books_notes(source.books, source.outside)
    return [*found, *(((clean(note.split(", ")[0]), "warn"),) for note in notes)]


def _is_much_between(source: SourceView) -> bool:
    percent = source.time_range.between_percent if source.time_range else None
    return percent is not None and percent > BETWEEN_BOUND_PERCENT


def books_parts(source: SourceView) -> list[BarSegment]:
    """Return the parts of the wall time of a step: categories of bricks, then gaps, then the rest."""
    books = source.books
    if books is None:
        return []
    parts = [
        BarSegment(
            row.total_exclusive_us,
            CATEGORY_LOOKS[row.category].fill,
            f"{CATEGORY_LOOKS[row.category].glyph} {clean(row.name)}",
        )
        for row in sorted(source.categories, key=lambda row: row.category)
    ]
    parts += [BarSegment(gap.us, "fill-gap", clean(gap.name), GAP_FILL) for gap in books.gaps]
    parts.append(BarSegment(books.unattributed_us, "fill-unknown", breakdown_text.REST, REST_FILL))
    return parts


def books_equation(source: SourceView, books: TimeBreakdownView, width: int) -> Line:
    """Return the equation of the time breakdown: `wall 8.45 ms = bricks 8.10 + ▒ inside layers 0.31 + ░ rest of step
    0.04 (0.5 %)`.

    Values are means over recorded steps. The bar has the same signs. Overlapping time is subtracted once (`-
    overlap 0.20`). Without a breakdown, the reason. With little room, the word `wall` is left out, and with less the
    gaps become one sum. Nothing is cut off.
    """
    none = breakdown_text.no_books(source)
    line: Line = ((clean(f"n/a: {none}"), "dim"),) if none else _fitting(books, _recorded_steps(source), width)
    if books.open_us > 0:
        line = join_fitting((line, ((f"a step still runs, {units.duration(books.open_us)}", "dim"),)), width, "   ")
    return line


def _recorded_steps(source: SourceView) -> int:
    """Return the number of steps in the time breakdown, at least 1, so that it can be a divisor."""
    return max(1, source.steps.recorded if source.steps else 1)


def _fitting(books: TimeBreakdownView, steps: int, width: int) -> Line:
    gaps = [(f"{GAP_FILL} {clean(gap.name)}", gap.us) for gap in books.gaps]
    one_sum = [(f"{GAP_FILL} gaps", books.gaps_us)] if gaps else []
    rest = f"{REST_FILL} {breakdown_text.REST}"
    forms = (("wall ", gaps, rest), ("", gaps, rest), ("", gaps, f"{REST_FILL} rest"), ("", one_sum, REST_FILL))
    lines = [_equation(books, steps, *form) for form in forms]
    return next((line for line in lines if width_of(line) <= width), lines[-1])


def _equation(books: TimeBreakdownView, steps: int, wall: str, gaps: Sequence[tuple[str, float]], rest: str) -> Line:
    scale, unit = (1e3, "ms") if books.wall_us / steps >= 1e3 else (1.0, "µs")

    def mean(us: float) -> str:
        return units.number(us / steps / scale)

    suspicious = books.residual_percent is not None and abs(books.residual_percent) > RESIDUAL_BOUND_PERCENT
    spans: list[Span] = [
        (wall, "dim"),
        (f"{mean(books.wall_us)} {unit}", "strong"),
        (" = bricks ", "dim"),
        (mean(books.bricks_us), "strong"),
    ]
    for name, us in gaps:
        spans += [(f" + {name} ", "dim"), (mean(us), "gap")]
    if books.overlap_us:
        spans += [(f" - {breakdown_text.OVERLAP} ", "dim"), (mean(books.overlap_us), "")]
    spans += [
        (f" + {rest} ", "dim"),
        (mean(books.unattributed_us), "warn" if suspicious else "unknown"),
        (f" ({units.percent(books.residual_percent)})", "warn" if suspicious else "dim"),
    ]
    return tuple(spans)
