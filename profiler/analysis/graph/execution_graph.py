"""ExecutionGraph: what ran inside what, and its critical path, slack and renderings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbtop.profiler.analysis.graph.analysis import CriticalPath, critical_path, critical_path_summary
from cbtop.profiler.analysis.graph.csr import Csr, to_csr
from cbtop.profiler.analysis.graph.dot import to_dot
from cbtop.profiler.analysis.graph.json_text import to_json
from cbtop.profiler.analysis.graph.recorded_graph import RecordedGraph
from cbtop.profiler.analysis.graph.rich_tree import to_rich_tree
from cbtop.profiler.analysis.graph.roofline import RooflineDistances, roofline_distance
from cbtop.profiler.analysis.graph.svg import to_html, to_svg
from cbtop.profiler.analysis.graph.tree import TreeNode, to_ascii_tree, to_tree_node

if TYPE_CHECKING:
    from rich.tree import Tree


class ExecutionGraph(RecordedGraph):
    """A graph of layers, bricks and kernels, as `BrickProfiler.execution_graph()` returns it.

        graph = profiler.execution_graph()
        print(graph.to_ascii_tree())
        print(graph.critical_path_summary())

    RecordedGraph has the methods that add nodes and edges.
    """

    __slots__ = ()

    def to_ascii_tree(self) -> str:
        """Return the graph as text: a line for each node, with `├── ` and `└── ` before its name."""
        return to_ascii_tree(self)

    def to_tree_node(self) -> TreeNode:
        """Return the graph as a tree of labels with one root."""
        return to_tree_node(self)

    def to_rich_tree(self) -> Tree:
        """Return the graph as a `rich.tree.Tree`, to print it in colour. Needs Rich."""
        return to_rich_tree(self)

    def to_dot(self) -> str:
        """Return the graph in the language of Graphviz: `dot -Tsvg` draws it."""
        return to_dot(self)

    def to_svg(self) -> str:
        """Return the graph as an SVG element: blocks as wide as their time. Returns "" if no node has a time."""
        return to_svg(self)

    def _repr_html_(self) -> str:
        """Return the drawing and the tree. Notebooks call this method to show the graph."""
        return to_html(self)

    def to_json(self) -> str:
        """Return `{"nodes": […], "edges": […], "dropped": 0}` as ASCII text, with times in ns and sizes in bytes.

        Raises ValueError if a time is not finite.
        """
        return to_json(self)

    def to_csr(self) -> Csr:
        """Return the edges as NumPy arrays in compressed sparse rows. Needs NumPy."""
        return to_csr(self)

    def critical_path(self) -> CriticalPath:
        """Return the longest chain of nodes that wait for each other, with exclusive times and slack.

        Raises CycleError (a ValueError) for a cycle.
        """
        return critical_path(self)

    def compute_slack(self) -> dict[int, float]:
        """Return for each node id how many ns later the node could start without delaying the end of the graph.

        Nodes without exclusive time are left out. Raises CycleError.
        """
        return critical_path(self).slack_ns

    def critical_path_summary(self) -> str:
        """Return the critical path, and the nodes with the most slack, as text. Raises CycleError."""
        return critical_path_summary(self)

    def roofline_distance(self, tflops: float, gb_per_sec: float) -> RooflineDistances:
        """Return how far each brick and kernel, and all of them together, are from a roof. 0 means that the roof is
        reached.

        `tflops` is the peak in TFLOP/s, and `gb_per_sec` the peak bandwidth in GB/s. Raises ValueError unless both
        are positive.
        """
        return roofline_distance(self, tflops, gb_per_sec)
