"""Pure functions from the store's data to frozen rows, points and sums, which every view and report draws."""

from enum import StrEnum


class MergeMode(StrEnum):
    """How several sources are shown as one."""

    SUM = "sum"
    MAX = "max"
    RANKS = "ranks"
