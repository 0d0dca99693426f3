"""The edges of the graph as compressed sparse rows, in arrays for numeric work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbtop.profiler.analysis.graph.nodes import EdgeKind
from cbtop.profiler.analysis.graph.recorded_graph import RecordedGraph

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EDGE_CODES = {kind: code for code, kind in enumerate(EdgeKind)}


@dataclass(frozen=True, slots=True)
class Csr:
    """The edges of a graph as arrays. The edges of node n are the entries from row_offsets[n] up to row_offsets[n +
    1] (exclusive).

    - row_offsets: (nodes + 1,) i64. - columns: (edges,) i64, the destinations. - kinds: (edges,) u8, see EDGE_CODES.
      - weights: (edges,) f64. - dropped: nodes and edges that did not fit into the graph.
    """

    row_offsets: NDArray[np.int64]
    columns: NDArray[np.int64]
    kinds: NDArray[np.uint8]
    weights: NDArray[np.float64]
    dropped: int


def to_csr(graph: RecordedGraph) -> Csr:
    """Return the graph's edges, sorted by source. Edges with the same source are in the order of `graph.edges()`."""
    import numpy as np  # importing NumPy takes 0.1 s, which would delay the start of a profiled process

    edges = list(graph.edges())
    sources = np.fromiter((edge.source for edge in edges), np.int64, len(edges))
    order = np.argsort(sources, kind="stable")
    row_offsets = np.zeros(len(graph.nodes) + 1, np.int64)
    np.cumsum(np.bincount(sources, minlength=len(graph.nodes)), out=row_offsets[1:])
    return Csr(
        row_offsets=row_offsets,
        columns=np.fromiter((edge.destination for edge in edges), np.int64, len(edges))[order],
        kinds=np.fromiter((EDGE_CODES[edge.kind] for edge in edges), np.uint8, len(edges))[order],
        weights=np.fromiter((edge.weight for edge in edges), np.float64, len(edges))[order],
        dropped=graph.dropped,
    )
