"""Make a frozen SourceView from the store's record of a source, for screens and reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from cbtop.client.source_record import SourceRecord
from cbtop.comparison.comparison import Comparison
from cbtop.profiler.analysis.brick_stats import BrickStats, brick_stats, category_stats
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.profiler.analysis.time_breakdown import books_of, outside_steps
from cbtop.protocol.messages import Ceiling, Sampling
from cbtop.protocol.roofs import way_out_on_cpu
from cbtop.protocol.vocabulary import COMPILED_MODEL, GUARD_CHECK, NodeKind, SourceStatus
from cbtop.viewmodels.brick_growth import BrickGrowth, brick_growth
from cbtop.viewmodels.bricks import BrickRow, brick_rows
from cbtop.viewmodels.categories import CategoryRow, category_rows
from cbtop.viewmodels.checks import CheckRow, check_rows
from cbtop.viewmodels.counters import CountersView, counters_view
from cbtop.viewmodels.cpu_samples import SampledTimeView, sampled_time
from cbtop.viewmodels.devices import DeviceRow, MachineView
from cbtop.viewmodels.graph import CriticalPathView, GraphRow, GraphRows, graph_rows
from cbtop.viewmodels.guard import GuardView, guard_view
from cbtop.viewmodels.kernels import BrickKernels, kernels_of
from cbtop.viewmodels.launches import LaunchesByNode
from cbtop.viewmodels.layers import MIN_STEPS, LayersView, layers_view
from cbtop.viewmodels.loss import LossView, loss_view
from cbtop.viewmodels.memory_growth import MemoryGrowth
from cbtop.viewmodels.merged import MergedView, RanksView
from cbtop.viewmodels.on_demand import Lazy, LazyValue, made, with_parts
from cbtop.viewmodels.rates import Rate, are_rates_least, rate_of
from cbtop.viewmodels.roofline import (
    NOT_ANNOUNCED,
    CeilingRow,
    RooflineView,
    ceiling_rows,
    missing_ceilings,
    note_of_then,
    roofline,
    shared_note,
    under_roofs,
)
from cbtop.viewmodels.selection import PhaseSelection, WindowView, shown, shown_phase, state_of, window_view
from cbtop.viewmodels.serving import ServingView, serving_view
from cbtop.viewmodels.sources import ClockView, ListView
from cbtop.viewmodels.stall import StallView, stall_view
from cbtop.viewmodels.steps import (
    PaceView,
    StepsView,
    WarmUpView,
    batch_by_second,
    cached_by_second,
    pace,
    step_us_history,
    steps_per_sec_history,
    steps_views,
    tokens_per_sec_history,
    warm_up_view,
)
from cbtop.viewmodels.straggler import StragglerView
from cbtop.viewmodels.time_breakdown import BesideView, TimeBreakdownView, beside_view, books_view
from cbtop.viewmodels.time_range import (
    CompilingView,
    TimeRangeView,
    compiling_view,
    heard_ns,
    since_s,
)
from cbtop.viewmodels.timeline import TimelineView, timeline_view
from cbtop.viewmodels.traces import TraceView, trace_views
from cbtop.viewmodels.training import TrainingView, training_view
from cbtop.viewmodels.verdict import Verdict, Withheld


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """A source as one entry in the list of all sources."""

    key: str
    label: str  # name of the source: program, pid and host, as `program, pid@host`
    state: SourceStatus
    stale_s: float | None = None  # seconds since the daemon's last message; None if it is not silent


@dataclass(frozen=True, kw_only=True)
class SourceView:
    """All that the screens show of a profiled process, for one phase of its steps.

    With a `window`, steps, bricks, categories, roofline, graph and time breakdown are of the window. `loss`, `checks`
    and `traces` are always of all data.

    A `Lazy` field is made when it is first read, from the data at that time. `held` returns a view that does not
    change.
    """

    key: str  # the process's key, host:pid:start, which never changes
    pid: int
    host: str
    program: str
    state: SourceStatus
    state_reason: str
    # What the process says it is doing, such as "measuring ceilings". "" in its main loop.
    activity: str
    activity_done: float | None  # completed part of the process's current activity, 0 to 1
    model: str | None
    architecture: str | None
    backend: str | None
    quantization: str | None
    threads: int | None
    layers: int | None
    weights_bytes: int | None
    phase: str | None  # the phase in this view; None without steps
    phases: tuple[StepsView, ...]
    steps: StepsView | None  # the steps of this phase
    # bricks of the shown phase, sorted by exclusive time, the largest first
    bricks: Lazy[tuple[BrickRow, ...]] = Lazy()
    categories: Lazy[tuple[CategoryRow, ...]] = Lazy()
    roofline: Lazy[RooflineView] = Lazy()
    graph: Lazy[Sequence[GraphRow]] = Lazy()
    books: TimeBreakdownView | None  # time breakdown of the steps; None without steps
    loss: LossView
    checks: tuple[CheckRow, ...]
    tokens_per_sec_history: tuple[float, ...]  # tokens/s in each second, oldest first, at most 120 values
    steps_per_sec_history: tuple[float, ...] = ()  # steps/s in each second, oldest first, at most 120 values
    traces: Lazy[tuple[TraceView, ...]] = Lazy(())  # results of the process's own tracer; empty without one
    window: WindowView | None = None  # the recent window; None: all data since the start
    since_s: float | None = None  # Unix time when the source's data begins; None if unknown
    # Time range of the figures. None before a step has ended.
    time_range: TimeRangeView | None = None
    warm_up: WarmUpView | None = None  # the warm-up steps; None without any
    # Whether bricks and layers are of all data, because the window has too few recorded steps.
    is_inside_of_all: bool = False
    # Compilations by torch.compile in the shown time. None without any, and in a merge.
    compiling: CompilingView | None = None
    guard: GuardView | None = None  # None without `--guard`
    serving: Lazy[ServingView | None] = Lazy(None)  # requests of the engine; None if the process serves none
    rank: int | None = None  # number of the rank, from the launcher
    local_rank: int | None = None
    world_size: int | None = None
    trains: bool = False  # whether the process computes gradients between its steps
    # How many percent of the recent time the busiest thread waited for a processor. None if unknown.
    waiting_percent: float | None = None
    memory_growths: Lazy[tuple[MemoryGrowth, ...]] = Lazy(())  # memory that grows steadily; empty in a merge
    has_compiled: bool = False  # whether code of this process is compiled by torch.compile
    sample_every: int | None = 1  # one step in N is recorded; None in a merge of different N
    # the clock's resolution (smallest difference of two readings); None if not reported
    clock_resolution_ns: int | None = None
    overhead: Sampling | None = None  # how much recording slows the process; None if not measured
    # The Python functions that ran in untimed places, by samples. Empty without a sampler, and in a merge.
    sampled: Lazy[tuple[SampledTimeView, ...]] = Lazy(())
    # The counters of the bricks in this phase. None if nothing is counted, and in a merge.
    counters: Lazy[CountersView | None] = Lazy(None)
    # The calls outside of all steps. None without any, or without steps.
    outside: Lazy[BesideView | None] = Lazy(None)
    stall: StallView | None = None  # why the process makes no progress; None if it does, or has ended
    stale_s: float | None = None  # seconds since the daemon's last message; None if it is not silent
    clock: ClockView | None = None  # how the host's clocks differ from ours; None if unknown
    straggler: StragglerView | None = None  # the straggler (slowest rank) of the source's job, or None
    # The members of a merge, otherwise None. `pid`, `host` and so on are the values of the first member.
    merged: MergedView | None = None
    ranks: RanksView | None = None  # the time of each brick in each rank; only set with MergeMode.RANKS
    # Critical path of the graph. None if all nodes run one after another.
    critical_path: Lazy[CriticalPathView | None] = Lazy(None)
    # The times of the layers. None without layers, or in a view of each brick's slowest rank.
    layer_times: Lazy[LayersView | None] = Lazy(None)
    machines: tuple[MachineView, ...] = ()  # the machines that the process runs on; a merge may have several
    # Parts and bricks of training steps. None for other steps.
    training: Lazy[TrainingView | None] = Lazy(None)
    # The mean time of the shown steps in each second of the last two minutes. Empty in a merge.
    pace: Lazy[tuple[PaceView, ...]] = Lazy(())
    # how each brick's time grows within the window; empty if it is too short
    brick_growth: Lazy[tuple[BrickGrowth, ...]] = Lazy(())
    # Mean step time in each second of `steps_per_sec_history`. Empty in a merge.
    step_us_history: Lazy[tuple[float | None, ...]] = Lazy(())
    # The recent window compared with the baseline. None without a baseline.
    baseline: Lazy[Comparison | None] = Lazy(None)
    # the verdicts (problems with advice) on the shown time range, the worst first
    verdicts: Lazy[tuple[Verdict, ...]] = Lazy(())
    # Verdicts that are not shown, because their figures cannot be trusted. None without any.
    withheld: Lazy[Withheld | None] = Lazy(None)
    # List of all sources, with this one. None if the feed has no list.
    listed: Lazy[ListView | None] = Lazy(None)
    # The phase's kernels in the last burst (steps recorded on request). Empty without a burst.
    kernels: Lazy[tuple[BrickKernels, ...]] = Lazy(())
    # Timeline of the last steps of all phases. None if single records are not received.
    timeline: Lazy[TimelineView | None] = Lazy(None)
    # Second of the daemon's clock when the view was made. When it changes, plots are drawn again. None: the view is
    # not updated.
    second: int | None = field(default=None, compare=False)

    @property
    def rate(self) -> Rate:
        """The rate to show for the steps: tokens/s, or steps/s if tokens are unknown."""
        return rate_of(self.steps, self.tokens_per_sec_history, self.steps_per_sec_history)

    @property
    def are_rates_least(self) -> bool:
        """Whether the true rates of the steps may be higher, because records were lost."""
        return are_rates_least(self.window, self.loss)

    @property
    def failed_checks(self) -> list[CheckRow]:
        """The failed checks, most likely cause first.

        The guard's check is first, because the guard finds the origin of a wrong value. Others follow in the order in
        which they failed, and checks of inputs are last.
        """
        failed = [check for check in self.checks if not check.passed]
        return sorted(failed, key=lambda check: (check.assertion != GUARD_CHECK, check.is_of_input))

    @property
    def standing(self) -> str:
        """The state of the process in a word, such as `live`."""
        return self.stall.word if self.stall else self.state

    @property
    def rows_of(self) -> tuple[object, ...]:
        """A value that identifies the rows of a table: source, phase, and whether a window is shown.

        While it does not change, rows keep their order on the screen.
        """
        # A merge is identified by its mode, because its members, and so its key, may change.
        who = self.key if self.merged is None else self.merged.mode
        return who, self.phase, self.window is None

    @property
    def gpus(self) -> tuple[DeviceRow, ...]:
        """The GPUs that the process uses. If unknown, the machine's only GPU."""
        used = tuple(row for machine in self.machines for row in machine.gpus_of(self.key))
        all_there_are = tuple(row for machine in self.machines for row in machine.gpus)
        return used or (all_there_are if len(all_there_are) == 1 else ())

    @property
    def shares_close(self) -> bool | None:
        """Whether the bricks' shares of the time add up to at most 100 %. None without shares.

        They do not if work overlaps inside a step, or in a view of the slowest ranks, which mixes steps.
        """
        shares = [row.percent for row in self.bricks if row.percent is not None]
        return min(shares) >= 0 and sum(shares) <= 100 * (1 + 1e-9) if shares else None

    def held(self) -> SourceView:
        """Return a copy of the view that does not change when new data arrives."""
        for row in (*self.phases, *self.bricks, *(self.layer_times.rows if self.layer_times else ())):
            made(row)
        if self.listed is not None:
            self.listed.rows()
        return made(with_parts(self, graph=tuple(self.graph), second=None))

    @property
    def moved_gb_per_sec(self) -> float | None:
        """Lower limit of the memory traffic: the bytes that bricks declare (from shapes), per second of wall-clock
        time.

        None in a merge, without declared bytes, or if some steps were not recorded.
        """
        steps, time_range = self.steps, self.time_range
        known = [row.bytes for row in self.bricks if row.bytes is not None]
        if not known or steps is None or time_range is None or not time_range.wall_us or self.merged is not None:
            return None
        return sum(known) / time_range.wall_us / 1e3 if steps.recorded == steps.count else None

    @property
    def has_data(self) -> bool:
        """Whether there is data to show: a step has ended.

        Without steps: a brick has ended, or the process serves requests.
        """
        return self.steps is not None or (self.phase is None and (bool(self.bricks) or self.serving is not None))


