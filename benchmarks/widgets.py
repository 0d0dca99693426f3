"""Measure the cost of our footer and our table compared with Textual's own. Both are drawn as often and show the
same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.widget import Widget
from textual.widgets import DataTable, Footer, Static

from benchmarks.base import Figure, Ratio
from cbtop.tui.widgets.columns import Column
from cbtop.tui.widgets.footer import KeyFooter
from cbtop.tui.widgets.lines import ROLES, Line
from cbtop.tui.widgets.table import Table

ROWS, COLUMNS = 60, 6
REPEATS = 20
ROUNDS = 5
Row = tuple[str, ...]


class Panes(App[None]):
    """An app that contains the measured widget and two panes.

    Each pane has its own keys. The focus switches between the panes.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = set(ROLES)
    CSS = "\n".join(f".{role} {{ color: white; }}" for role in sorted(ROLES)) + "KeyFooter { height: 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [Binding(key, "bell", f"everywhere {key}") for key in "prq"]

    def __init__(self, widget: Widget) -> None:
        super().__init__()
        self.measured = widget

    def compose(self) -> ComposeResult:
        yield Pane("one", id="one")
        yield OtherPane("other", id="other")
        yield self.measured


class Pane(Static, can_focus=True):
    """A pane of the app that has three keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding(key, "app.bell", f"here {key}") for key in "abc"]


class OtherPane(Static, can_focus=True):
    """A pane of the app that has four keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding(key, "app.bell", f"there {key}") for key in "defg"]


def run() -> list[Figure]:
    return asyncio.run(_run())


async def _run() -> list[Figure]:
    found: dict[str, list[float]] = {"footer": [], "Footer": [], "table": [], "DataTable": []}
    for _ in range(ROUNDS):
        found["footer"].append(await _footer_ms(KeyFooter()))
        found["Footer"].append(await _footer_ms(Footer()))
        columns = [Column(str(at), 8, at, _cell(at), "") for at in range(COLUMNS)]
        table: Table[Row] = Table(columns, lambda row: row[0])
        found["table"].append(await _table_ms(table, table.show_rows))
        data: DataTable[str] = DataTable()
        found["DataTable"].append(await _table_ms(data, partial(_fill, data)))
    figures = []
    for what, ours, theirs in (
        ("footer, keys change with the focus", "footer", "Footer"),
        (f"table {ROWS}×{COLUMNS}, every cell changes", "table", "DataTable"),
    ):
        median = sorted(found[ours])[ROUNDS // 2]
        figures.append(Figure(what, median, "ms CPU", f"Textual's {theirs}", Ratio.of(found[ours], found[theirs])))
    return figures


async def _footer_ms(footer: Widget) -> float:
    app = Panes(footer)
    async with app.run_test(size=(120, 34)) as pilot:
        panes = app.query_one("#one"), app.query_one("#other")
        await pilot.pause()
        begun = time.process_time()
        for turn in range(REPEATS):
            app.set_focus(panes[turn % 2])
            await pilot.pause()
        return 1e3 * (time.process_time() - begun) / REPEATS


async def _table_ms(table: Widget, show: Callable[[list[Row]], None]) -> float:
    app = Panes(table)
    async with app.run_test(size=(120, 70)) as pilot:
        await pilot.pause()
        show(_rows(0))
        await pilot.pause()
        begun = time.process_time()
        for turn in range(1, REPEATS + 1):
            show(_rows(turn))
            await pilot.pause()
        return 1e3 * (time.process_time() - begun) / REPEATS


def _rows(turn: int) -> list[Row]:
    return [(f"row {at}", *(f"{turn * 7 + at + column}.25" for column in range(1, COLUMNS))) for at in range(ROWS)]


def _cell(at: int) -> Callable[[Row, int], Line]:
    return lambda row, width: ((row[at], ""),)


def _fill(table: DataTable[str], rows: list[Row]) -> None:
    """Fill Textual's table as its documentation advises: add rows once, and update single cells afterwards."""
    if not table.columns:
        table.add_columns(*map(str, range(COLUMNS)))
        for row in rows:
            table.add_row(*row)
        return
    for at, row in enumerate(rows):
        for column, text in enumerate(row):
            table.update_cell_at(Coordinate(at, column), text)
