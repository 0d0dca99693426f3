"""The execution graph as a foldable tree: layer → brick → kernel."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.events import Resize
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input

from cbtop import units
from cbtop.comparison.items import Place as ComparedPlace
from cbtop.comparison.noise import Change
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from cbtop.text import kernel_text
from cbtop.text.row_filter import matcher
from cbtop.text.statistics import NODE_COLUMNS, NODE_SHARE_COLUMNS, PATH_COLUMNS, Of, statistic
from cbtop.tui.views.base import SourceDrawing, View
from cbtop.tui.views.baseline import change_role, change_text
from cbtop.tui.views.figures import figure, figure_columns
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.views.node_detail import LEAST_LINES, NodeDetail
from cbtop.tui.widgets.bars import bar
from cbtop.tui.widgets.columns import Column, Placed, head_line
from cbtop.tui.widgets.filter import Filter
from cbtop.tui.widgets.lines import Line, clean, fit_line
from cbtop.tui.widgets.table import Table
from cbtop.viewmodels.graph import CriticalPathView, GraphRow, has_burst, largest_share, places_of, rows_at
from cbtop.viewmodels.source import SourceView

_SLACK = statistic("slack_us", Of.NODE)
BESIDE = 160  # cells: from this width on, details are next to the tree
_AROUND = 8  # maximum lines of the screen that are not rows of the tree
DRAWN_TOGETHER = 32  # rows made together: rows after a visible one are likely to be visible
Place = GraphRow | Node  # a node at its place, with or without measurements


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A visible node with its connectors. `at` is its index in the graph, `line` its index among the rows."""

    at: int
    line: int
    id: int
    parent: int | None
    connectors: str
    has_children: bool
    unfolded: bool


def visible_rows(
    places: Sequence[Place], unfolded: frozenset[int], ranks: Mapping[int, float] | None = None
) -> list[TreeRow]:
    """Return the nodes whose ancestors are all unfolded, with connectors, in drawing order.

    Siblings are in execution order, or by ascending `ranks`.
    """
    outside = places[0].parent if places else None
    order = range(len(places)) if ranks is None else _ranked(places, ranks)
    last_child: dict[int | None, int] = {places[at].parent: places[at].id for at in order}
    rows: list[TreeRow] = []
    indents: dict[int | None, str] = {}  # for the children of visible unfolded nodes
    for at in order:
        place = places[at]
        if place.parent in (None, outside):
            parent, connectors, indent = None, "", ""
        elif place.parent in indents:
            parent, is_last = place.parent, last_child[place.parent] == place.id
            connectors = indents[parent] + ("└── " if is_last else "├── ")
            indent = indents[parent] + ("    " if is_last else "│   ")
        else:
            continue
        is_unfolded = place.id in unfolded
        rows.append(TreeRow(at, len(rows), place.id, parent, connectors, place.id in last_child, is_unfolded))
        if is_unfolded:
            indents[place.id] = indent
    return rows


def _ranked(places: Sequence[Place], ranks: Mapping[int, float]) -> Sequence[int]:
    """Return the indices of nodes in `places`, each before its children, siblings by rank."""
    children: dict[int | None, list[int]] = {}
    for at, place in enumerate(places):
        children.setdefault(place.parent, []).append(at)

    def next_last(found: Sequence[int]) -> list[int]:
        return sorted(found, key=lambda at: ranks[places[at].id])[::-1]

    order: list[int] = []
    outside = places[0].parent if places else None
    waiting = next_last([*children.get(outside, []), *(children.get(None, []) if outside is not None else [])])
    while waiting:
        at = waiting.pop()
        order.append(at)
        waiting += next_last(children.get(places[at].id, []))
    return order


