"""Counts the records that are not ordinary calls: amounts of work, calls stopped out of order, plain and cancelled
steps.
"""

from __future__ import annotations

import numpy as np

from cbtop.profiler.analysis.histograms import Column
from cbtop.profiler.analysis.sparse_columns import SparseColumns
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_CANCELLED, FLAG_LOOSE, FLAG_PLAIN, FLAG_UNCOUNTED, UNKNOWN_AMOUNT
from cbtop.protocol.ring_reader import Batch


def take_amounts(sparse: SparseColumns, batch: Batch, step_of: Column) -> Batch:
    """Add up the FLOP and bytes of calls and the sequences of steps. Also count calls with unknown elements.

    Returns all other records.
    """
    amounts = batch.are(FLAG_AMOUNTS)
    if amounts.any():
        part, batch = batch.only(amounts), batch.only(~amounts)
        sparse.add("amounts", part.node, np.ones(len(part.node), np.int64))
        is_step = step_of[part.node] == part.node
        for unit, of_steps, amount in (("flops", "sequences", part.start_ns), ("bytes", "kept", part.end_ns)):
            for name, whose in ((unit, ~is_step), (of_steps, is_step)):
                given = whose & (amount != UNKNOWN_AMOUNT)
                sparse.add(name, part.node[given], amount[given])
                sparse.add(f"{name}_given", part.node[given], np.ones(int(given.sum()), np.int64))
                if name is of_steps:
                    for node, value in zip(part.node[given].tolist(), amount[given].tolist(), strict=True):
                        sparse.reach(f"{name}_least", node, value)
                        sparse.reach(f"{name}_most", node, value)
    uncounted = batch.node[((batch.flags & FLAG_UNCOUNTED) != 0) & ~batch.are(FLAG_CANCELLED)]
    sparse.add("uncounted", uncounted, np.ones(len(uncounted), np.int64))
    return batch


def take_loose(sparse: SparseColumns, batch: Batch) -> None:
    """Add up the calls that were stopped twice, out of order or late."""
    loose = batch.only(batch.are(FLAG_LOOSE))
    sparse.add("loose", loose.node, np.ones(len(loose.node), np.int64))
    sparse.add("loose_ns", loose.node, loose.end_ns - loose.start_ns)


def take_plain(sparse: SparseColumns, batch: Batch) -> None:
    """Add up the plain steps (timed as a whole, without bricks)."""
    plain = batch.only(batch.are(FLAG_PLAIN))
    uncounted = plain.node[(plain.flags & FLAG_UNCOUNTED) != 0]
    sparse.add("plain", plain.node, np.ones(len(plain.node), np.int64))
    sparse.add("plain_ns", plain.node, plain.end_ns - plain.start_ns)
    sparse.add("plain_tokens", plain.node, plain.elements)
    sparse.add("plain_uncounted", uncounted, np.ones(len(uncounted), np.int64))


def leave_out_cancelled(sparse: SparseColumns, batch: Batch) -> Batch:
    """Count the cancelled steps in a batch, and return the batch without their records."""
    cancelled = batch.are(FLAG_CANCELLED)
    if not cancelled.any():
        return batch
    sparse.add("cancelled", batch.node[cancelled], np.ones(int(cancelled.sum()), np.int64))
    return batch.only(~cancelled)
