"""Types of a merged view: its members, and bricks in a column per rank."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.stall import StallView


@dataclass(frozen=True, slots=True)
class TroubledMember:
    """A member of a merge that is gone or makes no progress."""

    name: str
    state: str
    reason: str  # Why the member is gone.
    stall: StallView | None  # Why the member makes no progress.


@dataclass(frozen=True, slots=True)
class MergedView:
    """The members of a merged view."""

    mode: MergeMode
    members: tuple[str, ...]  # Names of the members: `rank 3`, or `pid 7` without a rank.
    keys: tuple[str, ...]
    # Number of sources of this model that are not merged, because they are silent, not read yet, or too large.
    left_out: int
    # Number of running members that were watched. If there are any, the recent window covers only these.
    running: int = 0
    # Members that are gone, suspended or stalled, the worst first, except the one whose state is shown.
    troubled: tuple[TroubledMember, ...] = ()
    together: int = 1  # Number of members that report to compute each token together. Rates count such a token once.
    may_share_tokens: bool = False  # Whether members exchange results but do not report whether they share tokens.


@dataclass(frozen=True, slots=True)
class RankColumn:
    """One of several ranks that are shown next to each other."""

    name: str
    key: str
    pid: int
    host: str
    rank: int | None
    steps: int | None
    step_us: float | None


@dataclass(frozen=True, slots=True)
class RankRow:
    """One brick in every rank. Times are exclusive, per RanksView.unit (derived)."""

    brick: str
    category: str
    us: tuple[float | None, ...]
    slowest: int
    spread_percent: float | None  # The slowest rank's excess over the median rank, in percent.


@dataclass(frozen=True, slots=True)
class RanksView:
    """The time of each brick in each rank."""

    unit: str  # "step", or "call" for processes without steps. Times are per this unit.
    ranks: tuple[RankColumn, ...]
    rows: tuple[RankRow, ...]
