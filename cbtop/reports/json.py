"""The JSON report `cbtop.snapshot/1`. Numbers have no unit, because the keys contain it. null means not measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from cbtop.comparison.comparison import Comparison, WorkChange
from cbtop.comparison.items import WHOLE_STEP, Brick
from cbtop.comparison.noise import Change
from cbtop.protocol.attributes import KernelAttributes
from cbtop.protocol.kernel_messages import KernelTimes
from cbtop.reports.calls import calls_fields
from cbtop.reports.machines import machine_json, machines_of
from cbtop.reports.sources import (
    change_fields,
    clock_fields,
    cost_fields,
    listed_in,
    row_fields,
    stall_fields,
    straggler_fields,
)
from cbtop.text.statistics import STATISTICS, Of, Origin, keys_of, statistics_of
from cbtop.units import NOT_MEASURED
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.categories import CategoryRow
from cbtop.viewmodels.checks import CheckRow
from cbtop.viewmodels.counters import CountersView
from cbtop.viewmodels.graph import CriticalPathView, GraphRow, tree_text
from cbtop.viewmodels.lanes import Gap, TimelineSpan
from cbtop.viewmodels.layers import LayersView
from cbtop.viewmodels.loss import LossView
from cbtop.viewmodels.not_instrumented import not_instrumented
from cbtop.viewmodels.roofline import RooflineView
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.steps import StepsView
from cbtop.viewmodels.time_breakdown import BesideView, TimeBreakdownView
from cbtop.viewmodels.time_range import TimeRangeView
from cbtop.viewmodels.time_travel import ReplayView
from cbtop.viewmodels.timeline import TimelineView
from cbtop.viewmodels.traces import TraceView

SCHEMA = "cbtop.snapshot/1"
MAX_LISTED = 512  # A row of the timeline has at most this many spans, and a lane at most this many gaps.
_POINT_KEYS = (
    "intensity",
    "gflops",
    "gb_per_sec",
    "attainable_gflops",
    "percent_of_roof",
    "above_roof",
    "roof_unsure",
)
# Each origin -> the JSON keys of the source's figures with this origin. Figures in the table of statistics are left
# out. A figure without an entry is counted or measured.
OTHER_ORIGINS = {
    Origin.SHAPES: [],
    Origin.MEASUREMENTS: [
        "tokens_per_sec",
        "tokens_per_sec_in_steps",
        "samples_per_sec",
        "since_s",
        "stretch",
        "moved_gb_per_sec",
        "union_us",
        "at_once",
        "books",
        "counters",
        "sampled",
        "outside_steps",
        "clock_offset_us",
        "clock_monotonic_offset_us",
        "clock_uncertainty_us",
        "straggler",
        "ranks",
        "critical_path",
        "layer_times",
        "training",
        "serving",
        "ridges",
        "spread_percent",
        "unsure",
        "age_s",
        "baseline",
        "since_baseline",
        "verdicts",
        "withheld",
        "trend_us",
        "trail",
        "overhead_percent",
        "low_percent",
        "high_percent",
        "steps_per_sec",
        "lost_percent",
        "lag_s",
    ],
    Origin.DECLARED: [
        "rank",
        "local_rank",
        "world_size",
        "sample_every",
        "allowed_percent",
        "model",
        "architecture",
        "quantization",
        "layers",
        "weights_bytes",
        "dtype",
        "dtypes",
        "modules",
        *(attribute.name for attribute in fields(KernelAttributes)),
    ],
}


def json_report(sources: Sequence[SourceView], replay: ReplayView | None = None) -> str:
    """Return the JSON document with all data of all sources."""
    provenance = {origin.value: [*keys_of(origin), *keys] for origin, keys in OTHER_ORIGINS.items()}
    if any(source.window for source in sources):
        provenance[Origin.MEASUREMENTS.value] += [row.key for row in STATISTICS if row.derived_in_window]
    if any(row.budget_gb_per_sec is not None for source in sources for row in source.bricks):
        provenance[Origin.DECLARED.value].remove("budget_us_per_token")
        provenance[Origin.MEASUREMENTS.value].append("budget_us_per_token")
    listed = listed_in(sources)
    document = {
        "schema": SCHEMA,
        "replay": None if replay is None else asdict(replay),
        "provenance": provenance,
        "machines": [machine_json(machine) for machine in machines_of(sources)],
        "listed": [row_fields(row) for row in (listed.rows() if listed else ())],
        "costs": [cost_fields(cost) for cost in (listed.costs if listed else ())],
        "sources": [_source(source) for source in sources],
    }
    return json.dumps(document, allow_nan=False)


def _source(view: SourceView) -> dict[str, Any]:
    graph = tuple(view.graph)
    places = view.baseline.places if view.baseline is not None else {}
    return {
        **_process(view),
        "model": view.model,
        "architecture": view.architecture,
        "quantization": view.quantization,
        "backend": view.backend,
        "threads": view.threads,
        "layers": view.layers,
        "weights_bytes": view.weights_bytes,
        **_time_covered(view),
        "moved_gb_per_sec": view.moved_gb_per_sec,
        "phase": view.phase,
        "steps": _steps(view.steps),
        "phases": [_steps(steps) for steps in view.phases],
        "rates_are_lower_bounds": view.are_rates_least,
        "bricks": [_brick(row) for row in view.bricks],
        "shares_close": view.shares_close,
        "training": None if view.training is None else asdict(view.training),
        "serving": None if view.serving is None else asdict(view.serving),
        "layer_times": _layers(view.layer_times),
        "baseline": _baseline(view.baseline),
        "timeline": _timeline(view.timeline, view.baseline),
        "verdicts": [asdict(verdict) for verdict in view.verdicts],
        "withheld": None if view.withheld is None else asdict(view.withheld),
        "ranks": None if view.ranks is None else asdict(view.ranks),
        "kernels": [asdict(brick) for brick in view.kernels],
        "categories": [_category(row) for row in view.categories],
        "roofline": _roofline(view.roofline, view.baseline.work if view.baseline is not None else {}),
        "graph": [_node(row, places.get(row.place) if row.place else None) for row in graph],
        "tree": tree_text(graph),
        "critical_path": _critical_path(view.critical_path),
        "books": _books(view.books),
        "not_instrumented": _not_instrumented(view),
        "counters": _counters(view.counters),
        "sampled": [asdict(place) for place in view.sampled],
        "outside_steps": _beside(view.outside),
        "loss": _loss(view.loss),
        "checks": [_check(check) for check in view.checks],
        "guard": None if view.guard is None else asdict(view.guard),
        "traces": [_trace(trace) for trace in view.traces],
    }


def _process(view: SourceView) -> dict[str, Any]:
    """Return the JSON fields with the name and state of the process, and how its steps are recorded."""
    return {
        "key": view.key,
        "merged": None if view.merged is None else asdict(view.merged),
        "pid": view.pid if view.merged is None else None,
        "host": view.host,
        "program": view.program,
        "rank": view.rank,
        "local_rank": view.local_rank,
        "world_size": view.world_size,
        "sample_every": view.sample_every,
        "clock_resolution_ns": view.clock_resolution_ns,
        "overhead": None if view.overhead is None else asdict(view.overhead),
        "state": view.standing,
        "state_reason": view.state_reason,
        "stall": stall_fields(view.stall),
        "stale_s": view.stale_s,
        **clock_fields(view.clock),
        "straggler": straggler_fields(view.straggler),
        "activity": view.activity,
    }


def _time_covered(view: SourceView) -> dict[str, Any]:
    """Return the JSON fields of the time range that the figures cover."""
    return {
        "window_s": view.window.asked_s if view.window else None,
        "window_covers_s": view.window.covers_s if view.window else None,
        "range_s": view.window.range_s if view.window else None,
        "since_s": view.since_s,
        "stretch": _time_range(view.time_range),
        "inside_of_all": view.is_inside_of_all,
        "warm_up": asdict(view.warm_up) if view.warm_up else None,
    }


def _loss(loss: LossView) -> dict[str, Any]:
    return {
        "produced": loss.produced,
        "received": loss.received,
        "dropped": loss.dropped,
        "dropped_before_attach": loss.before_attach,
        "dropped_rejected": loss.rejected,
        "dropped_without_node": loss.without_node,
        "dropped_on_the_wire": loss.on_the_wire,
        "unread": loss.unread,
        "announcements_left_out": loss.left_out,
    }


def _check(check: CheckRow) -> dict[str, Any]:
    return {
        "brick": check.brick,
        "assertion": check.assertion,
        "passed": None if check.skipped else check.passed,
        "max_error": check.max_error,
        "tolerance": check.tolerance,
        "not_finite": check.not_finite or None,
        "skipped": check.skipped or None,
        "note": check.note or None,
    }


def _layers(layers: LayersView | None) -> dict[str, Any] | None:
    """Return each layer with the time of each brick in it. Return None (null) without layers."""
    if layers is None:
        return None
    names = [brick.name for brick in layers.bricks]
    return {
        "unit": layers.unit,
        "layers": [
            {
                "name": row.name,
                "id": row.id,
                "us": row.us,
                "p50_us": row.p50_us,
                "median_us": row.median_us,
                "to_median": row.to_median,
                "between_us": row.between_us,
                "bricks": [
                    {"name": name, "us": us, "p50_us": p50_us}
                    for name, us, p50_us in zip(names, row.cells, row.p50_cells, strict=True)
                    if us is not None
                ],
            }
            for row in layers.rows
        ],
    }


def _timeline(found: TimelineView | None, baseline: Comparison | None) -> dict[str, Any] | None:
    """Return the newest records by lane, or None (null) if they were not received.

    Only the newest spans and gaps are listed, but counts and sums are over all.
    """
    if found is None:
        return None
    return {
        "begin_monotonic_ns": found.begin_ns,
        "length_ns": found.length_ns,
        "newest": None if found.newest is None else _span(found.newest),
        "newest_ended_s": found.newest_s,
        "since_baseline": _step_beside(found, baseline),
        "steps": found.steps,
        "spans": found.spans,
        "records_older": found.older,
        "records_of_unknown_steps": found.unplaced,
        "records_missing": found.missing,
        "lanes": [
            {
                "name": lane.name,
                "backends": lane.backends,
                "parts_ns": lane.parts_ns(0, found.length_ns),
                "rows": [
                    {
                        "name": row.name,
                        "count": len(row.spans),
                        "spans": [_span(span) for span in row.spans[-MAX_LISTED:]],
                    }
                    for row in lane.rows
                ],
                "gaps_count": len(lane.gaps),
                "gaps": [_part(gap) for gap in lane.gaps[-MAX_LISTED:]],
            }
            for lane in found.lanes
        ],
    }


def _step_beside(found: TimelineView, baseline: Comparison | None) -> dict[str, float] | None:
    """Return the median time of the baseline's steps that have the same name as the newest step.

    Return None (null) if the time is unknown.
    """
    if baseline is None or found.newest is None:
        return None
    median_us = baseline.median_us(found.newest.name, WHOLE_STEP)
    return None if median_us is None else {"median_step_us": median_us}


def _span(span: TimelineSpan) -> dict[str, Any]:
    return {
        **_part(span),
        "node": span.node,
        "kind": span.kind.name.lower(),
        "category": None if span.category is None else span.category.display_name,
        "backend": span.backend or None,
        "elements": span.elements,
        "failed": span.is_failed,
        "plain": span.is_plain,
    }


def _part(part: TimelineSpan | Gap) -> dict[str, Any]:
    return {"name": part.name, "start_ns": part.start_ns, "duration_ns": part.duration_ns, "in": part.where}


def _baseline(found: Comparison | None) -> dict[str, Any] | None:
    """Return the changes since the baseline, or why they are unknown. Return None (null) without a baseline."""
    if found is None:
        return None
    base = found.base
    return {
        "of": base.key,
        "ended_s": base.ended_s,
        "covers_s": base.covers_s,
        "now_covers_s": found.now.covers_s,
        "not_comparable": found.why_not or None,
        "notes": list(found.notes),
        "phase": found.phase,
        "unit": f"us_per_{found.unit}",
        "tokens_per_sec": _change(found.tokens_per_sec),
        "step_us": _change(found.step_us),
        "changes": [
            {
                "brick": one.brick[0] if one.brick else None,
                "category": one.brick[1].display_name if one.brick else None,
                "layer": one.layer,
                **(_change(one.change) or {}),
                "calls_a_step": calls_fields(one.calls),
            }
            for one in found.changes
        ],
    }


def _change(found: Change | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {**change_fields(found), "median_calls_us": found.medians_us}


def _steps(steps: StepsView | None) -> dict[str, Any] | None:
    if steps is None:
        return None
    return {
        "phase": steps.phase,
        "count": steps.count,
        "recorded": steps.recorded,
        "failed": steps.failed,
        "is_sample": steps.is_sample,
        "tokens": steps.known_tokens,
        "tokens_per_sec": steps.tokens_per_sec,
        "tokens_per_sec_in_steps": steps.tokens_per_sec_in_steps,
        "steps_per_sec": steps.steps_per_sec,
        "samples_per_sec": steps.samples_per_sec,
        "us_per_token": {
            "p50": steps.us_per_token_p50,
            "p99": steps.us_per_token_p99,
            "max": steps.us_per_token_max,
        },
        "union_us": steps.union_us,
        "at_once": steps.at_once,
        "sequences": None if steps.sequences is None else asdict(steps.sequences),
        "cached_positions": None if steps.cached is None else asdict(steps.cached),
        "wall_us": {
            "mean": steps.mean_us,
            "recorded_mean": steps.recorded_mean_us,
            "p50": steps.p50_us,
            "p95": steps.p95_us,
            "p99": steps.p99_us,
            "min": steps.min_us,
            "max": steps.max_us,
        },
    }


def _time_range(time_range: TimeRangeView | None) -> dict[str, Any] | None:
    if time_range is None:
        return None
    return {
        "wall_us": time_range.wall_us,
        "in_steps_us": time_range.in_steps_us,
        "in_steps_by_phase": [asdict(phase) for phase in time_range.by_phase],
        "steps_count_whole": time_range.counts_whole,
        "warm_up_us": time_range.warm_up_us,
        "between_steps_us": time_range.between_us,
        "between_steps_percent": time_range.between_percent,
        "since_last_step_us": time_range.since_last_us,
    }


def _brick(row: BrickRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "of": row.rank,
        "category": row.category.display_name,
        "backend": row.backend or None,
        **_statistics(row, Of.BRICK),
        "durations": [asdict(bar) for bar in row.durations],
        "trend_us": list(row.trend_us),
        "trail": [point and {"intensity": point[0], "gflops": point[1]} for point in row.trail],
        "modules": [asdict(module) for module in row.modules],
    }


def _category(row: CategoryRow) -> dict[str, Any]:
    return {"name": row.name, **_statistics(row, Of.CATEGORY)}


def _statistics(row: BrickRow | CategoryRow | GraphRow, of: Of) -> dict[str, Any]:
    return {statistic.key: statistic.value(row) for statistic in statistics_of(of)}


def _roofline(view: RooflineView, before: Mapping[Brick, WorkChange]) -> dict[str, Any]:
    return {
        "ceilings": [
            {
                "name": row.name,
                "kind": row.kind,
                "value": row.value,
                "unit": row.unit,
                "provenance": row.provenance.value,
                "rounds": row.rounds,
                "median": row.median,
                "lowest": row.lowest,
                "spread_percent": row.spread_percent,
                "unsure": row.is_unsure,
                "load_percent": row.load_percent,
                "measured_on": row.measured_on or None,
                "age_s": row.age_s,
                "short": row.is_short,
                "dtype": row.dtype or None,
            }
            for row in view.ceilings
        ],
        "ridges": [asdict(ridge) for ridge in view.ridges],
        "ceilings_note": view.note or None,
        "points": [
            {
                "brick": point.name,
                **{key: getattr(point, key) for key in _POINT_KEYS},
                "bound": point.bound or NOT_MEASURED,
                "dtypes": list(point.dtypes),
                "since_baseline": _work_change(before.get(point.key)),
            }
            for point in view.points
        ],
        "without_work": list(view.without_work),
    }


def _work_change(found: WorkChange | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"intensity": found.intensity, "gflops": found.gflops, "gflops_change": _change(found.change)}


def _node(row: GraphRow, change: Change | None) -> dict[str, Any]:
    return {
        "id": row.id,
        "parent": row.parent,
        "kind": row.kind.name.lower(),
        "name": row.name,
        "label": row.node_label or None,
        "category": None if row.category is None else row.category.display_name,
        "backend": row.backend or None,
        **_statistics(row, Of.NODE),
        **asdict(row.kernel),
        "transfer": None if row.transfer is None else asdict(row.transfer) | {"gb_per_sec": row.copied_gb_per_sec},
        "burst": None if row.burst is None else _burst(row.burst),
        "since_baseline": _change(change),
    }


def _burst(times: KernelTimes) -> dict[str, Any]:
    return {
        "steps": times.steps,
        "launches": times.launches,
        "mean_us": times.mean_ns / 1e3,
        "deviation_us": times.deviation_ns / 1e3 if times.launches > 1 else None,
        "min_us": times.min_ns / 1e3,
        "max_us": times.max_ns / 1e3,
        "maker": times.maker or None,
        "source": times.source or None,
    }


def _critical_path(path: CriticalPathView | None) -> dict[str, Any] | None:
    """Return the critical path of the graph, or the reason why the path is unknown.

    Return None (null) if all nodes run one after another.
    """
    if path is None:
        return None
    known = not path.unknown
    return {
        "total_us": path.total_us if known else None,
        "nodes": path.nodes if known else None,
        "timed_nodes": path.timed_nodes if known else None,
        "unknown": path.unknown or None,
    }


def _trace(view: TraceView) -> dict[str, Any]:
    return {
        "trace": view.trace,
        "name": view.name,
        "about": view.about,
        "forwards": view.forwards,
        "totals": {number.name: number.value for number in view.totals},
        "rows": [
            {"name": row.name, "numbers": {number.name: number.value for number in row.numbers}} for row in view.rows
        ],
        "anomalies": list(view.anomalies),
    }


def _counters(found: CountersView | None) -> dict[str, Any] | None:
    if found is None:
        return None
    bricks = [asdict(one) | {"category": one.category and one.category.display_name} for one in found.bricks]
    return asdict(found) | {"bricks": bricks}


def _not_instrumented(view: SourceView) -> dict[str, Any] | None:
    found = not_instrumented(view)
    return None if found is None else asdict(found)


def _books(books: TimeBreakdownView | None) -> dict[str, Any] | None:
    if books is None:
        return None
    return {
        "wall_us": books.wall_us,
        "bricks_us": books.bricks_us,
        "gaps_us": books.gaps_us,
        "gaps": [{"name": gap.name, "us": gap.us} for gap in books.gaps],
        "overlap_us": books.overlap_us,
        "unattributed_us": books.unattributed_us,
        "residual_percent": books.residual_percent,
        "open_us": books.open_us,
        "close": books.close,
        "over_steps": books.over,
        "over_us": books.over_us,
        "outdone": [asdict(one) for one in books.exceeded],
        "loose_calls": books.unmatched_calls,
        "loose_us": books.unmatched_us,
        "cancelled_steps": books.cancelled,
        "crowded_steps": books.in_shared_lane,
        "adopted": _beside(books.adopted),
    }


def _beside(found: BesideView | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)
