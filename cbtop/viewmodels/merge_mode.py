"""The ways to merge sources.

This module imports no other module of cbtop, so that the command line loads fast.
"""

from enum import StrEnum


class MergeMode(StrEnum):
    """The ways to show several sources in one view."""

    SUM = "sum"
    MAX = "max"
    RANKS = "ranks"