def summaries(records: Iterable[SourceRecord]) -> tuple[SourceSummary, ...]:
    """Return one entry of the list for every source, live ones first, newer before older."""
    ordered = sorted(records, key=_newest_first)
    return tuple(SourceSummary(record.key, _label(record), state_of(record)) for record in ordered)


def source_view(
    record: SourceRecord,
    phase: str | None = None,
    *,
    window: bool = False,
    ceilings: Iterable[Ceiling] | None = None,
    is_recording: bool = False,
    engine: SourceRecord | None = None,
) -> SourceView:
    """Return the view of `record` for `phase` (default: `shown_phase`), over its window or since the start.

    `ceilings` are the roofs (default: those that the process announced). `engine` is the record of the process that
    serves the requests (default: `record`). `is_recording` leaves out advice to measure roofs, because the roofs of a
    recording cannot be measured.
    """
    found = shown(record, window=window)
    phases = found.phases
    name = shown_phase(record, phase)
    parts = _Parts(record, found, name, ceilings, is_recording=is_recording)
    checks = parts.checks
    steps = parts.steps
    if steps is not None and parts.is_inside_of_all:
        steps = parts.with_recorded(steps)
        phases = tuple(steps if one.phase == steps.phase else one for one in phases)
    hello, manifest, state = record.hello, record.manifest, record.state
    view = SourceView(
        key=record.key,
        pid=hello.pid if hello else 0,
        host=hello.host if hello else "",
        program=hello.program if hello else "",
        state=state_of(record),
        state_reason=state.reason if state else "",
        activity=record.activity.name,
        activity_done=record.activity.done,
        model=manifest.model if manifest else None,
        architecture=manifest.architecture if manifest else None,
        backend=manifest.backend if manifest else _only_backend(record),
        quantization=manifest.quantization if manifest else None,
        threads=manifest.threads if manifest else None,
        layers=manifest.layers if manifest else None,
        weights_bytes=manifest.weights_bytes if manifest else None,
        phase=name,
        phases=phases,
        steps=steps,
        bricks=LazyValue(lambda: parts.rows),
        categories=LazyValue(lambda: category_rows(category_stats(parts.bricks), parts.totals)),
        roofline=LazyValue(lambda: roofline(parts.roofs, parts.rows, parts.roofs_note)),
        graph=LazyValue(lambda: parts.graph[0]),
        books=books_view(books_of(parts.totals, parts.whole), manifest.backend if manifest else ""),
        loss=loss_view(record),
        checks=checks,
        tokens_per_sec_history=tokens_per_sec_history(record, steps),
        steps_per_sec_history=steps_per_sec_history(record, steps),
        window=window_view(record, found.window) if found.window else None,
        time_range=found.time_range_view,
        is_inside_of_all=parts.is_inside_of_all,
    )
    return _with_details(view, record, found, parts, engine or record)