def graph_columns(
    graph: Sequence[GraphRow],
    rows: Callable[[], Sequence[TreeRow]],
    *,
    slack: bool,
    burst: bool,
    changes: Mapping[ComparedPlace, Change] | None = None,
) -> tuple[Column[TreeRow], ...]:
    """Return the columns of the tree of `graph`, whose table holds `rows`. The largest share fills its column.

    Slack has a column only if anything is off the critical path, a burst only if there was one, and `changes` only
    with a baseline.
    """
    largest_percent = max(largest_share(graph), 1e-9)
    made: dict[int, GraphRow] = {}

    def of(row: TreeRow) -> GraphRow:
        if row.at not in made:
            places = [row.at, *(other.at for other in rows()[row.line + 1 : row.line + DRAWN_TOGETHER])]
            made.update(zip(places, rows_at(graph, places), strict=True))
        return made[row.at]

    def node(row: TreeRow, width: int) -> Line:
        shown = of(row)
        mark = ("▾ " if row.unfolded else "▸ ") if row.has_children else "  "
        name, _, rest = clean(shown.label).partition("  ")
        if shown.copied_gb_per_sec is not None:
            rest += f"  {units.number(shown.copied_gb_per_sec)} GB/s"
        if shown.burst is not None:
            rest += f"  {kernel_text.in_burst(shown.burst)}"
        category = shown.category
        role = CATEGORY_LOOKS[category].role if category is not None else "strong" if row.parent is None else ""
        return ((row.connectors, "faint"), (mark, "accent"), (name, role), (f"  {rest}" if rest else "", "dim"))

    def share(row: TreeRow, width: int) -> Line:
        category, percent = of(row).category, of(row).percent
        role = CATEGORY_LOOKS[category].role if category is not None else "accent"
        return bar(None if percent is None else percent / largest_percent, width, role)

    def slack_of(row: TreeRow) -> Line:
        return (("critical", "warn"),) if of(row).on_critical_path else figure(_SLACK.bare(of(row)))

    def burst_of(row: TreeRow) -> Line:
        found = of(row)
        if found.kind is not NodeKind.KERNEL:
            return figure(units.NONE_THERE)
        return figure(units.number(found.burst.mean_ns / 1e3 if found.burst else None))

    def change_of(row: TreeRow) -> Change | None:
        place = of(row).place
        return (changes or {}).get(place) if place is not None else None

    def sort_by_change(row: TreeRow) -> float:
        found = change_of(row)
        return -1e9 if found is None or found.percent is None else found.percent

    since_baseline: Column[TreeRow] = Column(
        "Δ",
        9,
        3,
        lambda row, _: figure(change_text(change_of(row)), change_role(change_of(row))),
        "of a layer or a brick in it (all it is there, where it runs several times): exclusive µs/token beside the "
        "baseline's (`b`), as in the bricks; n/a of a kernel, and where a brick runs in layers and outside (derived)",
        sort_key=sort_by_change,
    )
    in_burst: Column[TreeRow] = Column(
        "burst µs", 8, 1, lambda row, _: burst_of(row), "mean µs of one launch in the last burst: in no other time"
    )
    return (
        Column("layer → brick → kernel", 34, 0, node, "the node; ▸ folded, ▾ unfolded", align="left", stretch=5),
        *((in_burst,) if burst else ()),
        *figure_columns(NODE_COLUMNS, row_of=of),
        *(figure_columns(PATH_COLUMNS, row_of=of, cells={"slack_us": slack_of}) if slack else ()),
        Column(
            "share",
            8,
            5,
            share,
            "wall %, drawn; the largest fills it",
            align="left",
            stretch=1,
            max_width=24,
            is_drawn=True,
        ),
        *figure_columns(NODE_SHARE_COLUMNS, row_of=of),
        *(() if changes is None else (since_baseline,)),
    )


def _columns_of(source: SourceView, rows: Callable[[], Sequence[TreeRow]]) -> tuple[Column[TreeRow], ...]:
    path = source.critical_path
    has_slack = path is not None and path.nodes < path.timed_nodes
    found = source.baseline if source.merged is None else None
    changes = None if found is None else found.places
    return graph_columns(source.graph, rows, slack=has_slack, burst=has_burst(source.graph), changes=changes)


def path_line(path: CriticalPathView) -> Line:
    """Return for example `critical path 1.20 ms, 5 of 9 timed nodes (derived)`, or why there is none."""
    return (("  ", ""), (clean(kernel_text.critical_path(path)), "warn" if path.unknown else "dim"))


