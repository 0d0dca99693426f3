"""The books: the parts of a step's wall time, the time next to the steps, and whether the parts add up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cbtop.profiler.analysis.time_breakdown import Beside, TimeBreakdown
from cbtop.protocol.vocabulary import BY_KERNELS, IDLE_BEFORE
from cbtop.viewmodels.time_range import NamedTime

# For a step recorded by its kernels: the time without any running kernel.
GPU_WAITED, NOT_ITS_KERNELS = "GPU waited", "GPU waited, or ran what came before"


@dataclass(frozen=True, slots=True)
class BesideView:
    """Time outside every step's wall time: number of calls and sum of their times; derived."""

    calls: int
    us: float
    by_name: tuple[NamedTime, ...]  # longest first


@dataclass(frozen=True, slots=True)
class TimeBreakdownView:
    """wall = bricks + gaps - overlap + unattributed, over the ended recorded steps of a phase.

    The later fields are not part of this sum. Bricks that overlap, as on two streams of a device, each count in full
    in `bricks_us`. The books do not `close` if a part exceeds its whole: `over_us` in `over` steps, and `exceeded`.
    """

    wall_us: float
    bricks_us: float
    gaps: tuple[NamedTime, ...]
    gaps_us: float
    unattributed_us: float
    residual_percent: float | None
    open_us: float  # brick time in a step that has not ended
    overlap_us: float = 0.0  # time of overlapping parts, counted once per extra part
    close: bool = True
    over: int = 0  # number of steps exceeded by their parts
    over_us: float = 0.0  # by this much
    exceeded: tuple[NamedTime, ...] = ()  # layers and bricks exceeded by their parts, and by how much
    unmatched_calls: int = 0  # calls stopped twice, out of order or after their step: not in the books
    unmatched_us: float = 0.0
    cancelled: int = 0  # cancelled or renamed steps: their bricks are not in the books
    in_shared_lane: int = 0  # steps that overlapped fifteen others: their bricks are unknown
    adopted: BesideView | None = None  # work for these steps in other threads or tasks


def books_view(books: TimeBreakdown | None, measured: str = "") -> TimeBreakdownView | None:
    """Return the books in µs, or None for a process without steps. `measured` is the backend as in the manifest."""
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
    """Return the time next to the steps in µs, or None without any."""
    return None if beside is None else BesideView(beside.calls, beside.time_ns / 1e3, _named(beside.by_name))


def _named(times_ns: Iterable[tuple[str, int]]) -> tuple[NamedTime, ...]:
    return tuple(NamedTime(name, time_ns / 1e3) for name, time_ns in times_ns)
