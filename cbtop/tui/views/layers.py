"""The view of layers and bricks.

The view shows the whole model on one screen, and marks layers that are slower than similar layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widget import Widget

from cbtop import units
from cbtop.profiler.analysis.layers import BETWEEN
from cbtop.tui.views.base import SourceDrawing, View
from cbtop.tui.views.brick_pictures import durations, trend
from cbtop.tui.views.layer_map import AROUND, Strip, map_lines, strips_of
from cbtop.tui.views.layer_pane import LEAST_LINES, layer_lines, pane_height
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.views.once_a_second import Pictures
from cbtop.tui.widgets.columns import Cells
from cbtop.tui.widgets.lines import BLANK, Line, clean, fit_line, rule
from cbtop.tui.widgets.parts import GAP, ScreenPart, beside, parts_lines
from cbtop.viewmodels.layers import P50_OF_A_CALL, LayerRow
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import Subject

LEAST_PICTURES = 8  # The pictures of layers have at least this many lines.
# In a view of at least this width in cells, the figures of a layer are to the right of the map, otherwise below the
# map.
BESIDE = 160


class Layers(View):
    """The view that shows the time of each brick in each layer."""

    title = "Layers"
    section = "layers"
    doc = (
        "A line for each brick, a bar for each layer: the exclusive time it takes there in the mean step. Every "
        "line has a scale of its own, on which the median of its layers is at most half as high, and at least a "
        "quarter: what is over four times the median is cut, and where bars are high the end of the scale stands "
        "before them. ▼ stands over a layer whose p50, its median call, is over 1.2 times that of the layers like it "
        "(same stack, same bricks); a single pause makes a bar higher and no mark. Δ stands over the one that has "
        "become slower by most since the baseline (`b`). Arrows go from layer to layer and from brick to brick, "
        "Enter opens the brick under the cursor in the graph, or the layer, and Esc comes back. Where there is room "
        "stand the bricks of the layer under the cursor, "
        "their p50 beside that of the layers like it (×), and all layers, the slowest among its peers "
        "first; on a wide terminal also the brick under the cursor."
    )
    columns_doc = (
        ("median", "the median of the layers in which it runs, each with its mean step, µs or ms a step (derived)"),
        ("slowest", "the longest of these, and the layer that it is of (derived)"),
    )

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("h,left", "step(-1)", "layer before", show=False),
        Binding("l,right", "step(1)", "next layer", show=False),
        Binding("j,down", "brick(1)", "next brick", show=False),
        Binding("k,up", "brick(-1)", "brick before", show=False),
        Binding("g,home", "to_end(0)", "first layer", show=False),
        Binding("G,end", "to_end(-1)", "last layer", show=False),
        Binding("enter", "open", "open"),
    ]

    class Opened(Message):
        """Sent when the user wants to see the node `node` in the graph."""

        def __init__(self, node: int) -> None:
            super().__init__()
            self.node = node

    def compose(self) -> ComposeResult:
        self._map = LayerMap(id="layer-map")
        yield self._map

    @property
    def focus_target(self) -> Widget:
        return self._map

    def show_source(self, source: SourceView) -> None:
        self._map.show_source(source)

    def let_go(self) -> None:
        self._map.let_go()

    def point_at(self, subject: Subject) -> None:
        self._map.point_at(subject.node)

    def cells(self) -> Cells | None:
        """Return the view as a table with a row per layer and a column per brick.

        Times are in µs per step (or call).
        """
        layers = self.source.layer_times if self.source else None
        if layers is None:
            return None
        title = f"µs a {layers.unit}"
        head = ("layer", title, P50_OF_A_CALL, *(clean(brick.name) for brick in layers.bricks), BETWEEN)
        rows = (
            (clean(row.name), *map(units.number, (row.us, row.p50_us, *row.cells, row.between_us)))
            for row in layers.rows
        )
        return Cells(head, tuple(rows))

    def action_step(self, layers: int) -> None:
        self._map.move(layers, 0)

    def action_brick(self, bricks: int) -> None:
        self._map.move(0, bricks)

    def action_to_end(self, at: int) -> None:
        self._map.move_to(at)

    def action_open(self) -> None:
        if (row := self._map.current) is None or self.source is None:
            return
        inside = (node for node in self.source.graph if node.parent == row.id)
        brick = next((node for node in inside if clean(node.name) == self._map.current_line), None)
        self.post_message(self.Opened(row.id if brick is None else brick.id))


class LayerMap(SourceDrawing, can_focus=True):
    """The map of layers. Its cursor is on one layer and on one row of bars."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._pictures = Pictures()
        # id of the layer under the cursor; if it is None, the cursor is on the slowest layer
        self._layer: int | None = None
        self._line = 0

    def let_go(self) -> None:
        """Drop the cached pictures of the previous moment."""
        self._pictures.let_go()

    @property
    def _rows(self) -> Sequence[LayerRow]:
        layers = self._source.layer_times if self._source else None
        return layers.rows if layers else ()

    @property
    def _at(self) -> int:
        ids = [row.id for row in self._rows]
        if self._layer in ids:
            return ids.index(self._layer)
        layers = self._source.layer_times if self._source else None
        slowest = layers.slowest if layers else None
        return ids.index(slowest.id) if slowest else 0

    @property
    def current(self) -> LayerRow | None:
        """The layer under the cursor of the map, or None without layers."""
        return self._rows[self._at] if self._rows else None

    @property
    def current_line(self) -> str:
        """The name of the row of bars under the cursor, such as a brick's name, or "" without layers."""
        layers = self._source.layer_times if self._source else None
        strips = strips_of(layers) if layers else []
        return strips[min(self._line, len(strips) - 1)].name if strips else ""

    def move(self, layers: int, lines: int) -> None:
        if self._rows:
            if layers:
                self._layer = self._rows[max(0, min(len(self._rows) - 1, self._at + layers))].id
            self._line = max(0, self._line + lines)
            self.redraw()

    def move_to(self, at: int) -> None:
        if self._rows:
            self._layer = self._rows[at].id
            self.redraw()

    def point_at(self, node: int | None) -> None:
        """Move the cursor to the layer `node`, and to the brick whose time exceeds its peers' by the most."""
        row = next((row for row in self._rows if row.id == node), None)
        layers = self._source.layer_times if self._source else None
        if row is None or layers is None:
            return
        names = [strip.name for strip in strips_of(layers)]
        brick = clean(row.excess[0]) if row.excess else ""
        self._layer, self._line = row.id, names.index(brick) if brick in names else 0
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        layers = self._source.layer_times if self._source else None
        if layers is None:
            return [fit_line(((f" {_nothing(self._source)}", "dim"),), width)]
        strips = strips_of(layers)
        self._line = min(self._line, len(strips) - 1)
        baseline = self._source.baseline if self._source else None
        row = layers.rows[self._at]

        def drawn(width: int, height: int) -> list[Line]:
            return map_lines(layers, strips, self._at, self._line, width, height, baseline)

        if width >= BESIDE:
            widths = width * 3 // 5, width - width * 3 // 5 - len(GAP)
            return beside((drawn(widths[0], height), self._pane(row, strips, widths[1], height)), widths)
        rooms = (height - AROUND - tall * len(strips) for tall in (2, 1))
        room = next((room for room in rooms if room >= LEAST_LINES), 0)
        room = min(room, pane_height(layers, row, width))
        return [*drawn(width, height - room), *(layer_lines(layers, row, width, room) if room else ())]

    def _pane(self, row: LayerRow, strips: Sequence[Strip], width: int, height: int) -> list[Line]:
        """Return the figures of the layer `row`. If lines are free, show the brick under the cursor in all layers."""
        source = self._source
        if source is None or source.layer_times is None:
            return []
        need = pane_height(source.layer_times, row, width)
        lines = layer_lines(source.layer_times, row, width, min(need, height))
        named = [brick for brick in source.bricks if clean(brick.name) == strips[self._line].name]
        brick = named[0] if named else source.bricks[0] if source.bricks else None
        left = height - len(lines) - 2
        if brick is None or left < LEAST_PICTURES:
            return lines
        look = CATEGORY_LOOKS[brick.category]
        title: Line = ((f"{look.glyph} ", look.role), (clean(brick.name), "strong"), (" in all layers", "dim"))
        self._pictures.begin(source, brick.key)
        parts = (
            ScreenPart(partial(durations, brick, self._pictures), 4, 10),
            ScreenPart(partial(trend, brick, source), 4, 10),
        )
        return [*lines, BLANK, rule(title, width), *parts_lines(parts, parts, width, left)]


def _nothing(source: SourceView | None) -> str:
    if source is not None and source.merged is not None and source.graph == ():
        return "n/a: what is taken from several ranks has no layers"
    return "n/a: no layer of this phase has been recorded yet"
