"""The view of all sources: a list, details of one source, and cbtop's own cost.

Live sources come first. Ended sources can be folded into one row.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.message import Message
from textual.widget import Widget

from cbtop import units
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.text import comparison_text, merge_text, range_text, rate_text, recording_text, source_text
from cbtop.tui.views.base import View
from cbtop.tui.views.baseline import change_role, change_text
from cbtop.tui.views.devices import figure_chart, process_charts
from cbtop.tui.views.figures import figure
from cbtop.tui.widgets.columns import Cells, Column
from cbtop.tui.widgets.curve import Chart, charts
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import BLANK, Line, clean, clip, fit, fit_line, rule
from cbtop.tui.widgets.table import Table
from cbtop.viewmodels.devices import MachineView, ProcessRow
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.sources import ListView, ProcessCost, SourceRow
from cbtop.viewmodels.stall import StallKind

FOLD = ""  # key of the row in the list that folds and unfolds the ended sources
SHOWN = "●"
_LABEL_WIDTH = 10
MAX_COSTS = 3
LEAST_WORDS = 7  # A long list must leave at least this many lines for the details.
_STATE_ROLES = {
    SourceStatus.LIVE: "good",
    SourceStatus.GONE: "bad",
    SourceStatus.FAULTY: "bad",
    StallKind.STALLED: "bad",
    StallKind.SUSPENDED: "warn",
    StallKind.QUIET: "warn",
}


def source_columns(
    row_of: Callable[[str], SourceRow], mark: Callable[[str], str], fold: Callable[[], str], *, is_compared: bool
) -> tuple[Column[str], ...]:
    """Return the columns of a table with a row per source. With `is_compared`, one is the change since the baseline.

    `mark` returns the sign before a source's name, and `fold` the text of the row that folds ended sources.
    """

    def column(
        title: str, width: int, priority: int, cell: Callable[[SourceRow, int], Line], doc: str, align: str = "right",
        time_range: int = 0, max_width: int = 0,
    ) -> Column[str]:  # fmt: skip
        def draw(key: str, width: int) -> Line:
            return BLANK if key == FOLD else cell(row_of(key), width)

        return Column(title, width, priority, draw, doc, align=align, stretch=time_range, max_width=max_width)

    def name(key: str, width: int) -> Line:
        if key == FOLD:
            return ((fold(), "dim"),)
        return ((f"{mark(key)} ", "accent"), (clip(clean(row_of(key).program), width - 2), "strong"))

    since_baseline = column(
        "Δ", 9, 2, lambda row, _: figure(change_text(row.rate_change), change_role(row.rate_change, of_rate=True)),
        "of tokens/s, beside the baseline's (`b`), where chance alone does not explain it: `noise` where it may "
        "(derived)",
    )  # fmt: skip
    return (
        Column("source", 14, 0, name, f"the program; {SHOWN} is the one that every view shows", align="left",
               stretch=3, max_width=40),
        column("model", 10, 9, lambda row, _: figure(clean(row.model or units.NOT_MEASURED)),
               "the model, as the process announces it (static)", "left", 2, 30),
        column("pid", 8, 1, lambda row, _: ((str(row.pid), ""),), "its process"),
        column("host", 8, 8, lambda row, width: ((clip(clean(row.host), width), "dim"),), "where it runs",
               "left", 1, 24),
        column("rank", 6, 10, lambda row, _: figure(merge_text.placed_rank(row), "accent"),
               "which rank of how many, as its launcher says (static)"),
        column("state", 12, 1, _state, "whether it runs and goes on, and for how long it has not", "left", 3, 18),
        column("tokens/s", 9, 2, lambda row, _: figure(_rate(row), "strong"),
               "tokens of the phase shown a second of wall-clock time, in the time shown (derived)"),
        *((since_baseline,) if is_compared else ()),
        column("steps/s", 8, 6, lambda row, _: figure(rate_text.rate(row, row.steps_per_sec)),
               "steps of that phase a second of wall-clock time (derived)"),
        column("lost %", 7, 3, lambda row, _: figure(*_lost(row)),
               "of the records written since the daemon first looked, the part that is lost: overwritten before it "
               "was read, or naming nothing that is known (derived)"),
        column("before attach", 13, 4, lambda row, _: figure(units.count(row.loss.before_attach)),
               "records overwritten before the daemon first looked: no fault of its, and in no other figure"),
        column("lag", 7, 5, lambda row, _: figure(source_text.lag(row)),
               "how old what is shown of it is: while it runs some tenths, at rest up to a second (derived)"),
        column("unread", 7, 14, lambda row, _: figure(units.count(row.loss.unread)),
               "records it had written that the daemon had not read when it last spoke"),
        column("clock", 25, 13, lambda row, _: figure(source_text.clock(row.clock)),
               "how far the clock of its host is from ours, and to within what (derived); – it is the same", "left"),
        column("on", 6, 11, lambda row, _: figure(clean(source_text.on_devices(row))),
               "the GPUs that it is known to be on; cpu: on none", "left", 1, 12),
        column("recording costs", 19, 12, lambda row, _: figure(recording_text.short_overhead(row.overhead)),
               "what profiling costs it, of the time in its steps, and between what that lies (95 %), as it measures "
               "it itself (derived)", "left"),
    )  # fmt: skip


def _state(row: SourceRow, width: int) -> Line:
    if row.stale_s is not None:
        return ((f"STALE {row.stale_s:.0f} s", "warn"),)
    roles = {str(state): role for state, role in _STATE_ROLES.items()}
    return ((clip(clean(source_text.standing(row)), width), roles.get(row.standing, "dim")),)


def _rate(row: SourceRow) -> str:
    return rate_text.rate(row, row.steps.tokens_per_sec if row.steps else None)


def _lost(row: SourceRow) -> tuple[str, str]:
    return units.percent_number(row.loss.lost_percent), "bad strong" if row.loss.lost else ""


class Sources(View):
    """The view of the watched processes. It also shows how complete their data is."""

    title = "Sources"
    section = "sources"
    wants_data = False
    doc = (
        "Every process that is known here: the live ones first, the newest of them on top, and those that have ended "
        "in one row that Enter unfolds. Enter on a process, or < and >, shows it in every view and stays with it; "
        "until then the newest that runs is shown. "
        "Under the list stands the one under the cursor in words, with the reason for each n/a, and its last two "
        "minutes; then what cbtop itself costs: this viewer, and the daemon where that is another process, of one "
        "processor."
    )
    columns_doc = tuple(
        (column.title, column.doc)
        for column in source_columns(lambda _: NotImplemented, lambda _: "", lambda: "", is_compared=True)
    )

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "show it, or unfold"),
    ]

    class SourceChosen(Message):
        """Sent when the user wants to see the source `key` in every view."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def compose(self) -> ComposeResult:
        self._listed = ListView((), 0, lambda _: NotImplemented)
        self._shown: frozenset[str] = frozenset()
        # Whether the list shows each ended source. None means that it shows them only while no process runs.
        self._unfolded: bool | None = None
        self._table: Table[str] = Table(
            self._columns(),
            lambda key: key,
            empty="n/a: nobody keeps a list of the sources here",
            id="sources-table",
        )
        self._words = SourceInWords(id="source-words")
        self._machines: tuple[MachineView, ...] = ()
        self._costs = Costs(id="sources-costs")
        yield self._table
        yield self._words
        yield self._costs

    @property
    def focus_target(self) -> Widget:
        return self._table

    def show_source(self, source: SourceView) -> None:
        self._shown = frozenset((source.key,) if source.merged is None else source.merged.keys)
        if source.listed is not None:
            is_compared, self._listed = self._listed.is_compared, source.listed
            if self._listed.is_compared != is_compared:
                self._table.columns = self._columns()
        self._machines = source.machines
        self._show_rows()
        self._costs.show(self._listed.costs)

    def _columns(self) -> tuple[Column[str], ...]:
        is_compared = self._listed.is_compared
        return source_columns(lambda key: self._listed.row(key), self._mark, self._fold, is_compared=is_compared)

    def _show_rows(self) -> None:
        listed = self._listed
        live, ended = listed.keys[: len(listed.keys) - listed.ended], listed.keys[len(listed.keys) - listed.ended :]
        self._table.show_rows((*live, *((FOLD,) if ended else ()), *(ended if self._is_unfolded else ())))
        self._show_words()

    @property
    def _is_unfolded(self) -> bool:
        return self._listed.ended == len(self._listed.keys) if self._unfolded is None else self._unfolded

    def _show_words(self) -> None:
        key = self._table.current
        processes = (row for machine in self._machines for row in machine.processes if row.source == key)
        self._words.show(self._listed.row(key) if key else None, next(processes, None))
        self._lay_out()

    def on_resize(self, event: Resize) -> None:
        self._lay_out()

    def _lay_out(self) -> None:
        """Set the height of the list of sources. It gets all lines that it needs, if enough lines are left for the
        details.
        """
        room = self.size.height - self._costs.lines - LEAST_WORDS
        if self.size.height:
            least = self.size.height * 3 // 5
            self._table.styles.height = min(1 + max(1, len(self._table.rows)), max(room, least))

    def _mark(self, key: str) -> str:
        return SHOWN if key in self._shown else " "

    def _fold(self) -> str:
        ended = self._listed.keys[len(self._listed.keys) - self._listed.ended :]
        is_inside = not self._is_unfolded and not self._shown.isdisjoint(ended)
        return f"{'▾' if self._is_unfolded else '▸'} {len(ended)} ended{f' {SHOWN}' if is_inside else ''}"

    def on_table_moved(self, event: Table.Moved) -> None:
        self._show_words()

    def action_choose(self) -> None:
        """Show the source under the cursor in every view. On the row of ended sources, fold or unfold them."""
        key = self._table.current
        if key == FOLD:
            self._unfolded = not self._is_unfolded
            self._show_rows()
        elif key is not None:
            self.post_message(self.SourceChosen(key))

    def cells(self) -> Cells:
        """Return the list of all sources as a table, including folded ones."""
        return Cells.of(self._table.columns, self._listed.keys)