def _words(place: Place) -> tuple[str, ...]:
    """Return the texts searched by `find`."""
    name = f"Layer {place.name}" if place.kind is NodeKind.LAYER else place.name
    return (name,) if place.category is None else (name, place.category.display_name)


class PathLine(SourceDrawing):
    """One line about the critical path; hidden if everything is one sequence."""

    def show_source(self, source: SourceView) -> None:
        self.display = source.critical_path is not None
        super().show_source(source)

    def draw(self, width: int, height: int) -> list[Line]:
        path = self._source.critical_path if self._source else None
        return [fit_line(path_line(path), width)] if path else []


class TreeTable(Table[TreeRow]):
    """The tree's table. Its head shows the sort column, and a click on it requests a different order."""

    sort_by = ""  # the title of a column; "": in execution order
    descending = True

    class HeadClicked(Message):
        """The user requests the order of that column."""

        def __init__(self, title: str) -> None:
            super().__init__()
            self.title = title

    def draw_head(self, placed: Sequence[Placed[TreeRow]]) -> Line:
        return head_line(placed, self.sort_by, self.descending)

    def choose_column(self, column: Column[TreeRow]) -> None:
        self.post_message(self.HeadClicked(column.title))

    @property
    def orders(self) -> list[str]:
        """The columns by which children can be sorted now."""
        return ["", *(column.title for column in self.visible_columns if column.sort_key is not None)]


