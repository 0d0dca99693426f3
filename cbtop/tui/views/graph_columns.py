"""The columns of the graph's tree: a node's name, figures, share, and change since the baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cbtop import units
from cbtop.comparison.items import Place
from cbtop.comparison.noise import Change
from cbtop.protocol.vocabulary import NodeKind
from cbtop.text import kernel_text
from cbtop.text.statistics import NODE_COLUMNS, NODE_SHARE_COLUMNS, PATH_COLUMNS, Of, statistic
from cbtop.tui.views.baseline import change_role, change_text
from cbtop.tui.views.figures import figure, figure_columns
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.views.tree_rows import TreeRow
from cbtop.tui.widgets.bars import bar
from cbtop.tui.widgets.columns import Column
from cbtop.tui.widgets.lines import Line, clean
from cbtop.viewmodels.graph import GraphRow, has_burst, largest_share, rows_at
from cbtop.viewmodels.source import SourceView

_SLACK = statistic("slack_us", Of.NODE)
# This many rows are made together, because the neighbours of a visible row are probably visible, too.
DRAWN_TOGETHER = 32


class _Cells:
    """Draws the cells of the table of `graph`. The measurements of a row are read when it is first drawn."""

    def __init__(
        self,
        graph: Sequence[GraphRow],
        rows: Callable[[], Sequence[TreeRow]],
        changes: Mapping[Place, Change],
    ) -> None:
        self._graph = graph
        self._rows = rows
        self._changes = changes
        self._largest_percent = max(largest_share(graph), 1e-9)
        self._made: dict[int, GraphRow] = {}

    def of(self, row: TreeRow) -> GraphRow:
        """Return a row of the tree together with its measurements."""
        made = self._made
        if row.at not in made:
            after = self._rows()[row.line + 1 : row.line + DRAWN_TOGETHER]
            places = [row.at, *(other.at for other in after)]
            made.update(zip(places, rows_at(self._graph, places), strict=True))
        return made[row.at]

    def node(self, row: TreeRow, width: int) -> Line:
        """Draw the tree connectors, the name and the launch configuration of a node."""
        shown = self.of(row)
        mark = ("▾ " if row.unfolded else "▸ ") if row.has_children else "  "
        name, _, rest = clean(shown.label).partition("  ")
        rest = _without_time(rest, shown)
        if shown.copied_gb_per_sec is not None:
            rest += f"  {units.number(shown.copied_gb_per_sec)} GB/s"
        if shown.burst is not None:
            rest += f"  {kernel_text.in_burst(shown.burst)}"
        category = shown.category
        role = CATEGORY_LOOKS[category].role if category is not None else "strong" if row.parent is None else ""
        return ((row.connectors, "faint"), (mark, "accent"), (name, role), (f"  {rest}" if rest else "", "dim"))

    def share(self, row: TreeRow, width: int) -> Line:
        """Draw the bar of a node's share of wall time. The largest share in the graph fills the column."""
        category, percent = self.of(row).category, self.of(row).percent
        role = CATEGORY_LOOKS[category].role if category is not None else "accent"
        return bar(None if percent is None else percent / self._largest_percent, width, role)

    def slack(self, row: TreeRow) -> Line:
        """Draw the slack of a node: how much later it could start. A node on the critical path has the text
        `critical`.
        """
        shown = self.of(row)
        return (("critical", "warn"),) if shown.on_critical_path else figure(_SLACK.bare(shown))

    def burst(self, row: TreeRow, width: int) -> Line:
        """Draw the mean time of the kernel's launches in the last burst (a few steps that were recorded on
        request).
        """
        shown = self.of(row)
        if shown.kind is not NodeKind.KERNEL:
            return figure(units.NONE_THERE)
        return figure(units.number(shown.burst.mean_ns / 1e3 if shown.burst else None))

    def change(self, row: TreeRow, width: int) -> Line:
        """Draw how the node's time has changed since the baseline."""
        change = self._change_of(row)
        return figure(change_text(change), change_role(change))

    def change_percent(self, row: TreeRow) -> float:
        """Return the node's change since the baseline in percent, for sorting. A node without a change comes last."""
        change = self._change_of(row)
        return -1e9 if change is None or change.percent is None else change.percent

    def _change_of(self, row: TreeRow) -> Change | None:
        place = self.of(row).place
        return self._changes.get(place) if place is not None else None


def _without_time(values: str, row: GraphRow) -> str:
    """Return the figures in a node's label. The mean time is left out, because it has its own column."""
    if row.kind not in (NodeKind.BRICK, NodeKind.TRANSFER):
        return values
    return " ".join(value for value in values.split(" ") if value != units.NOT_MEASURED and not value.endswith("µs"))


def graph_columns(
    graph: Sequence[GraphRow],
    rows: Callable[[], Sequence[TreeRow]],
    *,
    slack: bool,
    burst: bool,
    changes: Mapping[Place, Change] | None = None,
) -> tuple[Column[TreeRow], ...]:
    """Return the columns for the tree of `graph`. `rows` returns the rows of the tree's table.

    Some columns are optional: the slack if a node is off the critical path, the mean time in the last burst (steps
    that were recorded on request), and the change since the baseline.
    """
    cells = _Cells(graph, rows, changes or {})
    in_burst = Column("burst µs", 8, 1, cells.burst, "mean µs of one launch in the last burst: in no other time")
    since_baseline = Column(
        "Δ",
        9,
        3,
        cells.change,
        "of a layer or a brick in it (all it is there, where it runs several times): exclusive µs/token beside the "
        "baseline's (`b`), as in the bricks; n/a of a kernel, and where a brick runs in layers and outside (derived)",
        sort_key=cells.change_percent,
    )
    share = Column(
        "share",
        8,
        5,
        cells.share,
        "wall %, drawn; the largest fills it",
        align="left",
        stretch=1,
        max_width=24,
        is_drawn=True,
    )
    return (
        Column(
            "layer → brick → kernel", 34, 0, cells.node, "the node; ▸ folded, ▾ unfolded", align="left", stretch=5
        ),
        *((in_burst,) if burst else ()),
        *figure_columns(NODE_COLUMNS, row_of=cells.of),
        *(figure_columns(PATH_COLUMNS, row_of=cells.of, cells={"slack_us": cells.slack}) if slack else ()),
        share,
        *figure_columns(NODE_SHARE_COLUMNS, row_of=cells.of),
        *(() if changes is None else (since_baseline,)),
    )


def columns_of(source: SourceView, rows: Callable[[], Sequence[TreeRow]]) -> tuple[Column[TreeRow], ...]:
    """Return the columns for the tree of `source`. `rows` returns the rows of its table."""
    path = source.critical_path
    has_slack = path is not None and path.nodes < path.timed_nodes
    found = source.baseline if source.merged is None else None
    changes = None if found is None else found.places
    return graph_columns(source.graph, rows, slack=has_slack, burst=has_burst(source.graph), changes=changes)