class SourceInWords(Drawing):
    """The panel with details of one source. For each figure that is not available, the panel has the reason."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._row: SourceRow | None = None
        self._process: ProcessRow | None = None

    def show(self, row: SourceRow | None, process: ProcessRow | None = None) -> None:
        """Draw the details of the source `row` from now on. `process` has the source's use of the host, if known."""
        self._row, self._process = row, process
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        row = self._row
        if row is None:
            return [rule((("those that have ended", "dim"),), width), ((" Enter folds and unfolds them", "dim"),)]
        who = f"{row.program} {row.pid}@{row.host}"
        lines: list[Line] = [rule(((clean(who), "dim"),), width)]
        for label, text, role in _facts(row):
            first, *rest = textwrap.wrap(clean(text), max(20, width - _LABEL_WIDTH - 2)) or [""]
            lines.append(((f" {fit(clean(label), _LABEL_WIDTH - 1)} ", "dim"), (first, role)))
            lines += [((" " * (_LABEL_WIDTH + 1), ""), (line, role)) for line in rest]
        if len(lines) > height:
            left_out = units.counted(len(lines) - height + 1, "more line")
            lines[height - 1 :] = [((f" … {left_out}, on a taller terminal", "dim"),)]
        drawn = charts(_charts(row, self._process), width, height - len(lines) - 1)
        return [*(fit_line(line, width) for line in lines), *((BLANK, *drawn) if drawn else ())]


