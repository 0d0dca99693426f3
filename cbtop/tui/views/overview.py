"""The first view: speed, the time breakdown, slow parts with their causes, and the state of the machine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.message import Message

from cbtop import units
from cbtop.protocol.vocabulary import DeviceKind, is_warm_up
from cbtop.text import range_text, rate_text, recording_text, roof_text, serving_text, source_text
from cbtop.tui.views.base import SourceDrawing, View
from cbtop.tui.views.baseline import baseline_lines
from cbtop.tui.views.books import beside_books, books_equation, books_parts, books_rule
from cbtop.tui.views.brick_columns import LIMIT_TITLE, LIMIT_WIDTH, limit_cell
from cbtop.tui.views.bricks import Bricks
from cbtop.tui.views.devices import Devices, busy_curve, machine_charts
from cbtop.tui.views.figures import figure
from cbtop.tui.views.layer_map import MAX_BAR_HEIGHT, SMALL_STRIP, how_many, layer_at, slowest_line, whole_layers
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.views.once_a_second import Pictures
from cbtop.tui.views.sampled import most_sampled_lines, sampled_detail, sampled_lines, shown_places
from cbtop.tui.views.training import legend, lines_below, training_lines
from cbtop.tui.views.verdicts import most_verdict_lines, verdict_lines, verdict_of_each_line, whole_verdict
from cbtop.tui.widgets.bars import SEAM, bar, stacked
from cbtop.tui.widgets.columns import Cells, Column, head_line, place, row_line
from cbtop.tui.widgets.curve import LEAST_CHART, USUAL_CHART, Chart, charts
from cbtop.tui.widgets.lines import BLANK, Line, clean, clip, fit_line, join_fitting, restyle, rule, width_of
from cbtop.tui.widgets.parts import GAP, ScreenPart, beside, even_widths, linked_lines
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.devices import DeviceRow
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.steps import StepsView
from cbtop.viewmodels.verdict import About, Subject

# In a view of at least this width in cells, verdicts and bricks are to the right of the other parts.
TWO_COLUMNS = 160
_COSTLIEST = 3  # A view with _ROOMY lines shows at least this many of the costliest bricks.
_WORST = 3  # At most this many verdicts get their lines before the other parts of the view.
# A view with at least the first number of lines shows verdicts, in one line each. With the second number of lines,
# the view also shows their advice.
_ROOMY, _ROOM_FOR_ADVICE = 17, 26
_TWO_CHARTS = 100  # In a view of at least this width in cells, there are two charts.
# A training step needs this many lines: a rule, a bar, and two lines with the shares of eight parts.
_LEAST_TRAINING = 4
_RATE_ROLE, _TIME_ROLE = "accent", "norm"
_BUSY_WIDTH = 16
# In a view of at least the first width in cells, each brick has its limit, in the second width.
_ROOM_FOR_LIMITS, _LIMIT_CELLS = 76, LIMIT_WIDTH + 1
_LAYERS, _SAMPLED = "layers", "sampled"
# Parts of the view with rows. Other rows belong to verdicts.
_PARTS = ("phases", _LAYERS, "bricks", "devices", _SAMPLED)
_Draw = Callable[[SourceView, int, int], list[Line]]
_Links = Callable[[SourceView, int, int], Sequence[Hashable]]

PHASE_COLUMNS: tuple[Column[StepsView], ...] = (
    Column("phase", 8, 0, lambda row, _: ((clean(row.phase), "strong"),), "what the step is", align="left",
           stretch=1, max_width=20),
    Column("tokens/s", 9, 1, lambda row, _: figure(units.number(row.tokens_per_sec), "strong good"),
           "tokens of wall-clock time: pauses between steps count"),
    Column("no pauses", 9, 6, lambda row, _: figure(units.number(row.tokens_per_sec_in_steps)),
           "tokens/s of the time in which steps ran, without the pauses between them"),
    Column("p50 ms/tok", 10, 2, lambda row, _: figure(units.milliseconds(row.us_per_token_p50), "strong"),
           "half of the steps took at most this for a token; n/a if they differ in tokens or not all report them"),
    Column("p99", 8, 3, lambda row, _: figure(units.milliseconds(row.us_per_token_p99)),
           "99 of 100 steps took at most this for a token"),
    Column("max step", 9, 5, lambda row, _: figure(units.duration(row.max_us)), "the longest step"),
    Column("steps", 9, 4, lambda row, _: figure(units.count(row.count)), "steps that have ended"),
    Column("tokens", 9, 7, lambda row, _: figure(units.count(row.known_tokens)), "tokens of these steps"),
)  # fmt: skip


COLUMNS_WITHOUT_TOKENS: tuple[Column[StepsView], ...] = (
    PHASE_COLUMNS[0],
    Column("steps/s", 9, 1, lambda row, _: figure(units.number(row.steps_per_sec), "strong good"),
           "steps of wall-clock time: pauses between steps count"),
    Column("samples/s", 9, 2, lambda row, _: figure(units.number(row.samples_per_sec)),
           "sequences, such as pictures, of wall-clock time"),
    Column("p50 ms/step", 11, 3, lambda row, _: figure(units.milliseconds(row.p50_us), "strong"),
           "half of the steps took at most this"),
    Column("p99", 8, 4, lambda row, _: figure(units.milliseconds(row.p99_us)),
           "99 of 100 steps took at most this"),
    *PHASE_COLUMNS[5:7],
    Column("tokens/s", 9, 7, lambda row, _: figure(units.number(row.tokens_per_sec)), "not known"),
)  # fmt: skip


def phase_columns(phases: Sequence[StepsView]) -> tuple[Column[StepsView], ...]:
    """Return the columns of the table of phases. Tokens are left out if no phase has tokens."""
    return PHASE_COLUMNS if not phases or any(steps.has_tokens for steps in phases) else COLUMNS_WITHOUT_TOKENS


class Overview(View, can_focus=True):
    """The overview: speed, time breakdown, verdicts and devices on one screen."""

    title = "Overview"
    doc = (
        "tokens/s (steps/s of a model without tokens) of the last two minutes, every phase, one step as a bar that "
        "closes and beside it the time between steps, the worst verdicts with what mending them would give, every "
        "layer as a bar, the costliest bricks and the devices, with the bytes that bricks declare over wall-clock "
        "time, for no counter of memory is read; with a baseline (`b`) also tokens/s and a step beside those of "
        "then. Rates, shares, what lies between steps and what mending would give are derived of what was measured. "
        "j and k choose a row: a verdict, a phase, a layer, a brick, a device, or sampled functions. Enter or a "
        "click opens its evidence in another view, or all sampled functions, and Esc comes back. A larger terminal "
        "shows more of it; the views behind show all."
    )
    columns_doc = tuple((column.title, column.doc) for column in (*PHASE_COLUMNS, *COLUMNS_WITHOUT_TOKENS[1:4]))

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "move(1)", "choose", key_display="j k"),
        Binding("k,up", "move(-1)", "row before", show=False),
        Binding("enter", "open", "open its evidence", tooltip="open"),
        Binding("escape", "close", "close the sampled functions", show=False),
    ]

    class EvidenceOpened(Message):
        """Sent when the user wants to see the evidence of a row of the overview. `verdict` is the id of a verdict or
        the name of another part.
        """

        def __init__(self, subject: Subject, verdict: str = "") -> None:
            super().__init__()
            self.subject = subject
            self.verdict = verdict

    def compose(self) -> ComposeResult:
        self._drawing = OverviewDrawing(id="overview-drawing")
        yield self._drawing

    def show_source(self, source: SourceView) -> None:
        self._drawing.show_source(source)

    def let_go(self) -> None:
        self._drawing.let_go()

    def action_move(self, rows: int) -> None:
        self._drawing.move(rows)

    def action_open(self) -> None:
        """Open the row under the cursor. Without a cursor, put the cursor on the worst verdict."""
        if (row := self._drawing.current) is None:
            self._drawing.move(0)
        elif row.part == _SAMPLED:
            self._drawing.open_sampled(True)
        else:
            self.post_message(self.EvidenceOpened(row.subject, row.part))

    def action_close(self) -> None:
        """Close the list of sampled functions."""
        self._drawing.open_sampled(False)

    def cells(self) -> Cells:
        """Return the phases of the source as a table."""
        phases = self.source.phases if self.source else ()
        return Cells.of(phase_columns(phases), phases)


@dataclass(frozen=True, slots=True)
class OverviewRow:
    """A row of the overview that the user can open. `part` is the part with the row, or the id of a verdict."""

    part: str
    subject: Subject


@dataclass(frozen=True, slots=True)
class _Pane:
    """One column of the overview: its lines, its first cell and its width. Each line comes with its row, or None."""

    lines: Sequence[tuple[Line, Hashable]]
    begin: int
    width: int


class OverviewDrawing(SourceDrawing):
    """The whole overview, drawn by one widget. Its cursor is on one of the rows that the user can open."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._pictures = Pictures()
        self._panes: Sequence[_Pane] = ()
        # The rows that the user can open, from top to bottom, the left column first.
        self.rows: list[OverviewRow] = []
        self._cursor: OverviewRow | None = None
        self._shows_sampled = False  # whether the sampled functions are shown instead of the overview

    def open_sampled(self, is_open: bool) -> None:
        """Show the sampled functions instead of the overview, or the overview again."""
        self._shows_sampled = is_open
        self.redraw()

    def let_go(self) -> None:
        """Drop the cached pictures of the previous moment."""
        self._pictures.let_go()

    @property
    def current(self) -> OverviewRow | None:
        """The row of the overview under the cursor, or None without a cursor."""
        return self._cursor if self._cursor in self.rows else None

    def move(self, rows: int) -> None:
        """Move the cursor by `rows` rows. Without a cursor, put it on the worst verdict, or on the first row."""
        known = self.rows
        if not known:
            return
        if self.current is None:
            self._cursor = next((row for row in known if row.part not in _PARTS), known[0])
        else:
            self._cursor = known[max(0, min(len(known) - 1, known.index(self.current) + rows))]
        self.redraw()

    def on_click(self, event: Click) -> None:
        """Open the clicked row. In the bars of layers, open the layer of the clicked bar."""
        for pane in self._panes:
            x = event.x - pane.begin
            if not (0 <= x < pane.width and event.y < len(pane.lines)):
                continue
            row = pane.lines[event.y][1]
            if not isinstance(row, OverviewRow):
                continue
            layers = self._source.layer_times if self._source else None
            if row.part == _LAYERS and layers is not None and (layer := layer_at(layers, pane.width, x)) is not None:
                self.post_message(Overview.EvidenceOpened(Subject(About.LAYER, layer.name, layer.id)))
            elif row.part == _SAMPLED:
                self._shows_sampled = True
            else:
                self.post_message(Overview.EvidenceOpened(row.subject, row.part))
            self._cursor = row
            self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        if self._source is None:
            return []
        if self._shows_sampled:
            self._panes, self.rows = (), []
            return sampled_detail(self._source, width)[:height]
        self._pictures.begin(self._source)
        panes = self._drawn(self._source, width, height)
        links = [link for pane in panes for _, link in pane.lines]
        self.rows = list(dict.fromkeys(link for link in links if isinstance(link, OverviewRow)))
        current = self.current
        self._panes = [_with_whole_verdict(pane, current, self._source) for pane in panes] if current else panes
        drawn = [
            [_under_cursor(line, pane.width) if current and link == current else line for line, link in pane.lines]
            for pane in self._panes
        ]
        return beside(drawn, [pane.width for pane in self._panes])

    def _drawn(self, source: SourceView, width: int, height: int) -> Sequence[_Pane]:
        """Draw the parts of the overview in one column, or in two columns if the view is wide."""
        pictures = self._pictures
        found = len(source.verdicts)
        worst = max(2, 1 + min(found, _WORST) * (2 if height >= _ROOM_FOR_ADVICE else 1)) if height >= _ROOMY else 2

        def part(draw: _Draw, least: int, most: int, links: _Links | None = None) -> ScreenPart:
            return ScreenPart(partial(draw, source), least, most, partial(links, source) if links else None)

        is_known = bool(source.rate.history)
        speed = part(_speed, 4, height) if is_known else part(_speed, 2, 2)
        cost = part(_cost, 1, 1)
        phase_rows = len(_shown_phases(source))
        phases = part(_phases, phase_rows + (height >= _ROOMY), 1 + phase_rows, _phase_links)
        left = width if width < TWO_COLUMNS else width * 3 // 5
        right = width if width < TWO_COLUMNS else width - left - 2
        step = part(_step, 2, 4)
        if source.training is not None and source.training.parts:
            most = 2 + len(legend(source.training, left)) + len(lines_below(source, source.training, left))
            step = part(_training, min(most, _LEAST_TRAINING) if height >= _ROOMY else 2, most)
        served = part(_served, 1, 2 if source.serving else 0)
        sampled = part(sampled_lines, len(shown_places(source)), most_sampled_lines(source), _sampled_links)
        verdicts = part(verdict_lines, worst, most_verdict_lines(source, right), _verdict_links)
        compared = len(baseline_lines(source.baseline, left))
        since = part(_baseline, max(1, min(compared, 2)), compared)
        known = pictures.drawn("layers known", lambda: _bricks_in_layers(source))

        layers = _each_second(pictures, part(_layers, 2, 0 if known is None else 6, _layer_links), "layers")
        count = pictures.drawn("bricks known", lambda: len(source.bricks))
        shown = min(count, _COSTLIEST if height >= _ROOMY else 1)
        bricks = _each_second(pictures, part(_bricks, 1 + shown, 1 + count if count else 0, _brick_links), "bricks")
        count = _device_count(source)
        moved = pictures.drawn("moved", lambda: _moved(source))
        devices = part(partial(_devices, moved), 2, 1 + count if count else 0, _device_links)
        if width < TWO_COLUMNS:
            order = (speed, phases, served, since, step, sampled, verdicts, layers, bricks, devices, cost)
            by_rank = (phases, step, bricks, served, verdicts, since, speed, cost, sampled, layers, devices)
            return [_Pane(linked_lines(order, by_rank, width, height), 0, width)]
        # The layers get their lines before the curves, because bars for each brick are more useful than a high curve.
        if known is not None:
            bars = 3 + MAX_BAR_HEIGHT + SMALL_STRIP * (1 + known)
            layers = replace(layers, most=bars)
            rest = sum(each.most for each in (phases, served, since, step, sampled, layers))
            speed = replace(speed, most=min(speed.most, max(USUAL_CHART, height - rest)))
        over = (speed, phases, served, since, step, sampled, layers)
        first = linked_lines(over, (phases, step, served, since, speed, sampled, layers), left, height)
        first_of = verdicts, bricks, cost, devices
        room = height - sum(each.most for each in first_of)
        curves = [chart for machine in source.machines for chart in machine_charts(machine)]
        meanwhile = ScreenPart(
            lambda width, height: charts(curves, width, height), LEAST_CHART, room if curves else 0
        )
        aside = verdicts, bricks, devices, meanwhile, cost
        second = linked_lines(aside, (*first_of, meanwhile), right, height)
        return [_Pane(first, 0, left), _Pane(second, left + len(GAP), right)]


