"""The renderers that return text, by their name. `to_csr` returns arrays, and `to_rich_tree` returns a Rich tree."""

from __future__ import annotations

from collections.abc import Callable

from cbtop.profiler.analysis.graph.dot import to_dot
from cbtop.profiler.analysis.graph.execution_graph import ExecutionGraph
from cbtop.profiler.analysis.graph.json_text import to_json
from cbtop.profiler.analysis.graph.tree import to_ascii_tree

RENDERERS: dict[str, Callable[[ExecutionGraph], str]] = {
    "ascii": to_ascii_tree,
    "dot": to_dot,
    "json": to_json,
}
