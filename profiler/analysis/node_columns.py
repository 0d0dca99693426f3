"""The names of the columns in the statistics of nodes."""

import numpy as np

COLUMNS = ("count", "failed", "total_ns", "min_ns", "max_ns", "elements", "closed_ns")
SUMS = tuple(name for name in COLUMNS if name not in ("min_ns", "max_ns"))
NO_MINIMUM = np.iinfo(np.int64).max
# Columns that few nodes have:
# - `uncounted`: number of calls with an unknown number of elements.
# - `amounts`: number of records of `flops` and `bytes`. `flops_given` and `bytes_given` count the records with this
#   value.
# - `cancelled`: number of cancelled steps. `cancelled_ns`: time in cancelled steps.
# - `loose`: number of calls stopped twice, out of order or late. `loose_ns`: time of these calls, which is in no
#   other sum.
# - `overlap_ns`: time when parts of the node ran at once, in ended steps. If n parts run at once, the time counts n -
#   1 times.
# The other columns are about steps:
# - `union_ns`: time when at least one step ran. `first_ns`, `last_ns`: begin of the first and end of the last step.
# - `over`: number of steps with parts that took longer than the step. `over_ns`: sum of this excess.
# - `crowded`: number of steps in the shared lane.
# - `sequences`: sum over steps of the number of sequences. `kept`: sum over steps of the number of cached positions
#   per sequence. `_given` is the number of steps with this value. `_least` and `_most` are the extremes.
# - `plain`: number of plain steps (timed as a whole, without their bricks). `plain_ns`, `plain_tokens`: their time
#   and tokens. `plain_uncounted`: number of plain steps with an unknown number of tokens.
# - `squared_tokens`: sum of the squared tokens of each step. Compared with count and tokens, it shows whether all
#   steps had the same number of tokens.
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
# Key for values of all steps together. `union_ns`: time when a step of any phase ran, because two phases may run at
# once. `first_ns`: begin of the first record of any node. In messages, both are separate fields.
ANY_STEP = 0
MOMENTS = ("first_ns", "last_ns")
EXTREMES = tuple(f"{of}_{end}" for of in ("sequences", "kept") for end in ("least", "most"))
NO_TOTALS = frozenset(MOMENTS + EXTREMES)