class Graph(View):
    """The kernels that ran for each brick of each layer."""

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
        "under the cursor: its figures and, of a layer or a brick, what is known of that in all layers."
    )
    columns_doc = tuple(
        (column.title, column.doc) for column in graph_columns((), tuple, slack=True, burst=True, changes={})
    )

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "toggle_fold", "fold/unfold"),
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
        Binding("K", "app.kernels", "kernels"),  # works everywhere, listed here for the footer
    ]

    def compose(self) -> ComposeResult:
        self._unfolded: frozenset[int] = frozenset()
        self._fold_state_of = ""
        self._places: Sequence[Place] = ()
        self._drawn: tuple[Sequence[Place], frozenset[int]] | None = None  # the inputs of the table's rows
        self._ranks: dict[int, float] | None = None  # of nodes, in sort order; None: in execution order
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
        self._places = places_of(source.graph)
        self._table.columns = _columns_of(source, lambda: self._table.rows)
        self._path.show_source(source)
        if self._fold_state_of != source.key and self._places:
            self._fold_state_of = source.key
            self._unfolded = self._first_layers()
        self._show_tree()
        self._lay_out()

    def _first_layers(self) -> frozenset[int]:
        """Return what is unfolded at first: the first layer and, next to the details, further layers that fit."""
        layers = [place.id for place in self._places if place.kind is NodeKind.LAYER] or [self._places[0].id]
        unfolded = frozenset(layers[:1])
        if self.app.size.width >= BESIDE:
            for count in range(2, len(layers) + 1):
                more = frozenset(layers[:count])
                if len(visible_rows(self._places, more)) > self.app.size.height - _AROUND:
                    break
                unfolded = more
        return unfolded

    def on_resize(self, event: Resize) -> None:
        self._lay_out()

    def on_table_moved(self, event: Table.Moved) -> None:
        self._show_detail()

    def _lay_out(self) -> None:
        """Show the details of the node under the cursor where rows would be blank."""
        width, height = self.size
        if not (width and height):
            return
        rows, lines = 1 + len(self._table.rows), height - self._filter.display - self._path.display
        is_beside = width >= BESIDE
        self._panes.set_class(is_beside, "-beside")
        self._detail.display = bool(self._table.rows) and (is_beside or lines - rows >= LEAST_LINES)
        self._table.styles.height = "1fr" if is_beside or not self._detail.display else rows
        self.call_after_refresh(self._show_detail)

    def let_go(self) -> None:
        self._detail.let_go()

    def _show_detail(self) -> None:
        row = self._table.current
        if self._detail.display and self.source is not None and row is not None:
            self._detail.show_node(rows_at(self.source.graph, [row.at])[0], self.source)

    def _show_tree(self) -> None:
        """Update the tree. Its rows depend on nodes and folding, not on measurements."""
        if self._drawn and self._drawn[0] is self._places and self._drawn[1] == self._unfolded:
            self._table.redraw()
            return
        if self._drawn is None or self._drawn[0] is not self._places:
            self._rank()
        self._drawn = self._places, self._unfolded
        self._table.show_rows(visible_rows(self._places, self._unfolded, self._ranks))

    def _rank(self) -> None:
        """Sort by the current figures."""
        self._ranks = None
        if self.source is None or not self._table.sort_by:
            return
        rows = visible_rows(self._places, frozenset(place.id for place in self._places))
        columns = _columns_of(self.source, lambda: rows)
        sort_key = next((column.sort_key for column in columns if column.title == self._table.sort_by), None)
        if sort_key is not None:
            sign = -1 if self._table.descending else 1
            self._ranks = {row.id: sign * float(sort_key(row)) for row in rows}

    def _sort_by(self, title: str, *, descending: bool) -> None:
        self._table.sort_by, self._table.descending = title, descending
        self._drawn = None
        self._show_tree()

    def action_sort(self, columns: int) -> None:
        """Sort siblings by the next column; after the last column, in execution order."""
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
        self._go_to_match(0)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._filter.display = bool(event.value)
        self._table.focus()

    def action_match(self, matches: int) -> None:
        """Go to the next matching node, folded or not; after the last, to the first."""
        self._go_to_match(matches)

    def _go_to_match(self, matches: int) -> None:
        """Move by `matches` matches from the cursor; 0 means the first match from there on."""
        looks_like = matcher(self._wanted)
        found = [at for at, place in enumerate(self._places) if any(looks_like(word) for word in _words(place))]
        if not self._wanted or not found:
            self._filter.show_found(f"0 of {len(self._places)}" if self._wanted else "")
            return
        here = self._table.current.at if self._table.current else 0
        before, up_to = bisect_left(found, here), bisect_right(found, here)
        number = {1: up_to, 0: before, -1: before - 1}[matches] % len(found)
        self._filter.show_found(f"{number + 1} of {len(found)}")
        self._show_place(found[number])

    def _show_place(self, at: int) -> None:
        """Unfold all ancestors of the node, and put the cursor on it."""
        parents = {place.id: place.parent for place in self._places}
        inside, parent = set[int](), self._places[at].parent
        while parent in parents:
            inside.add(parent)
            parent = parents[parent]
        self._set_unfolded(self._unfolded | inside)
        rows = [row.at for row in self._table.rows]
        if at in rows:
            self._table.move_to(rows.index(at))

    def _set_unfolded(self, unfolded: frozenset[int]) -> None:
        self._unfolded = unfolded
        self._show_tree()
        self._lay_out()

    def open_node(self, node: int) -> None:
        """Put the cursor on `node`, unfolded with all its ancestors."""
        outer = {place.id: place.parent for place in self._places}
        path, at = {node}, outer.get(node)
        while at is not None:
            path.add(at)
            at = outer.get(at)
        self._set_unfolded(self._unfolded | path)
        ids = [row.id for row in self._table.rows]
        if node in ids:
            self._table.move_to(ids.index(node))

    def action_toggle_fold(self) -> None:
        if (row := self._table.current) is not None and row.has_children:
            self._set_unfolded(self._unfolded ^ {row.id})

    def action_fold(self) -> None:
        """Fold this node; if it cannot be folded, go to its parent."""
        row = self._table.current
        if row is None:
            return
        if row.has_children and row.unfolded:
            self._set_unfolded(self._unfolded - {row.id})
        elif row.parent is not None:
            ids = [other.id for other in self._table.rows]
            self._table.move_to(ids.index(row.parent))

    def action_unfold(self) -> None:
        """Unfold this node; if it is unfolded, go to its first child."""
        row = self._table.current
        if row is None or not row.has_children:
            return
        if row.unfolded:
            self._table.action_move(1)
        else:
            self._set_unfolded(self._unfolded | {row.id})

    def action_toggle_all(self) -> None:
        """Unfold everything, or fold everything if something is unfolded."""
        everything = frozenset(place.id for place in self._places)
        self._set_unfolded(frozenset() if self._unfolded else everything)
