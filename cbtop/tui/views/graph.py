"""The view of the execution graph: a foldable tree of layers, bricks and kernels."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.events import Resize
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input

from cbtop.text import kernel_text
from cbtop.tui.views.base import SourceDrawing, View
from cbtop.tui.views.graph_columns import columns_of, graph_columns
from cbtop.tui.views.node_detail import LEAST_LINES, NodeDetail
from cbtop.tui.views.tree_rows import FoldedTree, Place, TreeRow
from cbtop.tui.widgets.columns import Column, Placed, head_line
from cbtop.tui.widgets.filter import Filter
from cbtop.tui.widgets.lines import Line, clean, fit_line
from cbtop.tui.widgets.table import Table
from cbtop.viewmodels.graph import CriticalPathView, costliest_brick, places_of, rows_at
from cbtop.viewmodels.source import SourceView

BESIDE = 160  # In a view of at least this width in cells, the details are to the right of the tree.
_AROUND = 8  # At most this many lines of the screen are not rows of the tree.


def path_line(path: CriticalPathView) -> Line:
    """Return a line such as `critical path 1.20 ms, 5 of 9 timed nodes (derived)`, or why the path is unknown."""
    return (("  ", ""), (clean(kernel_text.critical_path(path)), "warn" if path.unknown else "dim"))


class PathLine(SourceDrawing):
    """One line about the critical path. The line is hidden if all nodes run one after another."""

    def show_source(self, source: SourceView) -> None:
        self.display = source.critical_path is not None
        super().show_source(source)

    def draw(self, width: int, height: int) -> list[Line]:
        path = self._source.critical_path if self._source else None
        return [fit_line(path_line(path), width)] if path else []


class TreeTable(Table[TreeRow]):
    """The table that shows the tree.

    The head line marks the sort column of the siblings. A click on a title sorts the siblings by this column.
    """

    sort_by = ""  # title of the sort column of the siblings, or "" for execution order
    descending = True

    class HeadClicked(Message):
        """Sent when the user wants to sort by the column `title`."""

        def __init__(self, title: str) -> None:
            super().__init__()
            self.title = title

    def draw_head(self, placed: Sequence[Placed[TreeRow]]) -> Line:
        return head_line(placed, self.sort_by, self.descending)

    def choose_column(self, column: Column[TreeRow]) -> None:
        self.post_message(self.HeadClicked(column.title))

    def move_to_node(self, node: int) -> None:
        """Move the cursor to the row of `node`. Do nothing if the node is not visible."""
        ids = [row.id for row in self.rows]
        if node in ids:
            self.move_to(ids.index(node))

    @property
    def orders(self) -> list[str]:
        """Titles of the visible columns that can sort siblings. "" means execution order."""
        return ["", *(column.title for column in self.visible_columns if column.sort_key is not None)]


class Graph(View):
    """The view of the kernels that ran for each brick of each layer, as a tree."""

    title = "Graph"
    section = "tree"
    doc = (
        "Layers, the bricks in each, the kernels each brick launched. A kernel shows its launch (<<<grid,block>>>, "
        "shared memory) on a GPU and its backend on a CPU. A time is n/a where a node is not timed on its own. `K`, "
        "like `cbtop kernels`, lets a process on an NVIDIA GPU record its kernels in a burst, its next 3 steps: what "
        "was measured in them stands in a column of its own and behind a kernel's launch, and is no part of these "
        "times. Where async tasks, dependencies or transfers are in the graph, the critical path is marked and the "
        "other nodes show their slack, of the mean run. Sorted, the children of each node stand in the order that "
        "their figures had when the key was pressed: rows stand still. In the room that rows leave stands the node "
        "under the cursor: its module of torch with class and place, its figures and, of a layer or a brick, what is "
        "known of that in all layers; Enter on a row that does not unfold gives that half of the screen. At first "
        "the cursor is on the brick that takes the most time."
    )
    columns_doc = tuple(
        (column.title, column.doc) for column in graph_columns((), tuple, slack=True, burst=True, changes={})
    )

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "open/fold"),
        Binding("h,left", "fold", "fold", show=False),
        Binding("l,right", "unfold", "unfold", show=False),
        Binding("z", "toggle_all", "all"),
        Binding("s,full_stop", "sort(1)", "sort"),
        Binding("comma", "sort(-1)", "sort by the previous column", show=False),
        Binding("S", "reverse", "reverse", show=False),
        Binding("slash", "find", "find", key_display="/"),
        Binding("n", "match(1)", "next match", show=False),
        Binding("N", "match(-1)", "previous match", show=False),
        Binding("escape", "back", "look for nothing any more", show=False),
        # This key works in every view. It is listed here so that the footer of this view shows it.
        Binding("K", "app.kernels", "kernels"),
    ]

    def compose(self) -> ComposeResult:
        self._tree = FoldedTree()
        self._fold_state_of = ""
        self._shows_detail = False  # whether the details get half of the screen, even if rows need it
        self._is_at_costliest = False  # whether the cursor was put on the costliest brick of the process
        # The nodes in the table and the ids of the unfolded nodes, both at the last drawing.
        self._drawn: tuple[Sequence[Place], frozenset[int]] | None = None
        self._table = TreeTable(
            graph_columns((), tuple, slack=False, burst=False),
            lambda row: row.id,
            empty="(empty graph)",
            id="graph-table",
        )
        self._path = PathLine(id="graph-path")
        self._filter = Filter("part of a node's name or category, or a regular expression", id="graph-filter")
        self._wanted = ""
        self._detail = NodeDetail(id="node-detail")
        self._panes = Container(self._table, self._detail, id="graph-panes")
        yield self._panes
        yield self._filter
        yield self._path

    @property
    def focus_target(self) -> Widget:
        return self._table

    def show_source(self, source: SourceView) -> None:
        self._tree.places = places_of(source.graph)
        self._table.columns = columns_of(source, lambda: self._table.rows)
        self._path.show_source(source)
        if self._fold_state_of != source.key and self._tree.places:
            self._fold_state_of = source.key
            is_beside = self.app.size.width >= BESIDE
            self._tree.unfold_first_layers(max_rows=self.app.size.height - _AROUND if is_beside else 0)
            self._is_at_costliest = False
        self._show_tree()
        # Once for each process, when a brick has a time, put the cursor on the brick that takes the most time.
        if not self._is_at_costliest and (node := costliest_brick(source.graph)) is not None:
            self._is_at_costliest = True
            if self._table.cursor == 0:
                self._tree.unfolded |= self._tree.ancestors(node)
                self._show_tree()
                self._table.move_to_node(node)
        self._lay_out()

    def on_resize(self, event: Resize) -> None:
        self._lay_out()

    def on_table_moved(self, event: Table.Moved) -> None:
        self._show_detail()

    def _lay_out(self) -> None:
        """Set the heights of the tree and the details. The details of the node under the cursor fill the lines that
        the tree leaves free.
        """
        width, height = self.size
        if not (width and height):
            return
        rows, lines = 1 + len(self._table.rows), height - self._filter.display - self._path.display
        is_beside = width >= BESIDE
        self._panes.set_class(is_beside, "-beside")
        least = lines // 2 if self._shows_detail else LEAST_LINES
        rows = min(rows, lines - least) if self._shows_detail else rows
        self._detail.display = bool(self._table.rows) and (is_beside or lines - rows >= least)
        self._table.styles.height = "1fr" if is_beside or not self._detail.display else rows
        self.call_after_refresh(self._show_detail)

    def let_go(self) -> None:
        self._detail.let_go()

    def _show_detail(self) -> None:
        row = self._table.current
        if self._detail.display and self.source is not None and row is not None:
            self._detail.show_node(rows_at(self.source.graph, [row.at])[0], self.source)

    def _show_tree(self) -> None:
        """Update the rows of the tree. They depend on nodes and folding, and not on measurements."""
        tree = self._tree
        if self._drawn and self._drawn[0] is tree.places and self._drawn[1] == tree.unfolded:
            self._table.redraw()
            return
        if self._drawn is None or self._drawn[0] is not tree.places:
            self._sort()
        self._drawn = tree.places, tree.unfolded
        self._table.show_rows(tree.rows())

    def _sort(self) -> None:
        """Sort the children of each node by their current figures."""
        self._tree.sort_by_execution()
        if self.source is None or not self._table.sort_by:
            return
        rows = self._tree.all_rows()
        columns = columns_of(self.source, lambda: rows)
        sort_key = next((column.sort_key for column in columns if column.title == self._table.sort_by), None)
        if sort_key is not None:
            sign = -1 if self._table.descending else 1
            self._tree.sort(rows, lambda row: sign * float(sort_key(row)))

    def _sort_by(self, title: str, *, descending: bool) -> None:
        self._table.sort_by, self._table.descending = title, descending
        self._drawn = None
        self._show_tree()

    def action_sort(self, columns: int) -> None:
        """Sort siblings by the column that is `columns` positions after the current sort column.

        Execution order follows after the last column.
        """
        orders = self._table.orders
        at = orders.index(self._table.sort_by) if self._table.sort_by in orders else 0
        self._sort_by(orders[(at + columns) % len(orders)], descending=True)

    def action_reverse(self) -> None:
        self._sort_by(self._table.sort_by, descending=not self._table.descending)

    def on_tree_table_head_clicked(self, event: TreeTable.HeadClicked) -> None:
        if event.title == self._table.sort_by:
            self.action_reverse()
        elif event.title in self._table.orders:
            self._sort_by(event.title, descending=True)

    def action_find(self) -> None:
        self._filter.open()

    def action_back(self) -> None:
        self._filter.close()
        self._table.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._wanted = event.value
        self.action_match(0)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._filter.display = bool(event.value)
        self._table.focus()

    def action_match(self, matches: int) -> None:
        """Go to a node that matches the search.

        `matches` is 1 for the next match, -1 for the previous match, and 0 for the first match from the cursor on.
        Nodes inside of folded nodes also match. After the last match, the search continues at the first match.
        """
        found, places = self._tree.matches(self._wanted), self._tree.places
        if not self._wanted or not found:
            self._filter.show_found(f"0 of {len(places)}" if self._wanted else "")
            return
        here = self._table.current.at if self._table.current else 0
        before, up_to = bisect_left(found, here), bisect_right(found, here)
        number = {1: up_to, 0: before, -1: before - 1}[matches] % len(found)
        self._filter.show_found(f"{number + 1} of {len(found)}")
        node = places[found[number]].id
        self._set_unfolded(self._tree.unfolded | self._tree.ancestors(node))
        self._table.move_to_node(node)

    def _set_unfolded(self, unfolded: frozenset[int]) -> None:
        self._tree.unfolded = unfolded
        self._show_tree()
        self._lay_out()

    def open_node(self, node: int) -> None:
        """Move the cursor to the row of `node` and show its details. Unfold the node and its ancestors."""
        self._shows_detail = True
        self._set_unfolded(self._tree.unfolded | self._tree.ancestors(node) | {node})
        self._table.move_to_node(node)

    def action_open(self) -> None:
        """Fold or unfold the node under the cursor. If it has no children, show or hide its details."""
        row = self._table.current
        if row is None:
            return
        if row.has_children:
            self._set_unfolded(self._tree.unfolded ^ {row.id})
        else:
            self._shows_detail = not self._shows_detail
            self._lay_out()

    def action_fold(self) -> None:
        """Fold the node under the cursor. If this node is already folded or has no children, go to its parent."""
        row = self._table.current
        if row is None:
            return
        if row.has_children and row.unfolded:
            self._set_unfolded(self._tree.unfolded - {row.id})
        elif row.parent is not None:
            self._table.move_to_node(row.parent)

    def action_unfold(self) -> None:
        """Unfold the node under the cursor. If this node is already unfolded, go to its first child."""
        row = self._table.current
        if row is None or not row.has_children:
            return
        if row.unfolded:
            self._table.action_move(1)
        else:
            self._set_unfolded(self._tree.unfolded | {row.id})

    def action_toggle_all(self) -> None:
        """Fold all nodes if any node is unfolded. Otherwise unfold all nodes."""
        self._tree.toggle_all()
        self._show_tree()
        self._lay_out()