def _with_details(
    view: SourceView, record: SourceRecord, found: PhaseSelection, parts: _Parts, engine: SourceRecord
) -> SourceView:
    """Return a copy of `view` with fields that few sources have, or few outputs show."""
    hello, phase = record.hello, view.phase
    is_sample = view.steps is not None and view.steps.is_sample
    return with_parts(
        view,
        layer_times=LazyValue(lambda: layers_view(parts.totals)),
        outside=LazyValue(lambda: parts.outside),
        counters=LazyValue(lambda: counters_view(record.counters, record.nodes, phase)),
        sampled=LazyValue(lambda: sampled_time(record.cpu_samples, record.nodes, phase)),
        training=LazyValue(lambda: training_view(record, parts.totals, lambda: parts.bricks)),
        traces=LazyValue(lambda: trace_views(record.traces.values())),
        pace=LazyValue(lambda: pace(record, phase)),
        brick_growth=LazyValue(lambda: brick_growth(record, phase)),
        step_us_history=LazyValue(lambda: step_us_history(record, phase)),
        guard=guard_view(record.guarded.values()),
        serving=LazyValue(lambda: serving_view(engine)),
        rank=hello.rank if hello else None,
        local_rank=hello.local_rank if hello else None,
        world_size=hello.world_size if hello else None,
        trains=record.trains,
        has_compiled=bool(record.compilations) or COMPILED_MODEL in (view.backend or ""),
        sample_every=record.sample_every,
        clock_resolution_ns=hello.clock_resolution_ns if hello else None,
        overhead=record.sampling,
        since_s=since_s(record),
        warm_up=warm_up_view(record),
        compiling=compiling_view(record.compilations.values(), found.time_range),
        critical_path=LazyValue(lambda: parts.graph[1]),
        stall=stall_view(record),
        kernels=LazyValue(lambda: _kernels(record, phase)),
        timeline=LazyValue(
            lambda: timeline_view(record, phase, is_sample=is_sample, requests=engine.serving.requests.values())
        ),
        second=_second(record),
    )