def _each_second(pictures: Pictures, part: ScreenPart, name: str) -> ScreenPart:
    """Return `part` with lines and links that are made once a second. The verdicts need the same figures then."""
    links = part.links
    assert links is not None
    return ScreenPart(
        lambda width, height: pictures.drawn((name, width, height), lambda: part.draw(width, height)),
        part.least,
        part.most,
        lambda width, height: pictures.drawn((name, "links", width, height), lambda: links(width, height)),
    )


def _with_whole_verdict(pane: _Pane, current: OverviewRow, source: SourceView) -> _Pane:
    """Return the column with the complete text of the verdict under the cursor. It covers the lines below it, so that
    no other line moves.
    """
    at = [number for number, (_, link) in enumerate(pane.lines) if link == current]
    verdict = next((one for one in source.verdicts if (one.id, one.about) == (current.part, current.subject)), None)
    if verdict is None or not at:
        return pane
    whole = [(line, current) for line in whole_verdict(verdict, pane.width)][: len(pane.lines)]
    if len(at) >= len(whole):
        return pane
    first = min(at[0], len(pane.lines) - len(whole))
    return replace(pane, lines=[*pane.lines[:first], *whole, *pane.lines[first + len(whole) :]])


def _under_cursor(line: Line, width: int) -> Line:
    """Return the line with the colour of the cursor, and with the cursor's mark if its first cell is blank."""
    (text, role), *rest = fit_line(line, width)
    marked: Line = (("▎", "accent"), (text[1:], role)) if text.startswith(" ") else ((text, role),)
    return restyle((*marked, *rest), "cursor")


