"""Everything known about one brick, with a word for where each number comes from."""

from __future__ import annotations

from cbtop import formatting
from cbtop.protocol.vocabulary import Provenance
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import BLANK, Line, clean, fit, fit_line, rule, width_of
from cbtop.viewmodels.model import BrickRow, CheckRow, RooflinePoint, SourceView

Fact = tuple[str, str]  # what, how much

_FACT_WIDTH = 28
_LABEL_WIDTH = 13


class BrickDetail(Drawing):
    """A panel that follows the cursor of the table beside it."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._brick: BrickRow | None = None
        self._source: SourceView | None = None

    def show_brick(self, brick: BrickRow | None, source: SourceView) -> None:
        self._brick = brick
        self._source = source
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        if self._brick is None or self._source is None:
            return [rule((("no brick", "dim"),), width)]
        return detail_lines(self._brick, self._source, width, roomy=height >= 24)


def detail_lines(brick: BrickRow, source: SourceView, width: int, *, roomy: bool) -> list[Line]:
    """The panel of `brick`; `roomy` puts a blank line between its groups."""
    look = CATEGORY_LOOKS[brick.category]
    title: Line = ((f"{look.glyph} ", look.role), (clean(brick.name), "strong"))
    where = " · ".join(filter(None, (brick.category.display_name, clean(brick.backend))))
    lines = [rule(fit_line(title, min(width_of(title), width - 6)), width, ((where, look.role),))]
    point = next((point for point in source.roofline.points if point.brick == brick.name), None)
    for heading, provenance, facts in (
        ("time", Provenance.MEASURED, _time(brick, derived="" if source.window is None else " derived")),
        ("work", Provenance.DERIVED, _work(brick, point)),
        ("budget", Provenance.STATIC, _budget(brick)),
    ):
        lines += _group(heading, provenance.value, facts, width)
        if roomy:
            lines.append(BLANK)
    checks = [check for check in source.checks if check.brick == brick.name]
    return lines + _checks(brick, checks, width)


def _time(brick: BrickRow, derived: str) -> list[Fact]:
    """In a window the extremes are derived."""
    return [
        ("exclusive", formatting.duration(brick.exclusive_us)),
        ("inclusive", formatting.duration(brick.total_us)),
        ("of the step", formatting.percent(brick.percent)),
        ("per token", formatting.duration(brick.us_per_token)),
        ("calls", formatting.count(brick.count)),
        ("failed", formatting.count(brick.failed)),
        ("avg", formatting.duration(brick.avg_us)),
        ("p50", formatting.duration(brick.p50_us)),
        (f"min{derived}", formatting.duration(brick.min_us)),
        ("p95", formatting.duration(brick.p95_us)),
        (f"max{derived}", formatting.duration(brick.max_us)),
        ("p99", formatting.duration(brick.p99_us)),
    ]


def _work(brick: BrickRow, point: RooflinePoint | None) -> list[Fact]:
    return [
        ("flops", formatting.si(brick.flops, "FLOP")),
        ("GFLOP/s", formatting.number(brick.gflops)),
        ("bytes", formatting.size_bytes(brick.bytes)),
        ("GB/s", formatting.number(brick.gb_per_sec)),
        ("intensity", f"{formatting.number(point.intensity)} FLOP/B" if point else formatting.NOT_MEASURED),
        ("of the roof", _roof(point)),
        ("elements", formatting.count(brick.elements)),
        ("bound by", clean(point.bound) if point else formatting.NOT_MEASURED),
    ]


def _roof(point: RooflinePoint | None) -> str:
    if point is None:
        return formatting.NOT_MEASURED
    return formatting.percent(point.percent_of_roof) + (" ⚠ above" if point.above_roof else "")


def _budget(brick: BrickRow) -> list[Fact]:
    if brick.budget_us_per_token is None:
        return [("budget", "none set")]
    return [
        ("µs/token", formatting.number(brick.budget_us_per_token)),
        ("used", formatting.percent(brick.budget_used_percent)),
    ]


def _group(heading: str, provenance: str, facts: list[Fact], width: int) -> list[Line]:
    across = max(1, min(2 if width < 96 else 3, (width - 2) // _FACT_WIDTH))
    each = (width - 2) // across
    lines: list[Line] = [_heading(heading, provenance, width)]
    for start in range(0, len(facts), across):
        line: Line = ((" ", ""),)
        for label, value in facts[start : start + across]:
            role = "faint" if value == formatting.NOT_MEASURED else ""
            line += ((" " + fit(label, _LABEL_WIDTH), "dim"), (fit(value, each - _LABEL_WIDTH - 1), role))
        lines.append(line)
    return lines


def _heading(heading: str, provenance: str, width: int) -> Line:
    return ((" " + heading, "accent"), (provenance.rjust(width - len(heading) - 2), "faint"))


def _checks(brick: BrickRow, checks: list[CheckRow], width: int) -> list[Line]:
    if not checks:
        summary = (
            f"✓{brick.checks_passed} ✗{brick.checks_failed}" if brick.checks_passed + brick.checks_failed else "none"
        )
        return [_heading("checks", Provenance.MEASURED.value, width), (("  " + summary, "dim"),)]
    lines: list[Line] = [_heading("checks", Provenance.MEASURED.value, width)]
    for check in checks:
        role, glyph = ("good", "✓") if check.passed else ("bad", "✗")
        error = f"max error {formatting.scientific(check.max_error)} of {formatting.scientific(check.tolerance)}"
        lines.append((("  " + glyph + " ", role), (clean(check.assertion), ""), ("  " + error, "dim")))
    return [fit_line(line, width) for line in lines]
