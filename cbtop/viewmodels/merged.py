"""The types of a merged view: its members, and the bricks of each rank next to each other."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.stall import StallView


@dataclass(frozen=True, slots=True)
class TroubledMember:
    """A member of a merge that is gone or makes no progress."""

    name: str
    state: str
    reason: str  # why it is gone
    stall: StallView | None  # why it makes no progress


@dataclass(frozen=True, slots=True)
class MergedView:
    """The members of a merged view."""

    mode: MergeMode
    members: tuple[str, ...]  # `rank 3`, or `pid 7` without a rank
    keys: tuple[str, ...]
    left_out: int  # sources of the model that are silent, not read yet, or without room
    running: int = 0  # running members that were watched; if any, the recent window (not a range) is theirs
    # Members that are gone, suspended or stalled, besides the one with the shown state; the worst first.
    troubled: tuple[TroubledMember, ...] = ()
    together: int = 1  # members that report to compute each token together; the rate counts once
    may_share_tokens: bool = False  # they exchange results, and none reports whether tokens are shared


@dataclass(frozen=True, slots=True)
class RankColumn:
    """One of several ranks shown next to each other."""

    name: str
    key: str
    pid: int
    host: str
    rank: int | None
    steps: int | None
    step_us: float | None  # mean


@dataclass(frozen=True, slots=True)
class RankRow:
    """One brick in every rank: its exclusive time per RanksView.unit; derived."""

    brick: str
    category: str
    us: tuple[float | None, ...]
    slowest: int  # index of the rank
    spread_percent: float | None  # the slowest over the median


@dataclass(frozen=True, slots=True)
class RanksView:
    """Bricks by rank."""

    unit: str  # "step", or "call" for processes without steps: the times are per this unit
    ranks: tuple[RankColumn, ...]
    rows: tuple[RankRow, ...]