class _Parts:
    """Results that several parts of a view need. Each is made at its first use, and stored."""

    def __init__(
        self,
        record: SourceRecord,
        found: PhaseSelection,
        phase: str | None,
        ceilings: Iterable[Ceiling] | None,
        *,
        is_recording: bool,
    ) -> None:
        self._record, self._found, self._phase, self._ceilings = record, found, phase, ceilings
        self._is_recording = is_recording
        # Rows refer to these values instead of the view. A reference cycle would keep the view in memory until
        # garbage collection.
        self._cached = LazyValue(partial(cached_by_second, record, phase))
        self._batch = LazyValue(partial(batch_by_second, record, phase))

    @cached_property
    def whole(self) -> PhaseTotals:
        """The shown phase's totals since the start."""
        return PhaseTotals.of(self._record.nodes, self._record.stats, self._phase)

    @cached_property
    def all_steps(self) -> StepsView | None:
        """The steps of the shown phase since the start."""
        return next(
            (one for one in steps_views(self._record, self._record.stats, None) if one.phase == self._phase), None
        )

    @cached_property
    def is_inside_of_all(self) -> bool:
        """Whether bricks and layers are of all steps, because the window has too few recorded ones."""
        if self._found.window is None or self._record.window.is_range or not self._record.leaves_steps_out:
            return False
        if self.steps is None or not self.steps.count:
            return False
        return (
            self.steps.recorded < MIN_STEPS
            and self.all_steps is not None
            and self.all_steps.recorded > self.steps.recorded
        )

    def with_recorded(self, steps: StepsView) -> StepsView:
        """Return `steps` with the number and mean time of recorded steps since the start."""
        every = self.all_steps
        return (
            steps
            if every is None
            else replace(steps, recorded=every.recorded, recorded_mean_us=every.recorded_mean_us)
        )

    @cached_property
    def totals(self) -> PhaseTotals:
        """The phase's totals in the window or since the start, whichever is shown."""
        if self._found.window is None or self.is_inside_of_all:
            return self.whole
        return PhaseTotals.of(self._record.nodes, self._found.stats, self._phase)

    @cached_property
    def checks(self) -> tuple[CheckRow, ...]:
        return check_rows(self._record.checks.values())

    @cached_property
    def bricks(self) -> list[BrickStats]:
        bricks = brick_stats(self.totals)
        if self._found.window and self.totals is not self.whole and self.totals.step is not None:
            # A window may begin or end between the record of a brick and the records of its inner bricks. Exclusive
            # times could be negative, so take them from ended steps.
            bricks = [
                replace(
                    one,
                    exclusive_ns=one.closed.exclusive_ns + one.adopted_ns,
                    exclusive_of_ns=one.closed.calls_ns,
                )
                for one in bricks
            ]
        return bricks

    @cached_property
    def roofs(self) -> tuple[CeilingRow, ...]:
        ceilings = self._record.ceilings.values() if self._ceilings is None else self._ceilings
        return ceiling_rows(ceilings, _heard_s(self._record))

    @property
    def steps(self) -> StepsView | None:
        return next((steps for steps in self._found.phases if steps.phase == self._phase), None)

    @property
    def roofs_note(self) -> str:
        manifest = self._record.manifest
        said = manifest.roofs if manifest else ""
        # The process announced that its roofs are unknown, with advice to measure them. If all needed ones were
        # measured since, leave out the advice.
        if manifest and self.roofs and said == way_out_on_cpu(manifest.threads):
            said = said if missing_ceilings(roofline(self.roofs, self.rows)) else ""
        if self._is_recording:
            said = note_of_then(said)
        if self.roofs:
            return said or shared_note(self.steps)
        return said or ("" if self._is_recording else NOT_ANNOUNCED)

    @cached_property
    def rows(self) -> tuple[BrickRow, ...]:
        passed: dict[str, list[bool]] = {}
        for check in self.checks:
            if not check.skipped:
                passed.setdefault(check.brick, []).append(check.passed)
        trend = self._record.trend
        record = self._record
        launches = LaunchesByNode(record.host_times, record.burst, record.nodes)
        rows = brick_rows(self.bricks, self.totals, passed, trend, self._cached.value, self._batch.value, launches)
        return under_roofs(rows, self.roofs, self.steps)

    @cached_property
    def graph(self) -> tuple[GraphRows, CriticalPathView | None]:
        burst = self._record.burst
        in_burst = {one.node: one for one in burst.kernels} if burst else None
        return graph_rows(self.totals, self._record.dependencies, in_burst)

    @property
    def outside(self) -> BesideView | None:
        if self.totals.step is None:
            return None
        return beside_view(outside_steps(self._record.nodes, self._found.stats))