def _phase_links(source: SourceView, width: int, height: int) -> list[OverviewRow | None]:
    rows = [OverviewRow("phases", Subject(About.STEPS, steps.phase)) for steps in _phases_in_order(source)]
    return list(rows) if height <= len(rows) else [None, *rows]


def _sampled_links(source: SourceView, width: int, height: int) -> list[OverviewRow | None]:
    """Return the list of sampled functions for each line about them."""
    rows = [OverviewRow(_SAMPLED, Subject(About.STEPS, place.place)) for place in shown_places(source)[:1]]
    return [*rows * height]


def _verdict_links(source: SourceView, width: int, height: int) -> list[OverviewRow | None]:
    found = verdict_of_each_line(source, width, height)
    return [None if verdict is None else OverviewRow(verdict.id, verdict.about) for verdict in found]


def _layer_links(source: SourceView, width: int, height: int) -> list[OverviewRow | None]:
    """Return the slowest layer for each line about layers except their rule."""
    layers = source.layer_times
    row = (layers.slowest or layers.rows[0]) if layers else None
    link = None if row is None else OverviewRow(_LAYERS, Subject(About.LAYER, row.name, row.id))
    return [link] * height if height <= 3 else [None, *[link] * (height - 1)]


def _brick_links(source: SourceView, width: int, height: int) -> list[OverviewRow | None]:
    shown = source.bricks[: height - 1]
    return [None, *(OverviewRow("bricks", Subject(About.BRICK, row.name)) for row in shown)]


