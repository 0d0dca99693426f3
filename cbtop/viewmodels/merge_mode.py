"""The ways to merge sources. The command line asks for them, so this loads nothing else."""

from enum import StrEnum


class MergeMode(StrEnum):
    """The ways to show several sources as one."""

    SUM = "sum"
    MAX = "max"
    RANKS = "ranks"
