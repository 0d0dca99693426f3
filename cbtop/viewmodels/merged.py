"""The types of a merged view: its members, and a table of bricks with a column per rank."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.stall import StallView


@dataclass(frozen=True, slots=True)
class TroubledMember:
    """A member of a merge that is gone or makes no progress."""

    name: str
    state: str
    reason: str  # why the member is gone; "" if it is not
    stall: StallView | None  # why the member makes no progress; None if it does


@dataclass(frozen=True, slots=True)
class MergedView:
    """The sources that a merged view combines, and their problems."""

    mode: MergeMode
    members: tuple[str, ...]  # names of the merged processes, such as `rank 3`, or `pid 7` without a rank
    keys: tuple[str, ...]
    # Number of this model's sources that are not in the merge: silent, not read yet, or too large.
    left_out: int
    # Number of running members with a window. If above 0, the recent window is only of these.
    running: int = 0
    # Members that are gone, suspended or stalled, worst first. The first of these is left out, because its state is
    # already shown as the state of the merge.
    troubled: tuple[TroubledMember, ...] = ()
    # Number of members that compute each token together, by their reports. Rates count such a token once.
    together: int = 1
    # whether members exchange data without reporting whether they compute the same tokens
    may_share_tokens: bool = False


@dataclass(frozen=True, slots=True)
class RankColumn:
    """One rank as a column in the table of bricks and ranks."""

    name: str
    key: str
    pid: int
    host: str
    rank: int | None
    steps: int | None
    step_us: float | None


@dataclass(frozen=True, slots=True)
class RankRow:
    """The exclusive times of a brick in every rank, per `RanksView.unit` (derived)."""

    brick: str
    category: str
    us: tuple[float | None, ...]
    slowest: int
    # how much longer the slowest rank takes than the median rank, in percent of the median
    spread_percent: float | None


@dataclass(frozen=True, slots=True)
class RanksView:
    """The table with the time of each brick in each rank."""

    unit: str  # "step", or "call" without steps; the unit of times
    ranks: tuple[RankColumn, ...]
    rows: tuple[RankRow, ...]
