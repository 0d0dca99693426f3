"""Pure functions from the store's snapshot to frozen rows, points and sums: what every view and report draws."""

from enum import StrEnum


class MergeMode(StrEnum):
    """How several sources are shown as one."""

    SUM = "sum"
    MAX = "max"
    RANKS = "ranks"
