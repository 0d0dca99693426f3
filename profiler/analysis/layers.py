"""Finds the layer of each node, and states how many layers a comparison of layers needs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.protocol.vocabulary import NodeKind

BETWEEN = "between bricks"  # name for the part of a layer's or step's time that is outside of its bricks
# To compare layers, at least this many layers must have the same stack and bricks. The median of two layers shows no
# outlier.
MIN_PEERS = 3


def layer_of_nodes(totals: PhaseTotals) -> NDArray[np.int64]:
    """Return the outermost layer around each node, by node id. A node outside of all layers has 0.

    An outermost layer has its own id.
    """
    table = totals.table
    parent_of, kind_of = table.column("parent_of"), table.column("kind_of")
    found = np.zeros(len(table) + 1, np.int64)
    for ids in totals.inside.by_depth:
        outer = found[parent_of[ids]]
        found[ids] = np.where((outer == 0) & (kind_of[ids] == NodeKind.LAYER), ids, outer)
    return found
