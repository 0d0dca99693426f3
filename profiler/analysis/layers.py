"""Finds the layer of each node, and states how many layers a comparison of layers needs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.protocol.vocabulary import NodeKind

BETWEEN = "between bricks"  # the part of a layer's or step's time outside of its bricks
# Layers are compared if at least this many have the same stack and bricks. The median of two would show no outlier.
MIN_PEERS = 3


def layer_of_nodes(totals: PhaseTotals) -> NDArray[np.int64]:
    """Return the outermost layer around each node by node id, or 0 outside of layers.

    An outermost layer has its own id.
    """
    table = totals.table
    parent_of, kind_of = table.column("parent_of"), table.column("kind_of")
    found = np.zeros(len(table) + 1, np.int64)
    for ids in totals.inside.by_depth:
        outer = found[parent_of[ids]]
        found[ids] = np.where((outer == 0) & (kind_of[ids] == NodeKind.LAYER), ids, outer)
    return found
