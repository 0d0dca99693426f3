"""Export the shown view to a file in the working directory."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets._toast import Toast

from cbtop.errors import CbtopError
from cbtop.reports import REPORTS, VIEWS
from cbtop.tui.errand import READ_S
from cbtop.tui.views.base import View
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.widgets.columns import Cells
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import Line, clean
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.time_travel import ReplayView

# Matches a number on the screen that has four digits or more. Commas separate groups of three digits.
_GROUPED = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")

# The export formats, each as (key, file extension, description).
KINDS = {
    "s": ("svg", "the picture on the screen"),
    "j": ("json", "all that is known of the process, as the JSON report has it"),
    "c": ("csv", "the table, with the columns that there is no room for"),
    "m": ("md", "the table, in Markdown"),
    "t": ("txt", "this part of the text report"),
}


class ExportScreen(ModalScreen[str | None]):
    """Asks the user for a format. The result is a file extension, or None if the user cancels."""

    AUTO_FOCUS = None
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key, f"dismiss('{ending}')", f"export as {ending}") for key, (ending, _) in KINDS.items()),
        Binding("escape,q,e", "dismiss(None)", "no export"),
    ]

    def compose(self) -> ComposeResult:
        yield Kinds(id="export-kinds")


class Kinds(Drawing):
    """The list of export formats with their keys."""

    def draw(self, width: int, height: int) -> list[Line]:
        rows: list[Line] = [
            (("  ", ""), (key, "key"), (f"  {ending.ljust(6)}", "strong"), (what, "dim"))
            for key, (ending, what) in KINDS.items()
        ]
        return [(("  export this view as", "accent"),), *rows, (("  ", ""), ("esc", "key"), ("  nothing", "dim"))]


def ask_and_export(app: App[int], view: View, source: SourceView, replay: ReplayView | None) -> None:
    """Ask for a format, then export `view` with the current data of `source`.

    Toasts are not on the picture, because they tell of earlier events.
    """
    toasts = app.screen.query(Toast)
    if not any(toast.visible for toast in toasts):
        _ask_and_export(app, view, source.held(), replay)
        return
    toasts.set(visible=False)

    def ask() -> None:
        _ask_and_export(app, view, source.held(), replay)
        toasts.set(visible=True)

    app.call_after_refresh(ask)


def _ask_and_export(app: App[int], view: View, source: SourceView, replay: ReplayView | None) -> None:
    picture = app.export_screenshot(title=f"cbtop {view.title}")

    def export(ending: str | None) -> None:
        if ending is None:
            return
        try:
            path = write_export(ending, view, source, replay, picture)
        except (CbtopError, OSError) as error:
            app.notify(clean(str(error)), severity="error", markup=False)
        else:
            app.notify(clean(str(path)), title=f"{view.title} is in", timeout=READ_S, markup=False)

    app.push_screen(ExportScreen(), export)


def write_export(ending: str, view: View, source: SourceView, replay: ReplayView | None, picture: str) -> Path:
    """Write `view` of `source` to a new file and return its path.

    Raises CbtopError if the format requires a table.
    """
    sections = [view.section] if view.section in VIEWS else list(VIEWS)
    texts: dict[str, Callable[[], str]] = {
        "svg": lambda: picture,
        "json": lambda: REPORTS["json"]([source], sections, replay) + "\n",
        "csv": lambda: as_csv(_cells(view)),
        "md": lambda: _cells(view).markdown(),
        "txt": lambda: REPORTS["text"]([source], sections, replay) + "\n",
    }
    text = texts[ending]()
    stem = f"cbtop-{view.title.lower()}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        path = Path.cwd() / f"{stem}{f'-{number}' if number > 1 else ''}.{ending}"
        try:
            with path.open("x", encoding="utf-8", newline="") as file:
                file.write(text)
        except FileExistsError:
            number += 1
        else:
            return path


def as_csv(cells: Cells) -> str:
    """Return the cells as CSV. Numbers keep their displayed digits, but without commas.

    The glyphs before names are removed.
    """
    written = io.StringIO()
    csv.writer(written).writerows([cells.head, *([_as_read(cell) for cell in row] for row in cells.rows)])
    return written.getvalue()


def _as_read(cell: str) -> str:
    return cell.replace(",", "") if _GROUPED.fullmatch(cell) else cell.removeprefix(_glyph_of(cell))


def _glyph_of(cell: str) -> str:
    return next((f"{look.glyph} " for look in CATEGORY_LOOKS.values() if cell.startswith(f"{look.glyph} ")), "")


def _cells(view: View) -> Cells:
    if (cells := view.cells()) is None:
        raise CbtopError(f"{view.title} has no table: export it as svg, json or txt")
    return cells
