"""The layer of each node, and how many layers a comparison of layers needs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.protocol.vocabulary import NodeKind

BETWEEN = "between bricks"  # the name of the time of a layer or step outside its bricks
MIN_PEERS = 3  # layers with the same stack and bricks, itself included: a median of two is useless


def layer_of_nodes(totals: PhaseTotals) -> NDArray[np.int64]:
    """Return by node id the outermost layer around it: itself for such a layer, 0 without one."""
    table = totals.table
    parent_of, kind_of = table.column("parent_of"), table.column("kind_of")
    found = np.zeros(len(table) + 1, np.int64)
    for ids in totals.inside.by_depth:
        outer = found[parent_of[ids]]
        found[ids] = np.where((outer == 0) & (kind_of[ids] == NodeKind.LAYER), ids, outer)
    return found
