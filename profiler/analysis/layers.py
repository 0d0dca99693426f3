"""Finds the layer of each node, and states how many layers a comparison of layers needs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.protocol.vocabulary import NodeKind

BETWEEN = "between bricks"  # name for the time of a layer or step outside its bricks
MIN_PEERS = 3  # minimum number of layers with the same stack and bricks, because a median of two shows no outlier


def layer_of_nodes(totals: PhaseTotals) -> NDArray[np.int64]:
    """Return the outermost layer around each node, by node id. The layer is 0 for a node outside of all layers.

    For an outermost layer, this is the layer itself.
    """
    table = totals.table
    parent_of, kind_of = table.column("parent_of"), table.column("kind_of")
    found = np.zeros(len(table) + 1, np.int64)
    for ids in totals.inside.by_depth:
        outer = found[parent_of[ids]]
        found[ids] = np.where((outer == 0) & (kind_of[ids] == NodeKind.LAYER), ids, outer)
    return found