def _device_links(source: SourceView, width: int, height: int) -> list[OverviewRow | None]:
    rows = [row for machine in source.machines for row in machine.devices]
    return [None, *(OverviewRow("devices", Subject(About.DEVICE, row.label)) for row in rows[: height - 1])]


def _speed(source: SourceView, width: int, height: int) -> list[Line]:
    """Return a chart of tokens/s (or steps/s) over the last two minutes.

    If there is room, a chart of step times is added.
    """
    phase = clean(source.phase or units.NOT_MEASURED)
    rate = source.rate
    now: Line = (
        (rate_text.rate(source, rate.per_sec), "strong good"),
        (f", {range_text.shown_time(source)}", "dim"),
    )
    is_alone = width < _TWO_CHARTS or not any(source.step_us_history)
    charts = [Chart(f"{rate.unit}, {phase}", [now], rate.history, _RATE_ROLE, units.number)]
    if not is_alone:
        p50 = units.milliseconds(source.steps.p50_us if source.steps else None)
        times_ms = [None if us is None else us / 1e3 for us in source.step_us_history]
        about = f"ms {units.with_article(f'{phase} step')}, mean of each second"
        charts.append(Chart(about, [((p50, "strong"), (" p50", "dim"))], times_ms, _TIME_ROLE, units.number))
    widths = even_widths(width, len(charts))
    return beside([chart.draw(each, height) for chart, each in zip(charts, widths, strict=True)], widths)


