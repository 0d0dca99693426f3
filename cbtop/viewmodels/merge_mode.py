"""The ways to merge sources. This module imports nothing else, because the command line needs it."""

from enum import StrEnum


class MergeMode(StrEnum):
    """The ways to show several sources as one."""

    SUM = "sum"
    MAX = "max"
    RANKS = "ranks"