def _charts(row: SourceRow, process: ProcessRow | None) -> list[Chart]:
    """Return the source's charts over the last two minutes: rate, step time, and use of the host."""
    phase = clean(row.phase or units.NOT_MEASURED)
    about = f"ms {units.with_article(f'{phase} step')}, mean of each second"
    times_ms = [None if us is None else us / 1e3 for us in row.step_us_history]
    found = [
        figure_chart(f"{row.rate.unit}, {phase}", "accent", row.rate.history, units.number, has_mean=False),
        figure_chart(about, "norm", times_ms, units.number, has_mean=False),
        *(process_charts(process) if process is not None else ()),
    ]
    return [chart for chart in found if any(value is not None for value in chart.values)]


def _facts(row: SourceRow) -> list[tuple[str, str, str]]:
    """Return (label, text, colour role) of each fact about the source. The most important fact comes first."""
    said = [source_text.stall(row.stall) if row.stall else "", row.state_reason, row.activity]
    if row.stale_s is not None:
        said.insert(0, f"{source_text.stale(row.stale_s)}: its daemon does not answer")
    devices, lag = source_text.on_devices(row), source_text.lag(row)
    on = f"on {devices}" if devices not in (units.NOT_MEASURED, units.NONE_THERE) else ""
    who = [row.model or "", merge_text.rank(row.rank, row.world_size), on]
    since = f"{'' if row.window or row.since_s is None else 'since '}{range_text.rates_since(row)}"
    rates = f"{_rate(row)} tokens/s, {rate_text.rate(row, row.steps_per_sec)} steps/s, {since}"
    if row.clock is not None and row.clock.uncertainty_us:
        lag += f", by a clock {source_text.clock(row.clock)} (derived)"
    costs = [recording_text.overhead(row.overhead) if row.overhead else "", recording_text.sample(row.sample_every)]
    facts = [
        ("state", ": ".join((source_text.standing(row), *filter(None, said))), ""),
        ("records", recording_text.losses(row.loss), "bad" if row.loss.lost or row.loss.left_out else ""),
        ("lag", lag if row.state is SourceStatus.LIVE else "", ""),
        ("runs", ", ".join(filter(None, who)), ""),
        (row.phase or "", rates if row.phase else "", ""),
        ("Δ", f"{comparison_text.rate_change(row.rate_change)} (derived)" if row.rate_change else "", ""),
        ("profiling", "; ".join(filter(None, costs)), ""),
        *(("n/a", f"{source_text.SOURCE_FIGURES[one.figure]}: {one.why}", "dim") for one in row.unknown),
    ]
    return [fact for fact in facts if fact[1]]


class Costs(Drawing):
    """Draws the cost of cbtop.

    Each process of cbtop has a line. If there is too little room, all share one line.
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._costs: tuple[ProcessCost, ...] = ()

    def show(self, costs: tuple[ProcessCost, ...]) -> None:
        self._costs = costs
        self.styles.height = self.lines
        self.redraw()

    @property
    def lines(self) -> int:
        """The number of lines that the cost of cbtop needs."""
        return max(1, min(len(self._costs), MAX_COSTS))

    def draw(self, width: int, height: int) -> list[Line]:
        texts = [clean(source_text.process_cost(cost)) for cost in self._costs] or [units.NOT_MEASURED]
        rows = texts if len(texts) <= height else [" · ".join(texts)]
        return [
            fit_line(((" cbtop  " if at == 0 else " " * 8, "dim"), (text, "dim")), width)
            for at, text in enumerate(rows)
        ]