def _shown_phases(source: SourceView) -> list[StepsView]:
    """Return the shown phase, and all other phases that are no warm-up."""
    return [steps for steps in source.phases if steps.phase == source.phase or not is_warm_up(steps.phase)]


def _phases_in_order(source: SourceView) -> list[StepsView]:
    return sorted(_shown_phases(source), key=lambda steps: steps.phase != source.phase)


def _phases(source: SourceView, width: int, height: int) -> list[Line]:
    """Return a line for each phase. The shown phase comes first."""
    rows = _phases_in_order(source)
    placed = place(phase_columns(rows), width - 2)
    # One phase needs no mark of the shown phase. It would look like a cursor.
    marks = ["▸" if len(rows) > 1 and steps.phase == source.phase else " " for steps in rows]
    lines: list[Line] = [((mark, "accent"), *row_line(placed, row)) for mark, row in zip(marks, rows, strict=True)]
    return lines if height <= len(rows) else [((" ", ""), *head_line(placed, "", descending=True)), *lines]


def _served(source: SourceView, width: int, height: int) -> list[Line]:
    """Return a line with the latencies and the load of an engine, and a line with the parts of its time."""
    texts = serving_text.lines(source.serving) if source.serving else []
    return [(("  ", ""), (clip(clean(text), width - 2), "")) for text in texts[:height]]


