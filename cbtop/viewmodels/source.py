"""One source: makes the frozen SourceView for screens and reports from the store's record."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from cbtop.client.store import SourceRecord
from cbtop.client.window import TimeRange
from cbtop.profiler.books import books_of, outside_steps
from cbtop.profiler.brick_stats import BrickStats, brick_stats, category_stats
from cbtop.profiler.graph.nodes import display_name
from cbtop.profiler.phase_totals import PhaseTotals
from cbtop.profiler.stats import NodeStats
from cbtop.protocol.messages import Ceiling, Node
from cbtop.protocol.roofs import way_out_on_cpu
from cbtop.protocol.vocabulary import NodeKind, SourceStatus, is_warm_up
from cbtop.viewmodels.books import beside_view, books_view
from cbtop.viewmodels.brick_growth import brick_growth
from cbtop.viewmodels.bricks import BrickRow, brick_rows
from cbtop.viewmodels.categories import category_rows
from cbtop.viewmodels.graph import GraphRows, graph_rows
from cbtop.viewmodels.kernels import BrickKernels, kernels_of
from cbtop.viewmodels.launches import LaunchesByNode
from cbtop.viewmodels.layers import MIN_STEPS, layers_view
from cbtop.viewmodels.model import (
    BesideView,
    CeilingRow,
    CheckRow,
    CriticalPathView,
    LossView,
    SourceSummary,
    SourceView,
    StepsView,
    TimeRangeView,
    WindowView,
)
from cbtop.viewmodels.on_demand import LazyValue
from cbtop.viewmodels.roofline import ceiling_rows, missing_ceilings, roofline, shared_note, under_roofs
from cbtop.viewmodels.stall import stall_view
from cbtop.viewmodels.steps import (
    batch_by_second,
    cached_by_second,
    pace,
    step_us_history,
    steps_per_sec_history,
    steps_views,
    tokens_per_sec_history,
    warm_up_view,
)
from cbtop.viewmodels.stretch import compiling_view, heard_ns, since_s, time_range_of, time_range_view
from cbtop.viewmodels.timeline import timeline_view
from cbtop.viewmodels.traces import trace_views

_DECODES = re.compile(r"(.* )?decode(, .*)?|verify", re.DOTALL)  # also with a draft model; `decode, a sample`


def summaries(records: Iterable[SourceRecord]) -> tuple[SourceSummary, ...]:
    """Return every source: the live ones first, each newest first."""
    ordered = sorted(records, key=_newest_first)
    return tuple(SourceSummary(record.key, _label(record), state_of(record)) for record in ordered)


@dataclass(frozen=True, slots=True)
class PhaseSelection:
    """What is shown of a source: statistics, their time range, and the steps in it."""

    stats: NodeStats
    time_range: TimeRange | None  # None: no step has been seen
    window: TimeRange | None  # None: since the start
    phases: tuple[StepsView, ...]
    time_range_view: TimeRangeView | None


def shown(record: SourceRecord, *, window: bool) -> PhaseSelection:
    """Return all data of `record`, or its window.

    A source watched for less than a second, or found already ended, has no window, so all data is returned.
    """
    is_all = not (window and record.window.has_watched)
    stats, seconds = (record.stats, None) if is_all else record.window.statistics(record.stats)
    time_range = time_range_of(record, seconds)
    view = None if time_range is None else time_range_view(record, stats, time_range)
    phases = steps_views(record, stats, time_range)
    if view and any(steps.is_sample for steps in phases):
        # Steps that left no record ran in what would appear as time between steps.
        view = replace(view, in_steps_us=None, between_us=None)
    return PhaseSelection(stats, time_range, seconds and (time_range or seconds), phases, view)


def source_view(
    record: SourceRecord,
    phase: str | None = None,
    *,
    window: bool = False,
    ceilings: Iterable[Ceiling] | None = None,
) -> SourceView:
    """Return the view of `record` for `phase` (None: that of `shown_phase`), in its window or since the start.

    `ceilings` are the roofs over it; None: those that it announced.
    """
    found = shown(record, window=window)
    phases = found.phases
    name = shown_phase(record, phase)
    parts = _Parts(record, found, name, ceilings)
    checks = parts.checks
    steps = parts.steps
    if steps is not None and parts.is_inside_of_all:
        steps = parts.with_recorded(steps)
        phases = tuple(steps if one.phase == steps.phase else one for one in phases)
    hello, manifest, state = record.hello, record.manifest, record.state
    return SourceView(
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
        layer_times=LazyValue(lambda: layers_view(parts.totals)),
        books=books_view(books_of(parts.totals, parts.whole), manifest.backend if manifest else ""),
        outside=LazyValue(lambda: parts.outside),
        loss=loss_view(record),
        checks=checks,
        tokens_per_sec_history=tokens_per_sec_history(record, steps),
        steps_per_sec_history=steps_per_sec_history(record, steps),
        traces=LazyValue(lambda: trace_views(record.traces.values())),
        pace=LazyValue(lambda: pace(record, name)),
        brick_growth=LazyValue(lambda: brick_growth(record, name)),
        step_us_history=LazyValue(lambda: step_us_history(record, name)),
        rank=hello.rank if hello else None,
        local_rank=hello.local_rank if hello else None,
        world_size=hello.world_size if hello else None,
        trains=record.trains,
        has_compiled=bool(record.compilations),
        sample_every=record.sample_every,
        clock_resolution_ns=hello.clock_resolution_ns if hello else None,
        overhead=record.sampling,
        window=window_view(record, found.window) if found.window else None,
        since_s=since_s(record),
        time_range=found.time_range_view,
        warm_up=warm_up_view(record),
        is_inside_of_all=parts.is_inside_of_all,
        compiling=compiling_view(record.compilations.values(), found.time_range),
        critical_path=LazyValue(lambda: parts.graph[1]),
        stall=stall_view(record),
        kernels=LazyValue(lambda: _kernels(record, name)),
        timeline=LazyValue(lambda: timeline_view(record, name, is_sample=steps is not None and steps.is_sample)),
        second=_second(record),
    )


class _Parts:
    """Intermediate results used by several parts of a view, each made once on first use."""

    def __init__(
        self, record: SourceRecord, found: PhaseSelection, phase: str | None, ceilings: Iterable[Ceiling] | None
    ) -> None:
        self._record, self._found, self._phase, self._ceilings = record, found, phase, ceilings
        # Rows refer to these and not to the view: a reference cycle would wait for the garbage collector.
        self._cached = LazyValue(partial(cached_by_second, record, phase))
        self._batch = LazyValue(partial(batch_by_second, record, phase))

    @cached_property
    def whole(self) -> PhaseTotals:
        """The totals since the start."""
        return PhaseTotals.of(self._record.nodes, self._record.stats, self._phase)

    @cached_property
    def all_steps(self) -> StepsView | None:
        """The steps since the start."""
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
        """Return `steps` with the recorded steps since the start."""
        every = self.all_steps
        return (
            steps
            if every is None
            else replace(steps, recorded=every.recorded, recorded_mean_us=every.recorded_mean_us)
        )

    @cached_property
    def totals(self) -> PhaseTotals:
        """The totals shown."""
        if self._found.window is None or self.is_inside_of_all:
            return self.whole
        return PhaseTotals.of(self._record.nodes, self._found.stats, self._phase)

    @cached_property
    def checks(self) -> tuple[CheckRow, ...]:
        return tuple(
            CheckRow(
                check.brick,
                check.assertion,
                check.passed or bool(check.skipped),
                check.max_error,
                check.tolerance,
                check.not_finite,
                check.skipped,
                check.note,
            )
            for check in self._record.checks.values()
        )

    @cached_property
    def bricks(self) -> list[BrickStats]:
        bricks = brick_stats(self.totals)
        if self._found.window and self.totals is not self.whole and self.totals.step is not None:
            # If the window's edge separates a brick from those inside it, its exclusive time would be negative.
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
        if manifest and self.roofs and said == way_out_on_cpu(manifest.threads):  # they were measured since
            said = said if missing_ceilings(roofline(self.roofs, self.rows)) else ""
        return said or (shared_note(self.steps) if self.roofs else "")

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
    """See SourceView.second; a merge has no clock."""
    has_clock = record.window.has_begun and not record.has_ended
    return record.window.now_ns // 1_000_000_000 if has_clock else None


def has_data(record: SourceRecord, phase: str | None = None) -> bool:
    """Whether the view for exactly this `phase` would have data, without making it."""
    shown, count = shown_phase(record, phase), record.stats.column("count")
    if phase is not None and shown != phase:
        return False
    if shown is None:
        return bool(
            count[: len(record.nodes) + 1][record.nodes.column("kind_of")[: len(count)] == NodeKind.BRICK].any()
        )
    steps = [
        node for node in record.nodes.children[None] if node.kind is NodeKind.STEP and display_name(node) == shown
    ]
    return any(step.id < len(count) and count[step.id] for step in steps)


def is_selected(record: SourceRecord, wanted: Sequence[str]) -> bool:
    """Whether `wanted` names `record` by key, pid or `rank=N`."""
    names = [record.key]
    if record.hello is not None:
        names += [str(record.hello.pid), f"rank={record.hello.rank}"]
    return any(name in wanted for name in names)


def state_of(record: SourceRecord) -> SourceStatus:
    """Return its last known state."""
    return record.state.state if record.state else SourceStatus.LIVE


def is_live(record: SourceRecord) -> bool:
    """Whether the process still runs, if that is known."""
    return state_of(record) is SourceStatus.LIVE


def _heard_s(record: SourceRecord) -> float | None:
    """Return when it was last heard of, in Unix time of its host."""
    hello = record.hello
    if hello is None:
        return None
    return (hello.realtime_ns + max(heard_ns(record) - hello.monotonic_ns, 0)) / 1e9


def shown_phase(record: SourceRecord, phase: str | None) -> str | None:
    """Return `phase`, or the most relevant phase if it has no such steps; None without steps.

    Preferred, in this order: not a warm-up; phases of a model that ran at least a tenth as long as any other;
    decoding; phases of the named model, if it decodes or ran at least half as long as any other; decode itself; the
    most time.
    """
    steps = [node for node in record.nodes.children[None] if node.kind is NodeKind.STEP]
    named = record.manifest.steps_of if record.manifest else ""
    total_ns = record.stats.column("total_ns")

    def steady_ns(step: Node) -> int:
        return int(total_ns[step.id]) if step.id < len(total_ns) and not is_warm_up(step.name) else 0

    of_models: Counter[str] = Counter()
    for step in steps:
        of_models[step.label] += steady_ns(step)
    longest_ns = max(of_models.values(), default=0)

    def liking(step: Node) -> tuple[bool, bool, bool, bool, bool, int]:
        taken_ns = steady_ns(step)
        ran_ns, decodes = of_models[step.label], bool(_DECODES.fullmatch(step.name))
        is_named = step.label == named and (decodes or 2 * ran_ns >= longest_ns)
        return bool(taken_ns), 10 * ran_ns >= longest_ns, decodes, is_named, step.name == "decode", taken_ns

    if any(display_name(step) == phase for step in steps):
        return phase
    return display_name(max(steps, key=liking)) if steps else None


def loss_view(record: SourceRecord) -> LossView:
    """Return how many of its records arrived here and how many did not."""
    received, state = record.stats.received, record.state
    if state is None:
        return LossView(received, received, 0, 0, 0, 0, 0)
    # If totals come in several messages, the state follows the last of them and is old until then.
    ahead = max(0, received - state.received)
    on_the_wire = max(0, state.received - received)
    return LossView(
        produced=state.produced + ahead,
        received=received,
        dropped=state.overwritten + state.rejected + on_the_wire,
        before_attach=state.before_attach,
        rejected=state.rejected,
        on_the_wire=on_the_wire,
        unread=max(0, state.unread - ahead),
        left_out=state.left_out,
    )


def window_view(record: SourceRecord, window: TimeRange) -> WindowView:
    """Return the length of its `window`, and the records lost in it."""
    losses, range_s = record.window.losses, None
    if record.window.is_range and (hello := record.hello) is not None:
        begin_s, end_s = (
            (hello.realtime_ns + at_ns - hello.monotonic_ns) / 1e9 for at_ns in (window.begin_ns, window.end_ns)
        )
        range_s = begin_s, end_s
    return WindowView(record.window.length_s, window.covers_s, losses.lost, losses.seen, range_s)


def _label(record: SourceRecord) -> str:
    hello = record.hello
    return f"{hello.program}, {hello.pid}@{hello.host}" if hello else record.key


def _newest_first(record: SourceRecord) -> tuple[bool, int]:
    return state_of(record) is not SourceStatus.LIVE, -(record.hello.realtime_ns if record.hello else 0)


def _kernels(record: SourceRecord, phase: str | None) -> tuple[BrickKernels, ...]:
    if record.burst is None:
        return ()
    return next((one.bricks for one in kernels_of(record.nodes.nodes, record.burst) if one.phase == phase), ())


def _only_backend(record: SourceRecord) -> str | None:
    """Return the backend if no manifest has one and all bricks agree."""
    named = record.nodes.backends
    return next(iter(named)) if len(named) == 1 else None