def _second(record: SourceRecord) -> int | None:
    """Return the second of the daemon's clock for SourceView.second, or None for a merge."""
    has_clock = record.window.has_begun and not record.has_ended
    return record.window.now_ns // 1_000_000_000 if has_clock else None


def _heard_s(record: SourceRecord) -> float | None:
    """Return the Unix time (on its host) when the source last showed that it is alive."""
    hello = record.hello
    if hello is None:
        return None
    return (hello.realtime_ns + max(heard_ns(record) - hello.monotonic_ns, 0)) / 1e9


def _label(record: SourceRecord) -> str:
    hello = record.hello
    return f"{hello.program}, {hello.pid}@{hello.host}" if hello else record.key


def _newest_first(record: SourceRecord) -> tuple[bool, bool, int]:
    """Order by state (live first), then by work (processes with steps first), then newest first.

    An engine may run its model in other processes, so it has no steps.
    """
    has_steps = any(node.kind is NodeKind.STEP for node in record.nodes.children[None])
    is_beside = not has_steps and (bool(len(record.nodes)) or record.serving.is_engine)
    return state_of(record) is not SourceStatus.LIVE, is_beside, -(record.hello.realtime_ns if record.hello else 0)


def _kernels(record: SourceRecord, phase: str | None) -> tuple[BrickKernels, ...]:
    if record.burst is None:
        return ()
    return next((one.bricks for one in kernels_of(record.nodes.nodes, record.burst) if one.phase == phase), ())


def _only_backend(record: SourceRecord) -> str | None:
    """Return the backend that all bricks have in common, if no manifest names one."""
    named = record.nodes.backends
    return next(iter(named)) if len(named) == 1 else None