def _baseline(source: SourceView, width: int, height: int) -> list[Line]:
    return baseline_lines(source.baseline, width)


def _step(source: SourceView, width: int, height: int) -> list[Line]:
    """Return a step as a bar and as an equation. The rule above the bar shows the time between steps."""
    if source.books is None:
        return [rule((("one step", "dim"),), width), (("  n/a: no step has ended yet", "dim"),)]
    parts = books_parts(source)
    labelled: Line = (("  ", ""), *stacked(parts, width - 4))
    equation: Line = (("  ", ""), *books_equation(source, source.books, width - 2))
    if height <= 2:  # With only two lines, notes on the time breakdown are more important than its bar.
        return [books_rule(source, "one step", width) if beside_books(source) else labelled, equation]
    bare: Line = tuple((text if set(text) <= set("▒░") else _without_label(text), role) for text, role in labelled)
    return [books_rule(source, "one step", width), *([labelled, bare][: height - 2]), equation]


def _training(source: SourceView, width: int, height: int) -> list[Line]:
    """Return a training step as a bar, followed by the shares of its parts."""
    return training_lines(source, source.training, width, height) if source.training else []


def _without_label(text: str) -> str:
    return (SEAM if text.startswith(SEAM) else " ") + " " * (cell_len(text) - 1)


def _bricks_in_layers(source: SourceView) -> int | None:
    """Return how many different bricks run in layers, or None without layers."""
    return None if source.layer_times is None else len(source.layer_times.bricks)


def _layers(source: SourceView, width: int, height: int) -> list[Line]:
    """Return a bar for each layer, and a sentence about the slowest layer."""
    layers = source.layer_times
    if layers is None:
        return []
    title: Line = ((how_many(layers), "dim"),)
    if height <= 3:  # With only three lines, the marks above the bars are more important than a rule.
        return [slowest_line(layers, width), *whole_layers(layers, width, height - 1)]
    return [rule(title, width), slowest_line(layers, width), *whole_layers(layers, width, height - 2)]


