"""Make the rows of bricks: one for each name and category, from the brick's statistics and checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cbtop.client.trend import SECONDS, BrickTrend
from cbtop.profiler.analysis.brick_stats import BrickStats, brick_nodes
from cbtop.profiler.analysis.histograms import Column
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.profiler.analysis.roofline import Distance, intensity
from cbtop.protocol.attributes import NO_MODULE, ModuleAttributes, carried
from cbtop.protocol.vocabulary import BrickCategory
from cbtop.viewmodels.durations import MAX_BARS, DurationBar, at_most, duration_bars
from cbtop.viewmodels.launches import LaunchesByNode
from cbtop.viewmodels.on_demand import Lazy, LazyValue, with_parts

TREND_S = SECONDS


@dataclass(frozen=True, slots=True)
class SizePoint:
    """A brick's mean time per token in steps of about the same size.

    A step's size is its number of cached positions or of sequences. The mean is over the seconds with such steps
    among the last 60.
    """

    from_size: int  # smallest size in this range; a second's size is the rounded mean size of its steps
    to_size: int  # largest size in this range, plus 1
    seconds: int
    us_per_token: float  # mean time per token in the seconds with a size in this range (derived)


@dataclass(frozen=True, slots=True)
class BrickModule:
    """A module that a brick calls in `places` parts of the model. A text is "" if it is not known."""

    module_class: str
    module_source: str
    weight_shape: str
    weight_dtype: str
    places: int


@dataclass(frozen=True)
class BrickRow:
    """One brick of a phase, summed over all layers that run it."""

    name: str
    category: BrickCategory
    count: int
    failed: int
    total_inclusive_us: float  # total time of all calls, with inner bricks
    total_exclusive_us: float  # total time of all calls, without inner bricks
    avg_exclusive_us: float | None  # mean exclusive time of a call; None until a step of the brick's phase has ended
    avg_inclusive_us: float
    min_us: float | None
    max_us: float | None
    cv: float | None  # coefficient of variation of the calls' durations: standard deviation divided by the mean
    p50_us: float | None
    p95_us: float | None
    p99_us: float | None
    p999_us: float | None
    us_per_token: float | None
    elements: int
    flops: float | None  # total FLOP of all calls, derived from shapes
    bytes: float | None  # total bytes of all calls, derived from shapes
    gflops: float | None
    gb_per_sec: float | None
    percent: float | None  # exclusive time of the brick, in percent of the wall time of the steps
    budget_us_per_token: float | None
    checks_passed: int
    checks_failed: int
    backend: str
    # How far the brick is from its roof. None if the brick's work or the machine's roofs are unknown.
    roof: Distance | None = None
    # name of the rank with these figures; only set in a view of each brick's slowest rank
    rank: str | None = None
    # The token rate that gives the budget per token. None for a fixed budget.
    budget_gb_per_sec: float | None = None
    uncounted: int = 0  # Number of calls with an unknown number of elements.
    # bytes that a collective operation exchanges, derived from shapes
    size_bytes: float | None = None
    dtypes: tuple[str, ...] = ()  # data types that the brick multiplies, named as in `Work.dtype`
    # host time of the median call of a brick on a device, without inner bricks
    host_us: float | None = None
    launches: int | None = None  # number of kernels that a step launches in this brick
    # Histogram of the calls' durations, from short to long. Empty unless it has every call.
    durations: Lazy[tuple[DurationBar, ...]] = Lazy(())
    # µs per token in each of the last 60 s, oldest first (outside of steps: µs per call). None for a second without
    # an ended call.
    trend_us: Lazy[tuple[float | None, ...]] = Lazy(())
    # (intensity, GFLOP/s) in each of the last 60 s, or None for an unknown second. Empty if all seconds are unknown.
    trail: Lazy[tuple[tuple[float, float] | None, ...]] = Lazy(())
    # The brick's time by number of cached positions (`by_cached`) and by sequences per step (`by_batch`), in
    # ascending order. Empty if unknown.
    by_cached: Lazy[tuple[SizePoint, ...]] = Lazy(())
    by_batch: Lazy[tuple[SizePoint, ...]] = Lazy(())
    # The different modules that the brick calls. Those in the most parts of the model come first. Empty if no module
    # is known.
    modules: Lazy[tuple[BrickModule, ...]] = Lazy(())

    @property
    def key(self) -> tuple[str, BrickCategory]:
        """Name and category, which identify the brick. The same name may occur in several categories."""
        return self.name, self.category

    @property
    def exclusive_us_per_token(self) -> float | None:
        """Time per token in µs, without inner bricks (derived)."""
        if self.us_per_token is None or not self.total_inclusive_us:
            return None
        return self.us_per_token * self.total_exclusive_us / self.total_inclusive_us

    @property
    def budget_used_percent(self) -> float | None:
        """Used part of the budget (µs per token), in percent. None without a budget or a measured token."""
        if self.us_per_token is None or not self.budget_us_per_token:
            return None
        return 100.0 * self.us_per_token / self.budget_us_per_token

    @property
    def budget_over_us(self) -> float | None:
        """µs per token above the budget, or 0 within the budget."""
        if self.us_per_token is None or not self.budget_us_per_token:
            return None
        return max(0.0, self.us_per_token - self.budget_us_per_token)

    @property
    def budget_met(self) -> bool | None:
        used = self.budget_used_percent
        return None if used is None else used <= 100

    @property
    def intensity(self) -> float | None:
        """FLOP per byte of the brick, or None if it does not declare both."""
        return intensity(self.flops, self.bytes)

    @property
    def attainable_gflops(self) -> float | None:
        return self.roof.attainable_gflops if self.roof else None

    @property
    def percent_of_roof(self) -> float | None:
        return self.roof.percent_of_roof if self.roof else None

    @property
    def bound(self) -> str | None:
        """The limit of the brick's speed: `memory` or `compute`.

        It is `latency or overhead` if the rate is far below all roofs. It is `several at once` if steps that run at
        the same time share the roofs.
        """
        return self.roof.bound if self.roof else None

    @property
    def roof_unsure(self) -> bool | None:
        """Whether the roof that limits the brick is uncertain. None if unknown."""
        return self.roof.is_unsure if self.roof else None

    @property
    def above_roof(self) -> bool:
        """Whether the brick is faster than its roof. Such figures are marked."""
        return self.roof is not None and self.roof.above_roof

    @property
    def trend_last_us(self) -> float | None:
        """The newest known value of the time per token (or call) in `trend_us`."""
        return next((us for us in reversed(self.trend_us) if us is not None), None)

    @property
    def trend_least_us(self) -> float | None:
        return min((us for us in self.trend_us if us is not None), default=None)

    @property
    def trend_most_us(self) -> float | None:
        return max((us for us in self.trend_us if us is not None), default=None)


def has_launches(rows: Iterable[BrickRow]) -> bool:
    """Return whether any of the rows has a host time or a number of launches."""
    return any(row.host_us is not None or row.launches is not None for row in rows)


def brick_rows(
    bricks: Iterable[BrickStats],
    totals: PhaseTotals,
    checks: Mapping[str, Sequence[bool]],
    trend: BrickTrend,
    cached: Callable[[], Mapping[int, float]],
    batch: Callable[[], Mapping[int, float]],
    launches: LaunchesByNode,
) -> tuple[BrickRow, ...]:
    """Return one row for each brick that ran, in the given order.

    `checks` has the results of checks, `launches` the host cost of bricks on a device. `cached` returns the cached
    positions per sequence in each second, `batch` the sequences per step in each second.
    """
    nodes_of = brick_nodes(totals)
    return tuple(
        with_parts(
            _row(stats, nodes, totals, checks.get(stats.name, ()), trend, cached, batch),
            host_us=cost.host_us,
            launches=cost.kernels,
        )
        for stats in bricks
        for nodes in [nodes_of[stats.name, stats.category]]
        for cost in [launches.of(nodes.tolist())]
    )


def _row(
    stats: BrickStats,
    nodes: Column,
    totals: PhaseTotals,
    checks: Sequence[bool],
    trend: BrickTrend,
    cached: Callable[[], Mapping[int, float]],
    batch: Callable[[], Mapping[int, float]],
) -> BrickRow:
    calls = stats.calls
    # The time per token is unknown until a step with this brick has ended.
    us_per_token = totals.us_per_token(stats.closed.once_ns) if stats.closed.once_ns else None
    has_trend = totals.step is None or us_per_token is not None
    is_in_steps = has_trend and totals.step is not None
    first = int(totals.table.column("first_of")[nodes[0]])
    return BrickRow(
        name=stats.name,
        category=stats.category,
        count=calls.count,
        failed=calls.failed,
        total_inclusive_us=calls.total_ns / 1e3,
        total_exclusive_us=stats.exclusive_ns / 1e3,
        avg_exclusive_us=_us(stats.mean_exclusive_ns),
        avg_inclusive_us=calls.mean_ns / 1e3,
        min_us=_us(calls.min_ns),
        max_us=_us(calls.max_ns),
        cv=calls.cv,
        p50_us=_us(calls.p50_ns),
        p95_us=_us(calls.p95_ns),
        p99_us=_us(calls.p99_ns),
        p999_us=_us(calls.p999_ns),
        us_per_token=us_per_token,
        elements=calls.elements,
        flops=stats.flops,
        bytes=stats.bytes,
        gflops=stats.gflops,
        gb_per_sec=stats.gb_per_sec,
        percent=totals.percent(stats.closed.exclusive_ns, stats.adopted_ns),
        budget_us_per_token=stats.budget_us_per_token,
        checks_passed=sum(checks),
        checks_failed=len(checks) - sum(checks),
        backend=stats.backend,
        uncounted=stats.uncounted,
        size_bytes=stats.size_bytes,
        budget_gb_per_sec=stats.budget_gb_per_sec,
        dtypes=stats.dtypes,
        durations=LazyValue(lambda: _durations(stats, nodes, totals)),
        trend_us=LazyValue(partial(trend.us, first)) if has_trend else (),
        trail=LazyValue(partial(trend.trail, first)),
        by_cached=LazyValue(lambda: _by_size(trend.by_second(first), cached())) if is_in_steps else (),
        by_batch=LazyValue(lambda: _by_size(trend.by_second(first), batch())) if is_in_steps else (),
        modules=LazyValue(lambda: _modules(totals.table[int(node)].module for node in nodes)),
    )


def _modules(attributes: Iterable[ModuleAttributes]) -> tuple[BrickModule, ...]:
    """Return the known modules, each once, with its number of places. Modules in the most parts of the model come
    first.
    """
    counts = Counter(one for one in attributes if one != NO_MODULE)
    return tuple(BrickModule(**carried(ModuleAttributes, one), places=many) for one, many in counts.most_common())


def _by_size(us_of: Mapping[int, float], size_of: Mapping[int, float]) -> tuple[SizePoint, ...]:
    """Return the mean time per token for ranges of step sizes, which are powers of two.

    `us_of` maps a second to the time per token, `size_of` to the size of its steps.
    """
    found: dict[int, list[float]] = {}
    for second, us in us_of.items():
        if second in size_of:
            found.setdefault(round(size_of[second]).bit_length(), []).append(us)
    return tuple(
        SizePoint((1 << bits) >> 1, 1 << bits, len(each), sum(each) / len(each))
        for bits, each in sorted(found.items())
    )


def _durations(stats: BrickStats, nodes: Column, totals: PhaseTotals) -> tuple[DurationBar, ...]:
    counts = totals.stats.histogram(nodes.tolist())
    # A histogram that lacks calls would mislead, so leave it out.
    is_complete = counts.sum() == stats.calls.count
    return duration_bars(counts, at_most(MAX_BARS, counts)) if is_complete else ()


def _us(value_ns: float | None) -> float | None:
    return None if value_ns is None else value_ns / 1e3
