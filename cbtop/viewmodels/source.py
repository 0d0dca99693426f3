"""One source, from the store's record to the frozen SourceView that every screen and report draws."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cbtop.client.store import SourceRecord
from cbtop.client.window import Stretch
from cbtop.profiler.books import books_of, outside_steps
from cbtop.profiler.brick_stats import brick_stats, category_stats
from cbtop.profiler.graph.nodes import display_name
from cbtop.profiler.phase_totals import PhaseTotals
from cbtop.profiler.stats import NodeStats
from cbtop.protocol.messages import Ceiling
from cbtop.protocol.vocabulary import NodeKind, SourceStatus
from cbtop.viewmodels.books import beside_view, books_view
from cbtop.viewmodels.bricks import brick_rows
from cbtop.viewmodels.categories import category_rows
from cbtop.viewmodels.graph import graph_rows
from cbtop.viewmodels.kernels import BrickKernels, kernels_of
from cbtop.viewmodels.layers import layers_view
from cbtop.viewmodels.model import (
    CheckRow,
    LossView,
    SourceSummary,
    SourceView,
    StepsView,
    StretchView,
    WindowView,
)
from cbtop.viewmodels.roofline import ceiling_rows, roofline, under_roofs
from cbtop.viewmodels.stall import stall_view
from cbtop.viewmodels.steps import pace, step_us_history, steps_views, tokens_per_sec_history
from cbtop.viewmodels.stretch import heard_ns, since_s, stretch_of, stretch_view
from cbtop.viewmodels.timeline import timeline_view
from cbtop.viewmodels.traces import trace_views

DEFAULT_PHASE = "decode"


def summaries(records: Iterable[SourceRecord]) -> tuple[SourceSummary, ...]:
    """Every source: the live ones first, the newest of each first."""
    ordered = sorted(records, key=_newest_first)
    return tuple(SourceSummary(record.key, _label(record), state_of(record)) for record in ordered)


@dataclass(frozen=True, slots=True)
class Shown:
    """What of a source is shown: statistics, the time that they are of, and the steps in it."""

    stats: NodeStats
    stretch: Stretch | None  # None: no step has been seen
    window: Stretch | None  # None: all that was seen
    phases: tuple[StepsView, ...]
    stretch_view: StretchView | None


def shown(record: SourceRecord, *, window: bool) -> Shown:
    """All that was seen of `record`, or its window.

    What was not watched for a second, or was found ended, has no window: of that all is shown.
    """
    is_all = not (window and record.window.has_watched)
    stats, seconds = (record.stats, None) if is_all else record.window.statistics(record.stats)
    stretch = stretch_of(record, seconds)
    phases = steps_views(record, stats, stretch)
    view = None if stretch is None else stretch_view(record, stats, stretch)
    if view and any(steps.is_sample for steps in phases):
        # Steps that left nothing ran in what would pass for the time between the others.
        view = replace(view, in_steps_us=None, between_us=None)
    return Shown(stats, stretch, seconds and (stretch or seconds), phases, view)


def source_view(
    record: SourceRecord,
    phase: str | None = None,
    *,
    window: bool = False,
    ceilings: Iterable[Ceiling] | None = None,
) -> SourceView:
    """Everything `record` shows for `phase` (None: decode, or whatever it has): of its window, or all of it.

    `ceilings`: the roofs over it; None: those that it announced.
    """
    found = shown(record, window=window)
    stats, phases = found.stats, found.phases
    name = shown_phase(record, phase)
    whole = PhaseTotals.of(record.nodes, record.stats, name)
    totals = PhaseTotals.of(record.nodes, stats, name) if found.window else whole
    checks = tuple(
        CheckRow(check.brick, check.assertion, check.passed, check.max_error, check.tolerance)
        for check in record.checks.values()
    )
    steps = next((steps for steps in phases if steps.phase == name), None)
    bricks = brick_stats(totals)
    if found.window and totals.step is not None:
        # A brick that the window's edge cuts off from those inside it would have an exclusive time below 0.
        bricks = [replace(one, exclusive_ns=one.closed.exclusive_ns + one.adopted_ns) for one in bricks]
    passed: dict[str, list[bool]] = {}
    for check in checks:
        passed.setdefault(check.brick, []).append(check.passed)
    roofs = ceiling_rows(record.ceilings.values() if ceilings is None else ceilings, _heard_s(record))
    rows = under_roofs(brick_rows(bricks, totals, passed, record.trend), roofs)
    in_burst = {one.node: one for one in record.burst.kernels} if record.burst else None
    nodes, path = graph_rows(totals, record.dependencies, in_burst)
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
        bricks=rows,
        categories=category_rows(category_stats(bricks), totals),
        roofline=roofline(roofs, rows, manifest.roofs if manifest else ""),
        graph=nodes,
        layer_times=layers_view(totals),
        books=books_view(books_of(totals, whole)),
        outside=beside_view(outside_steps(record.nodes, stats)) if totals.step is not None else None,
        loss=loss_view(record),
        checks=checks,
        tokens_per_sec_history=tokens_per_sec_history(record, steps),
        traces=trace_views(record.traces.values()),
        pace=pace(record, name),
        step_us_history=step_us_history(record, name),
        rank=hello.rank if hello else None,
        local_rank=hello.local_rank if hello else None,
        world_size=hello.world_size if hello else None,
        sample_every=record.sample_every,
        overhead=record.sampling,
        window=window_view(record, found.window) if found.window else None,
        since_s=since_s(record),
        stretch=found.stretch_view,
        critical_path=path,
        stall=stall_view(record),
        kernels=_kernels(record, name),
        timeline=timeline_view(record, name, is_sample=steps is not None and steps.is_sample),
    )


def has_data(record: SourceRecord, phase: str | None = None) -> bool:
    """Whether its view for `phase` has data, without making it; one of another phase has none."""
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
    """Whether `record` is one of those that `wanted` names: by key, pid or `rank=N`."""
    names = [record.key]
    if record.hello is not None:
        names += [str(record.hello.pid), f"rank={record.hello.rank}"]
    return any(name in wanted for name in names)


def state_of(record: SourceRecord) -> SourceStatus:
    """How it is, as far as is known."""
    return record.state.state if record.state else SourceStatus.LIVE


def is_live(record: SourceRecord) -> bool:
    """Whether the process still runs, as far as is known."""
    return state_of(record) is SourceStatus.LIVE


def _heard_s(record: SourceRecord) -> float | None:
    """When it was heard of last, in Unix time of its host."""
    hello = record.hello
    if hello is None:
        return None
    return (hello.realtime_ns + max(heard_ns(record) - hello.monotonic_ns, 0)) / 1e9


def shown_phase(record: SourceRecord, phase: str | None) -> str | None:
    """`phase` or, where it has no such steps, the default or the first there is; None without steps."""
    names = [display_name(node) for node in record.nodes.children[None] if node.kind is NodeKind.STEP]
    return phase if phase in names else DEFAULT_PHASE if DEFAULT_PHASE in names else next(iter(names), None)


def loss_view(record: SourceRecord) -> LossView:
    """What of its records came here, and what did not."""
    received, state = record.stats.received, record.state
    if state is None:
        return LossView(received, received, 0, 0, 0, 0, 0)
    return LossView(
        produced=state.produced,
        received=received,
        dropped=state.overwritten + state.rejected + state.received - received,
        before_attach=state.before_attach,
        rejected=state.rejected,
        on_the_wire=state.received - received,
        unread=state.unread,
        left_out=state.left_out,
    )


def window_view(record: SourceRecord, window: Stretch) -> WindowView:
    """What of its `window` is there, and was lost."""
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
    """The backend, where no manifest says it and all bricks agree."""
    named = record.nodes.backends
    return next(iter(named)) if len(named) == 1 else None
