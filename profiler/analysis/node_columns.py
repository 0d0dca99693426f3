"""The columns of the statistics of nodes."""

import numpy as np

COLUMNS = ("count", "failed", "total_ns", "min_ns", "max_ns", "elements", "closed_ns")
SUMS = tuple(name for name in COLUMNS if name not in ("min_ns", "max_ns"))
NO_MINIMUM = np.iinfo(np.int64).max
# Columns that few nodes have. `uncounted`: calls with an unknown number of elements. `amounts`: records of `flops`
# and `bytes`; `_given` counts those that had the figure. `cancelled`: cancelled steps; `cancelled_ns`: time in such
# steps. `loose`: calls stopped twice, out of order or late; `loose_ns`: their time, which is in no sum. `overlap_ns`:
# of a node with parts, in steps that ended, the time in which two of the parts ran at once, counted for each beyond
# the first. The rest is about steps:
# - `union_ns`: the time in which at least one ran; `first_ns`, `last_ns`: when the first began and the last ended.
# - `over`: steps with parts that took longer than the step; `over_ns`: by how much.
# - `crowded`: steps in the shared lane.
# - `sequences`: the sequences each worked on; `kept`: the positions each sequence had before. Both are sums over the
#   steps that give them; `_given` is the number of those steps, `_least` and `_most` the extremes.
# - `plain`: steps without a recorded inside; `plain_ns`: their time; `plain_tokens`: their tokens; `plain_uncounted`:
#   those with an unknown number of tokens.
# - `squared_tokens`: sum of each step's squared tokens, which tells with count and tokens if all had the same number.
SPARSE_COLUMNS = (
    "uncounted",
    "amounts",
    "flops",
    "flops_given",
    "bytes",
    "bytes_given",
    "cancelled",
    "cancelled_ns",
    "union_ns",
    "first_ns",
    "last_ns",
    "loose",
    "loose_ns",
    "over",
    "over_ns",
    "crowded",
    "sequences",
    "sequences_given",
    "sequences_least",
    "sequences_most",
    "kept",
    "kept_given",
    "kept_least",
    "kept_most",
    "plain",
    "plain_ns",
    "plain_tokens",
    "plain_uncounted",
    "overlap_ns",
    "squared_tokens",
)
# Stands for all step nodes together in `union_ns`, because two phases may run at the same time, and for all nodes in
# `first_ns`. On the wire these two have fields of their own.
ANY_STEP = 0
MOMENTS = ("first_ns", "last_ns")
EXTREMES = tuple(f"{of}_{end}" for of in ("sequences", "kept") for end in ("least", "most"))
NO_TOTALS = frozenset(MOMENTS + EXTREMES)
