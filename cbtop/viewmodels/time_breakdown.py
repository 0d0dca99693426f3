"""The time breakdown of steps: the parts of their wall time, the times in parallel to it, and whether the parts add
up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cbtop.profiler.analysis.time_breakdown import Beside, TimeBreakdown
from cbtop.protocol.vocabulary import BY_KERNELS, IDLE_BEFORE
from cbtop.viewmodels.time_range import NamedTime

# If a step was recorded by the times of its kernels, these are the names of the time without a running kernel.
GPU_WAITED, NOT_ITS_KERNELS = "GPU waited", "GPU waited, or ran what came before"


@dataclass(frozen=True, slots=True)
class BesideView:
    """Calls that are not part of the wall time of steps: their number and the sum of their times (derived)."""

    calls: int
    us: float
    by_name: tuple[NamedTime, ...]  # sum of the times by the name of the call, the longest first


@dataclass(frozen=True, slots=True)
class TimeBreakdownView:
    """The wall time of a phase's ended, recorded steps: wall = bricks + gaps - overlap + unattributed.

    Other fields are not part of this sum. If bricks overlap, for example on two streams of a device, `bricks_us`
    contains the full time of each brick. `close` is false if parts are longer than their whole. `over` is the number
    of steps that are shorter than the sum of their parts. `over_us` is the total of these differences. `exceeded` has
    the layers and bricks that are shorter than the sum of their parts.
    """

    wall_us: float
    bricks_us: float
    gaps: tuple[NamedTime, ...]
    gaps_us: float
    unattributed_us: float
    residual_percent: float | None
    open_us: float  # time that bricks took in steps which have not ended
    # Time that is counted several times because bricks overlap. If n parts overlap, their common time counts n - 1
    # times.
    overlap_us: float = 0.0
    close: bool = True
    over: int = 0  # number of steps that are shorter than the sum of their parts
    over_us: float = 0.0  # total time that the parts of these steps are longer than the steps themselves
    # layers and bricks that are shorter than the sum of their parts, each with the difference
    exceeded: tuple[NamedTime, ...] = ()
    # Number of calls that were stopped twice, out of order or after their step. They are not part of the breakdown.
    unmatched_calls: int = 0
    unmatched_us: float = 0.0
    cancelled: int = 0  # Number of cancelled or renamed steps. Their bricks are not part of the breakdown.
    # Number of steps with unknown bricks, because at least fifteen other steps ran at the same time.
    in_shared_lane: int = 0
    adopted: BesideView | None = None  # work that other threads or tasks did for these steps


def books_view(books: TimeBreakdown | None, measured: str = "") -> TimeBreakdownView | None:
    """Return the time breakdown in µs, or None for a process without steps. `measured` is the backend that the
    manifest names.
    """
    if books is None:
        return None
    unattributed_ns = books.unattributed_ns
    gaps_ns = dict(books.gaps_ns)
    if BY_KERNELS in measured and unattributed_ns > 0:
        name = GPU_WAITED if BY_KERNELS + IDLE_BEFORE in measured else NOT_ITS_KERNELS
        gaps_ns[name], unattributed_ns = unattributed_ns, 0
    return TimeBreakdownView(
        wall_us=books.wall_ns / 1e3,
        bricks_us=books.bricks_ns / 1e3,
        gaps=_named(gaps_ns.items()),
        gaps_us=sum(gaps_ns.values()) / 1e3,
        unattributed_us=unattributed_ns / 1e3,
        residual_percent=100 * unattributed_ns / books.wall_ns if books.wall_ns else None,
        open_us=books.open_ns / 1e3,
        overlap_us=books.overlap_ns / 1e3,
        close=books.close,
        over=books.over,
        over_us=books.over_ns / 1e3,
        exceeded=_named(books.exceeded),
        unmatched_calls=books.unmatched_calls,
        unmatched_us=books.unmatched_ns / 1e3,
        cancelled=books.cancelled,
        in_shared_lane=books.in_shared_lane,
        adopted=beside_view(books.adopted),
    )


def beside_view(beside: Beside | None) -> BesideView | None:
    """Return the sum of the calls outside of steps in µs, or None if there are none."""
    return None if beside is None else BesideView(beside.calls, beside.time_ns / 1e3, _named(beside.by_name))


def _named(times_ns: Iterable[tuple[str, int]]) -> tuple[NamedTime, ...]:
    return tuple(NamedTime(name, time_ns / 1e3) for name, time_ns in times_ns)
