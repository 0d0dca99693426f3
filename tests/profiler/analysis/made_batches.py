"""Makes batches of records, in the form in which the reader of a ring returns records."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cbtop.protocol.ring import FLAG_FAILED
from cbtop.protocol.ring_reader import Batch

NO_STEPS = np.full(64, -1, np.int64)
# For each node: its step, and the part of the step that contains it. Node 1 is a step, and node 2 is a brick in it.
STEP_AND_BRICK = np.array([-1, 1, 1]), np.array([-1, -1, 1])


def batch(rows: list[tuple[int, int, int]], failed: bool = False) -> Batch:
    """Return a batch of records. Each row is (node, duration, elements)."""
    node, duration, elements = np.array(rows, np.int64).reshape(-1, 3).T
    start = np.arange(len(node), dtype=np.int64)
    return Batch(node, np.full(len(node), FLAG_FAILED if failed else 0), start, start + duration, elements, 0)


def records(*rows: tuple[int, int, int], flags: Sequence[int] = ()) -> Batch:
    """Return a batch of records. Each row is (node, start, end)."""
    node, start, end = np.array(rows, np.int64).T
    return Batch(
        node, np.array(flags or [0] * len(rows), np.int64), start, end, np.zeros(len(rows), np.int64), overwritten=0
    )