def _bricks(source: SourceView, width: int, height: int) -> list[Line]:
    """Return one line for each of the bricks that take the most time."""
    if not source.bricks:
        return []
    largest = max(row.percent or 0.0 for row in source.bricks) or 1.0
    longest = min(max(24, width * 2 // 5), max(len(row.name) for row in source.bricks))
    shown = source.bricks[: height - 1]
    more = len(source.bricks) - len(shown)
    has_limits = width >= _ROOM_FOR_LIMITS and roof_text.has_limits(source.bricks)
    limits: list[Line] = [BLANK] * len(shown)
    title = f"the costliest bricks: share, time {_time_of(shown[0])[1] if shown else ''}"
    if has_limits:
        title += f", {LIMIT_TITLE}"
    head = rule(((title, "dim"),), width, ((f"{more} more: {Bricks.title}", "faint"),) if more else BLANK)
    if has_limits:
        width -= _LIMIT_CELLS
        limits = [fit_line((("  ", ""), *limit_cell(row)), _LIMIT_CELLS) for row in shown]
    lines = [(*_brick(row, longest, largest, width), *limit) for row, limit in zip(shown, limits, strict=True)]
    return [head, *lines]


def _brick(row: BrickRow, longest: int, largest: float, width: int) -> Line:
    look = CATEGORY_LOOKS[row.category]
    name = fit_line(((f"  {look.glyph} ", look.role), (clean(row.name), "strong")), longest + 4)
    figures: Line = (
        (f"  {units.percent(row.percent):>8}", ""),
        (f"  {units.duration(_time_of(row)[0]):>9}", ""),
    )
    room = max(4, width - width_of(name) - width_of(figures) - 3)
    fraction = None if row.percent is None else row.percent / largest
    return (*name, (" ", ""), *bar(fraction, room, look.role), *figures)


def _time_of(row: BrickRow) -> tuple[float | None, str]:
    """Return the time (µs) of a brick, and whether this is per token or per call.

    It is exclusive, because the share of the wall time is exclusive, too.
    """
    if row.exclusive_us_per_token is None:
        return row.avg_exclusive_us, "a call"
    return row.exclusive_us_per_token, "a token"


def _device_count(source: SourceView) -> int:
    return sum(len(machine.devices) for machine in source.machines)


def _devices(moved: Line, source: SourceView, width: int, height: int) -> list[Line]:
    """Return a line for each device. If not all devices fit, the last line has the number of the missing devices.

    `moved` is the text about the memory bandwidth of the bricks.
    """
    rows = [row for machine in source.machines for row in machine.devices]
    if not rows:
        return []
    shown = rows[: height - 1]
    left_out = len(rows) - len(shown)
    more: Line = ((f"{left_out} more: {Devices.title}", "faint"),) if left_out else BLANK
    return [rule((("devices", "dim"),), width, more), *(_device(row, source, moved, width) for row in shown)]


def _device(row: DeviceRow, source: SourceView, moved: Line, width: int) -> Line:
    device = row.device
    is_cpu = device.kind is DeviceKind.CPU
    label: Line = ((f"  {'CPU' if is_cpu else f'GPU {clean(row.label)}'}".ljust(8), "accent"),)
    busy: Line = ((f"{units.percent(device.utilization_percent):>8}", "strong"), (" busy", "dim"))
    parts: list[Line] = [(*label, *busy_curve(row.busy_percent, _BUSY_WIDTH), *busy)]
    if device.memory_used_bytes is not None:
        of = units.size_bytes(device.memory_total_bytes)
        parts.append(((units.size_bytes(device.memory_used_bytes), ""), (f" of {of}", "dim")))
    if is_cpu and not source.gpus:
        parts.append(moved)
    if row.watts is not None:
        parts.append(((f"{units.whole(row.watts)} W", ""), *_of(device.power_limit_watts, "W")))
    if device.clock_mhz is not None:
        parts.append(((f"{units.whole(device.clock_mhz)} MHz", ""), *_of(device.clock_max_mhz, "MHz")))
    if device.slowed_by:
        parts.append(((f"slowed by {clean(device.slowed_by)}", "strong warn"),))
    if row.is_stale:
        parts.append(((source_text.stale_sampler(row.sampler, row.age_s), "bad"),))
    return join_fitting(parts, width, " · ")


def _moved(source: SourceView) -> Line:
    """Return the memory bandwidth of the source's bricks as text, derived from their declared bytes.

    It is not measured, because reading the machine's memory counters requires privileges.
    """
    if source.moved_gb_per_sec is None:
        is_declared = any(row.bytes is not None for row in source.bricks)
        why = "not every step is recorded" if is_declared else "no brick declares its bytes"
        return ((f"GB/s n/a: {why}", "dim"),)
    return ((f"{units.number(source.moved_gb_per_sec)} GB/s", ""), (" moved by bricks (derived)", "dim"))


def _of(limit: float | None, unit: str) -> Line:
    return () if limit is None else ((f" of {units.whole(limit)} {unit}", "dim"),)


def _cost(source: SourceView, width: int, height: int) -> list[Line]:
    """Return a line with lost records, the cost of recording (if measured), and cbtop's own cost."""
    loss = source.loss
    records: Line = ((units.count(loss.received), ""), (" records, ", "dim"))
    records += ((f"{units.count(loss.lost)} lost", "strong bad" if loss.lost else "good"),)
    parts: list[Line] = [(("  cbtop: ", "dim"), *records)]
    if few := recording_text.inside_of_all(source):
        parts.append(((few, "warn"),))
    if ahead := recording_text.ahead(source):
        parts.append(((ahead, "warn"),))
    if source.warm_up is not None:
        parts.append(((recording_text.warm_up(source.warm_up), "dim"),))
    if source.overhead is not None:
        parts.append(((recording_text.overhead(source.overhead), ""),))
    for cost in source.listed.costs if source.listed else ():
        if cost.cpu_percent is not None:
            percent = units.percent(cost.cpu_percent)
            parts.append(((f"{clean(cost.name)} ", "dim"), (percent, ""), (" of a core", "dim")))
    return [join_fitting(parts, width, " · ")]
