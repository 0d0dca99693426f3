"""The time breakdown of steps: the parts of their wall time, times parallel to it, and whether the parts add up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cbtop.profiler.analysis.time_breakdown import Beside, TimeBreakdown
from cbtop.protocol.vocabulary import BY_KERNELS, IDLE_BEFORE
from cbtop.viewmodels.time_range import NamedTime

# Names of the time without a running kernel, in steps that were recorded by their kernels.
GPU_WAITED, NOT_ITS_KERNELS = "GPU waited", "GPU waited, or ran what came before"


@dataclass(frozen=True, slots=True)
class BesideView:
    """Calls outside of the steps' wall time: their number, and the sum of their times (derived)."""

    calls: int
    us: float
    by_name: tuple[NamedTime, ...]  # sum of the times by the name of the call, the longest first


@dataclass(frozen=True, slots=True)
class TimeBreakdownView:
    """The wall time of a phase's ended, recorded steps: wall = bricks + gaps - overlap + unattributed.

    Other fields are outside of this sum. If bricks overlap, for example on two streams, `bricks_us` has the full time
    of each. `close` is false if parts are longer than their whole. `over` counts the steps that are shorter than
    their parts, and `over_us` adds up the differences. `exceeded` has the layers and bricks that are shorter than
    their parts.
    """

    wall_us: float
    bricks_us: float
    gaps: tuple[NamedTime, ...]
    gaps_us: float
    unattributed_us: float
    residual_percent: float | None
    open_us: float  # time of bricks in running steps
    # Time that counts several times because bricks overlap. If n overlap, their common time counts n - 1 times.
    overlap_us: float = 0.0
    close: bool = True
    over: int = 0  # number of steps that are shorter than their parts
    over_us: float = 0.0  # by how much these steps' parts are longer, in total
    # layers and bricks that are shorter than their parts, with the difference
    exceeded: tuple[NamedTime, ...] = ()
    # Number of calls that were stopped twice, out of order or after their step. The breakdown leaves them out.
    unmatched_calls: int = 0
    unmatched_us: float = 0.0
    cancelled: int = 0  # Number of cancelled or renamed steps. The breakdown leaves out their bricks.
    # Number of steps with unknown bricks, because at least fifteen others ran at the same time.
    in_shared_lane: int = 0
    adopted: BesideView | None = None  # work that other threads or tasks did for these steps


def books_view(books: TimeBreakdown | None, measured: str = "") -> TimeBreakdownView | None:
    """Return the time breakdown in µs, or None without steps. `measured` is the backend in the manifest."""
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
    """Return the sum of the calls outside of steps in µs, or None without any."""
    return None if beside is None else BesideView(beside.calls, beside.time_ns / 1e3, _named(beside.by_name))


def _named(times_ns: Iterable[tuple[str, int]]) -> tuple[NamedTime, ...]:
    return tuple(NamedTime(name, time_ns / 1e3) for name, time_ns in times_ns)
