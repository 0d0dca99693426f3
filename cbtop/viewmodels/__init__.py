"""Pure functions from the store's data to frozen rows, points and sums, which every view and report draws."""

from enum import StrEnum


class MergeMode(StrEnum):
    """The ways to show several sources as one."""

    SUM = "sum"
    MAX = "max"
    RANKS = "ranks"
