"""The execution graph as a foldable tree: layer → brick → kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widget import Widget

from cbtop import formatting
from cbtop.protocol.vocabulary import NodeKind
from cbtop.tui.views.base import View
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.widgets.bars import bar
from cbtop.tui.widgets.columns import Column
from cbtop.tui.widgets.lines import Line, clean
from cbtop.tui.widgets.table import Table
from cbtop.viewmodels.model import GraphRow, SourceView


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A node in sight, with the connectors in front of it."""

    node: GraphRow
    connectors: str
    has_children: bool
    unfolded: bool


def visible_rows(nodes: Sequence[GraphRow], unfolded: frozenset[int]) -> list[TreeRow]:
    """The nodes whose ancestors are all unfolded, in drawing order, with their connectors."""
    last_child: dict[int | None, int] = {}
    for node in nodes:
        last_child[node.parent] = node.id
    rows: list[TreeRow] = []
    indents: dict[int, str] = {}  # of the children of a node in sight and unfolded
    for node in nodes:
        if node.parent is None:
            connectors, indent = "", ""
        elif node.parent in indents:
            is_last = last_child[node.parent] == node.id
            connectors = indents[node.parent] + ("└── " if is_last else "├── ")
            indent = indents[node.parent] + ("    " if is_last else "│   ")
        else:
            continue
        is_unfolded = node.id in unfolded
        rows.append(TreeRow(node, connectors, node.id in last_child, is_unfolded))
        if is_unfolded:
            indents[node.id] = indent
    return rows


def _node(row: TreeRow, width: int) -> Line:
    mark = ("▾ " if row.unfolded else "▸ ") if row.has_children else "  "
    name, _, rest = clean(row.node.label).partition("  ")
    category = row.node.category
    role = CATEGORY_LOOKS[category].role if category is not None else "strong" if row.node.parent is None else ""
    return ((row.connectors, "faint"), (mark, "accent"), (name, role), (f"  {rest}" if rest else "", "dim"))


def _figure(text: str) -> Line:
    return ((text, "faint" if text == formatting.NOT_MEASURED else ""),)


def graph_columns(largest_percent: float) -> tuple[Column[TreeRow], ...]:
    """The columns of the tree; the bar of a node with `largest_percent` fills its column."""

    def share(row: TreeRow, width: int) -> Line:
        category = row.node.category
        role = CATEGORY_LOOKS[category].role if category is not None else "accent"
        percent = row.node.percent
        return bar(None if percent is None else percent / max(largest_percent, 1e-9), width, role)

    return (
        Column("layer → brick → kernel", 34, 0, _node, "the node; ▸ folded, ▾ unfolded", align="left", stretch=5),
        _figures("avg µs", 1, "mean time of one call", lambda node: formatting.number(node.avg_us)),
        _figures("p50 µs", 4, "half of the calls took at most this", lambda node: formatting.number(node.p50_us)),
        _figures("p99 µs", 3, "99 of 100 calls took at most this", lambda node: formatting.number(node.p99_us)),
        _figures("count", 6, "calls recorded", lambda node: formatting.count(node.count)),
        Column("share", 8, 5, share, "wall %, drawn; the largest fills it", align="left", stretch=1, max_width=24),
        _figures("wall %", 2, "of the step's wall time", lambda node: formatting.percent_number(node.percent)),
    )


def _figures(title: str, priority: int, doc: str, text: Callable[[GraphRow], str]) -> Column[TreeRow]:
    return Column(title, 8, priority, lambda row, _: _figure(text(row.node)), doc)


class Graph(View):
    """Which kernels ran for which brick of which layer."""

    title = "Graph"
    doc = (
        "Layers, the bricks in each, the kernels each brick launched. A kernel shows its launch "
        "(<<<grid,block>>>, shared memory) on a GPU and its backend on a CPU. A time is n/a where a "
        "node is not timed on its own."
    )
    columns_doc = tuple((column.title, column.doc) for column in graph_columns(100.0))

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "toggle_fold", "fold/unfold"),
        Binding("h,left", "fold", "fold", show=False),
        Binding("l,right", "unfold", "unfold", show=False),
        Binding("z", "toggle_all", "all"),
    ]

    def compose(self) -> ComposeResult:
        self._unfolded: frozenset[int] = frozenset()
        self._fold_state_of = ""
        self._graph: tuple[GraphRow, ...] = ()
        self._table: Table[TreeRow] = Table(
            graph_columns(100.0), lambda row: row.node.id, empty="(empty graph)", id="graph-table"
        )
        yield self._table

    @property
    def focus_target(self) -> Widget:
        return self._table

    def show_source(self, source: SourceView) -> None:
        self._graph = source.graph
        self._table.columns = graph_columns(max((node.percent or 0.0 for node in source.graph), default=100.0))
        if self._fold_state_of != source.key and source.graph:
            self._fold_state_of = source.key
            layers = (node.id for node in source.graph if node.kind is NodeKind.LAYER)
            self._unfolded = frozenset({next(layers, source.graph[0].id)})
        self._show_tree()

    def _show_tree(self) -> None:
        self._table.show_rows(visible_rows(self._graph, self._unfolded))

    def _set_unfolded(self, unfolded: frozenset[int]) -> None:
        self._table.hold_row()
        self._unfolded = unfolded
        self._show_tree()

    def action_toggle_fold(self) -> None:
        if (row := self._table.current) is not None and row.has_children:
            self._set_unfolded(self._unfolded ^ {row.node.id})

    def action_fold(self) -> None:
        """Fold this node; where there is nothing to fold, go to its parent."""
        row = self._table.current
        if row is None:
            return
        if row.has_children and row.unfolded:
            self._set_unfolded(self._unfolded - {row.node.id})
        elif row.node.parent is not None:
            ids = [other.node.id for other in self._table.rows]
            self._table.move_to(ids.index(row.node.parent))

    def action_unfold(self) -> None:
        """Unfold this node; where it is unfolded, go to its first child."""
        row = self._table.current
        if row is None or not row.has_children:
            return
        if row.unfolded:
            self._table.action_move(1)
        else:
            self._set_unfolded(self._unfolded | {row.node.id})

    def action_toggle_all(self) -> None:
        """Unfold everything, or fold everything when something is unfolded."""
        everything = frozenset(node.id for node in self._graph)
        self._set_unfolded(frozenset() if self._unfolded else everything)
