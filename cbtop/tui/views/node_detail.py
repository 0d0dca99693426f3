"""The panel with details of one node of the graph.

For a layer or brick, it also has figures over all layers.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial

from cbtop import units
from cbtop.protocol.attributes import KernelAttributes
from cbtop.protocol.vocabulary import NodeKind, Provenance
from cbtop.text import kernel_text, module_text
from cbtop.text.statistics import Of, statistics_of
from cbtop.tui.views.brick_detail import Fact, group_lines
from cbtop.tui.views.brick_pictures import durations, heading_line, layers_part, trend
from cbtop.tui.views.layer_pane import layer_lines, pane_height
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.views.once_a_second import Pictures
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import BLANK, Line, clean, fit_line, rule, width_of, wrap_line
from cbtop.tui.widgets.parts import GAP, ScreenPart, beside, even_widths, parts_lines
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.graph import GraphRow
from cbtop.viewmodels.kernel_makers import maker_of
from cbtop.viewmodels.layers import LayerRow
from cbtop.viewmodels.source import SourceView

LEAST_LINES = 6  # The panel has at least this many lines.
MAX_PICTURE = 16  # A picture in the panel has at most this many lines.
LOCAL = "local_memory_bytes"  # key of the memory that a thread uses for spilled registers or a stack
TWO_COLUMNS = 110  # In a panel of at least this width in cells, pictures are to the right of the figures.


class NodeDetail(Drawing):
    """The panel with details of the node under the cursor of the graph."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._node: GraphRow | None = None
        self._source: SourceView | None = None
        self._pictures = Pictures()

    def let_go(self) -> None:
        """Drop the cached pictures of the previous moment."""
        self._pictures.let_go()

    def show_node(self, node: GraphRow | None, source: SourceView) -> None:
        """Show the details of `node` from now on."""
        self._node, self._source = node, source
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        if self._node is None or self._source is None:
            return [rule((("no node", "dim"),), width)]
        return node_lines(self._node, self._source, width, height, self._pictures)


def node_lines(
    node: GraphRow, source: SourceView, width: int, height: int, pictures: Pictures | None = None
) -> list[Line]:
    """Return the panel of `node` in at most `height` lines.

    `pictures` is a cache of drawings. Without `pictures`, each drawing is made again.
    """
    pictures = pictures or Pictures()
    pictures.begin(source, node.id)
    look = CATEGORY_LOOKS[node.category] if node.category is not None else None
    name = f"Layer {clean(node.name)}" if node.kind is NodeKind.LAYER else clean(node.name)
    title: Line = (((f"{look.glyph} ", look.role),) if look else ()) + ((name, "strong"),)
    about = " · ".join(filter(None, (node.kind.name.lower(), clean(node.node_label), clean(node.backend))))
    head = rule(fit_line(title, min(width_of(title), width - 6)), width, ((about, "dim"),))
    layers = _layers(source) if node.kind is NodeKind.LAYER else ()
    layer = next((row for row in layers if row.id == node.id), None)
    if layer is not None and source.layer_times is not None:
        need = pane_height(source.layer_times, layer, width)
        figures = _figures(node, source, width)
        free = height - 1 - len(figures)
        below = layer_lines(source.layer_times, layer, width, min(need, free)) if free >= LEAST_LINES else []
        return [head, *figures, *below][:height]
    brick = next((row for row in source.bricks if row.key == (node.name, node.category)), None)
    if brick is None:
        return [head, *_figures(node, source, width)][:height]
    if width < TWO_COLUMNS:
        figures = _figures(node, source, width)
        return [head, *figures, *_everywhere(brick, source, pictures, width, height - 1 - len(figures))][:height]
    widths = even_widths(width, 2)
    panes = [_figures(node, source, widths[0]), _everywhere(brick, source, pictures, widths[1], height - 1)]
    return [head, *beside(panes, widths)][:height]


def _layers(source: SourceView) -> tuple[LayerRow, ...]:
    return source.layer_times.rows if source.layer_times else ()


def _figures(node: GraphRow, source: SourceView, width: int) -> list[Line]:
    """Return the measured figures of the node, and its launch configuration."""
    rows = [row for row in statistics_of(Of.NODE) if row.value(node) is not None]
    known = [(row.word or row.title, clean(row.in_full(node)), "") for row in rows]
    if not known:
        known = [("n/a", "it is not timed on its own", "dim")]
    lines = _module(node, width)
    lines += group_lines("here", f"{Provenance.MEASURED.value} and {Provenance.DERIVED.value}", known, width)
    of_kernel = {field.name: getattr(node.kernel, field.name) for field in fields(KernelAttributes)}
    launch: list[Fact] = [
        (name.replace("_bytes", "").replace("_", " "), _attribute(name, value), "")
        for name, value in of_kernel.items()
        if value is not None and (name, value) != (LOCAL, 0)
    ]
    if launch:
        lines += group_lines("launch", Provenance.STATIC.value, launch, width)
    if node.kind is NodeKind.KERNEL:
        lines += _maker(node, source, width)
    if node.burst is not None:
        lines.append(fit_line(((f"  {kernel_text.in_burst(node.burst)}", "dim"),), width))
    return [*lines, BLANK]


def _module(node: GraphRow, width: int) -> list[Line]:
    """Return a heading and a text with the class, place and weight of the node's module. Return [] if unknown."""
    text = module_text.described(node.module)
    if not text:
        return []
    heading = heading_line("module", Provenance.STATIC.value, width)
    return [heading, *wrap_line((("  ", ""),), ((clean(text), ""),), width)]


def _maker(node: GraphRow, source: SourceView, width: int) -> list[Line]:
    """Return lines about the maker (library) of the kernel.

    If a burst (steps recorded on request) has the kernel, add the waves of its launch.
    """
    maker = maker_of(node.name, node.kernel, node.burst)
    facts: list[Fact] = [("maker", clean(str(maker)), "")] if maker.maker else []
    facts += [("source", clean(maker.source), "")] if maker.source else []
    lines = group_lines("maker", maker.evidence, facts, width) if facts else []
    rows = [row for brick in source.kernels for row in brick.kernels]
    waves = next((row.waves for row in rows if (row.name, row.kernel) == (node.name, node.kernel)), None)
    if waves is not None:
        lines += group_lines("waves", Provenance.DERIVED.value, [("waves", kernel_text.waves(waves), "")], width)
    return lines


def _attribute(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return "×".join(map(str, value))
    if name == LOCAL:
        return f"{value:,} local bytes a thread"
    return f"{value:016x}" if name == "ptx_hash" else units.number(float(str(value))).removesuffix(".00")


def _everywhere(brick: BrickRow, source: SourceView, pictures: Pictures, width: int, height: int) -> list[Line]:
    """Return the figures of the node's brick over all layers of the phase."""
    if height < LEAST_LINES:
        return []
    title: Line = ((clean(brick.name), "strong"), (" in all layers", "dim"))
    share = f"{units.percent(brick.percent)} of the step"
    parts = (
        layers_part(brick, source, pictures),
        ScreenPart(partial(durations, brick, pictures), 4, MAX_PICTURE),
        ScreenPart(partial(trend, brick, source), 4, MAX_PICTURE if brick.trend_us else 0),
    )
    lines = parts_lines(parts, parts, width - len(GAP), height - 1)
    return [rule(title, width, ((share, "dim"),)), *lines]
