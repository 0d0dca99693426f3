"""The timeline view: when each record of the last steps ran, and the gaps between records.

The user can zoom and pan.
"""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.widget import Widget

from cbtop.tui.views.base import View
from cbtop.tui.views.timeline_map import TimelineMap
from cbtop.tui.widgets.columns import Cells
from cbtop.viewmodels.source import SourceView


class Timeline(View):
    """The view that shows the last steps of a process record by record."""

    title = "Timeline"
    section = "timeline"
    needs_records = True
    doc = (
        "The last steps, record by record, on a time axis that begins with the newest step recorded whole. Steps, "
        "layers and bricks lie over each other; what ran at the same time lies on lanes of its own, for which "
        "thread ran it is not recorded. Dots are gaps, by their names; the line over each lane says what the time "
        "in sight is, and adds up. Blocks too short for a cell are counted: a number, or ▒ where there is no "
        "room for it. It follows the newest step, once a second, until a key moves it or a click selects a block. "
        "Then it holds still. "
        "Records are received while this view is open, and no others. In the room under the lanes stand the "
        "longest blocks in sight of the row of the cursor, and on a wide terminal their sums and how long each of "
        "the last steps took. With a baseline (`b`) the step stands beside the median one of then, and so does "
        "the block under the cursor (derived)."
    )
    columns_doc = (
        ("between steps", "no step ran on any lane; after the last step it is not known whether one runs"),
        ("a step cut short", "no step on record: bricks ran in one that was cancelled, has not ended or was lost"),
        ("not recorded inside", "a step that was timed as a whole: the process records one in some"),
        ("a step on another lane", "nothing on this lane while a step ran on another"),
        ("no brick recorded", "on a lane without steps: nothing that is timed ran there"),
        ("unnamed gap", "records of that time were lost, or ended before the view was opened: what ran is not known"),
        ("host", "bricks that the host timed, of steps that a device timed"),
        ("adopted", "what other threads or tasks did for a step"),
        ("beside steps", "bricks that ran beside others of their step"),
        ("requests", "the requests of an engine: queued, prefill until the first token, decode until the end"),
    )

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("z", "zoom(1)", "zoom in"),
        Binding("Z", "zoom(-1)", "zoom out"),
        Binding("0", "fit", "all"),
        Binding("G,end", "newest", "newest", key_display="G"),
        Binding("h,left", "step(-1)", "block before, in its row", show=False),
        Binding("l,right", "step(1)", "next block", show=False),
        Binding("H,shift+left", "pan(-1)", "half a screen back", show=False),
        Binding("L,shift+right", "pan(1)", "half a screen on", show=False),
        Binding("j,down", "row(1)", "next row", show=False),
        Binding("k,up", "row(-1)", "row before", show=False),
        Binding("g,home", "oldest", "the oldest step", show=False),
        Binding("enter", "zoom_to", "as wide as the screen: what is under the cursor", show=False),
    ]

    def compose(self) -> ComposeResult:
        self._map = TimelineMap(id="timeline-map")
        yield self._map

    @property
    def focus_target(self) -> Widget:
        return self._map

    def show_source(self, source: SourceView) -> None:
        self._map.show_source(source)

    def let_go(self) -> None:
        self._map.let_go()

    def cells(self) -> Cells:
        """Return the view as a table with a row for each visible block. Times count from the beginning of the newest
        step.
        """
        return self._map.cells()

    def on_click(self, event: Click) -> None:
        self._map.select_at(event.x, event.y)

    def action_zoom(self, steps: int) -> None:
        self._map.zoom(steps)

    def action_fit(self) -> None:
        self._map.fit()

    def action_newest(self) -> None:
        self._map.newest()

    def action_oldest(self) -> None:
        self._map.oldest()

    def action_step(self, blocks: int) -> None:
        self._map.step(blocks)

    def action_pan(self, halves: int) -> None:
        self._map.pan(halves)

    def action_row(self, rows: int) -> None:
        self._map.move_row(rows)

    def action_zoom_to(self) -> None:
        self._map.zoom_to()
