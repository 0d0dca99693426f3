"""The execution graph as a foldable tree: layer → brick → kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widget import Widget

from cbtop import formatting
from cbtop.protocol.vocabulary import NodeKind
from cbtop.statistics import NODE_COLUMNS, NODE_SHARE_COLUMNS, PATH_COLUMNS, Of, statistic
from cbtop.tui.views.base import SourceDrawing, View
from cbtop.tui.views.figures import figure, figure_columns
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.widgets.bars import bar
from cbtop.tui.widgets.columns import Column
from cbtop.tui.widgets.lines import Line, clean, fit_line
from cbtop.tui.widgets.table import Table
from cbtop.viewmodels.model import CriticalPathView, GraphRow, SourceView

_SLACK = statistic("slack_us", Of.NODE)


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


def _slack(row: TreeRow) -> Line:
    return (("critical", "warn"),) if row.node.on_critical_path else figure(_SLACK.bare(row.node))


def graph_columns(largest_percent: float, *, slack: bool) -> tuple[Column[TreeRow], ...]:
    """The columns of the tree; the bar of a node with `largest_percent` fills its column.

    The slack is worth a column only where anything lies beside the critical path.
    """

    def share(row: TreeRow, width: int) -> Line:
        category = row.node.category
        role = CATEGORY_LOOKS[category].role if category is not None else "accent"
        percent = row.node.percent
        return bar(None if percent is None else percent / max(largest_percent, 1e-9), width, role)

    return (
        Column("layer → brick → kernel", 34, 0, _node, "the node; ▸ folded, ▾ unfolded", align="left", stretch=5),
        *figure_columns(NODE_COLUMNS, row_of=_graph_row),
        *(figure_columns(PATH_COLUMNS, row_of=_graph_row, cells={"slack_us": _slack}) if slack else ()),
        Column("share", 8, 5, share, "wall %, drawn; the largest fills it", align="left", stretch=1, max_width=24),
        *figure_columns(NODE_SHARE_COLUMNS, row_of=_graph_row),
    )


def _graph_row(row: TreeRow) -> GraphRow:
    return row.node


def path_line(path: CriticalPathView) -> Line:
    """`critical path 1.20 ms, 5 of 9 timed nodes (derived)`, or why there is none."""
    return (("  ", ""), (clean(formatting.critical_path(path)), "warn" if path.unknown else "dim"))


class PathLine(SourceDrawing):
    """One line about the critical path; hidden where everything is one sequence."""

    def show_source(self, source: SourceView) -> None:
        self.display = source.critical_path is not None
        super().show_source(source)

    def draw(self, width: int, height: int) -> list[Line]:
        path = self._source.critical_path if self._source else None
        return [fit_line(path_line(path), width)] if path else []


class Graph(View):
    """Which kernels ran for which brick of which layer."""

    title = "Graph"
    doc = (
        "Layers, the bricks in each, the kernels each brick launched. A kernel shows its launch "
        "(<<<grid,block>>>, shared memory) on a GPU and its backend on a CPU. A time is n/a where a "
        "node is not timed on its own. Where async tasks, dependencies or transfers are in the graph, the critical "
        "path is marked and the other nodes show their slack, of the mean run."
    )
    columns_doc = tuple((column.title, column.doc) for column in graph_columns(100.0, slack=True))

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
            graph_columns(100.0, slack=False), lambda row: row.node.id, empty="(empty graph)", id="graph-table"
        )
        self._path = PathLine(id="graph-path")
        yield self._table
        yield self._path

    @property
    def focus_target(self) -> Widget:
        return self._table

    def show_source(self, source: SourceView) -> None:
        self._graph = source.graph
        path = source.critical_path
        largest_percent = max((node.percent or 0.0 for node in source.graph), default=100.0)
        self._table.columns = graph_columns(largest_percent, slack=path is not None and path.nodes < path.timed_nodes)
        self._path.show_source(source)
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
