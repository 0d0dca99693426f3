"""Write the list of sources as text and JSON: one entry per source, the reasons for n/a, the slowest rank, and
cbtop's own cost.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from cbtop import units
from cbtop.comparison.noise import Change
from cbtop.reports.tables import Table, table
from cbtop.text import comparison_text, merge_text, range_text, rate_text, recording_text, source_text
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.sources import ClockView, ListView, ProcessCost, SourceRow
from cbtop.viewmodels.stall import StallView
from cbtop.viewmodels.straggler import StragglerView

SCHEMA = "cbtop.sources/1"
PROVENANCE = {
    "derived from measured": [
        "tokens_per_sec",
        "tokens_per_sec_in_steps",
        "steps_per_sec",
        "samples_per_sec",
        "since_baseline",
        "since_s",
        "lost_percent",
        "lag_s",
        "clock_offset_us",
        "clock_monotonic_offset_us",
        "clock_uncertainty_us",
        "overhead_percent",
        "overhead_low_percent",
        "overhead_high_percent",
        "stragglers",
    ],
    "static": ["rank", "local_rank", "world_size", "sample_every", "model"],
}
NO_LIST = "sources: n/a (nobody keeps a list of them)"


def listed_in(sources: Iterable[SourceView]) -> ListView | None:
    """Return the list of all sources, taken from the first view that has this list.

    Return None if no view has the list.
    """
    return next((source.listed for source in sources if source.listed is not None), None)


def listed_text(listed: ListView | None) -> str:
    """Return the text of all sources and of cbtop's own cost."""
    if listed is None:
        return NO_LIST
    costs = [f"cbtop: {source_text.process_cost(cost)}" for cost in listed.costs]
    return "\n".join((sources_text(listed.rows(), is_compared=listed.is_compared), *costs))


def sources_text(rows: Sequence[SourceRow], *, is_compared: bool = False) -> str:
    """Return two lines per source, followed by remarks about some sources.

    With `is_compared`, add the change of each source's tokens/s since the baseline.
    """
    who = ("pid", "host", "rank", "program", "model", "state", "on", "phase")
    runs: Table = [(*who, "since", "tokens/s", "steps/s", "step p50"), *map(_runs, rows)]
    heads = ("pid", "lost", "lost %", "before attach", "unread", "lag", "recording costs")
    known: Table = [heads, *map(_known, rows)]
    lines = [table(runs, left=9), "", table(known, left=1)]
    lines += [f"{_who(row)}: {source_text.stall(row.stall)}" for row in rows if row.stall]
    if is_compared:
        lines += [f"{_who(row)}, Δ (derived): {_since_baseline(row)}" for row in rows]
    lines += [f"straggler: {merge_text.straggler(found)} (derived)" for found in _stragglers(rows)]
    lines += [
        f"{_who(row)}: {units.exact_count(row.loss.left_out)} announcements left out"
        for row in rows
        if row.loss.left_out
    ]
    lines += [
        f"{_who(row)}: {sample}{', in every figure' if row.steps and row.steps.is_sample else ''}"
        for row in rows
        if (sample := recording_text.sample(row.sample_every))
    ]
    clocks = {row.host: source_text.clock(row.clock) for row in rows if row.clock and row.clock.uncertainty_us}
    lines += [f"clock of {host}: {clock} (derived)" for host, clock in clocks.items()]
    lines += [f"n/a: {why}" for why in source_text.unknown_figures(rows)]
    return "\n".join(lines)


def sources_json(rows: Sequence[SourceRow]) -> str:
    """Return the list of sources as JSON."""
    document = {
        "schema": SCHEMA,
        "provenance": PROVENANCE,
        "sources": [row_fields(row) for row in rows],
        "stragglers": [straggler_fields(found) for found in _stragglers(rows)],
    }
    return json.dumps(document, allow_nan=False)


def _who(row: SourceRow) -> str:
    return f"pid {row.pid} of {row.host}"


def _since_baseline(row: SourceRow) -> str:
    return units.NOT_MEASURED if row.rate_change is None else comparison_text.rate_change(row.rate_change)


def _runs(row: SourceRow) -> tuple[str, ...]:
    state = source_text.standing(row)
    return (
        str(row.pid),
        row.host,
        merge_text.placed_rank(row),
        row.program,
        row.model or units.NOT_MEASURED,
        state if row.stale_s is None else f"{state}, {source_text.stale(row.stale_s)}",
        source_text.on_devices(row),
        row.phase or units.NOT_MEASURED,
        range_text.rates_since(row),
        rate_text.rate(row, row.steps.tokens_per_sec if row.steps else None),
        rate_text.rate(row, row.steps_per_sec),
        units.duration(row.steps.p50_us if row.steps else None),
    )


def _known(row: SourceRow) -> tuple[str, ...]:
    return (
        str(row.pid),
        units.count(row.loss.lost),
        units.percent_number(row.loss.lost_percent),
        units.count(row.loss.before_attach),
        units.count(row.loss.unread),
        source_text.lag(row),
        recording_text.short_overhead(row.overhead),
    )


def row_fields(row: SourceRow) -> dict[str, Any]:
    """Return the JSON fields of a source in the list."""
    sampling = row.overhead
    return {
        "key": row.key,
        "host": row.host,
        "pid": row.pid,
        "rank": row.rank,
        "local_rank": row.local_rank,
        "world_size": row.world_size,
        "sample_every": row.sample_every,
        "program": row.program,
        "model": row.model,
        "state": row.standing,
        "state_reason": row.state_reason,
        "stall": stall_fields(row.stall),
        "stale_s": row.stale_s,
        "phase": row.phase,
        "steps": row.steps.count if row.steps else None,
        "recorded_steps": row.steps.recorded if row.steps else None,
        "since_s": row.since_s,
        "window_covers_s": row.window.covers_s if row.window else None,
        "range_s": row.window.range_s if row.window else None,
        "tokens_per_sec": row.steps.tokens_per_sec if row.steps else None,
        "tokens_per_sec_in_steps": row.steps.tokens_per_sec_in_steps if row.steps else None,
        "steps_per_sec": row.steps_per_sec,
        "samples_per_sec": row.steps.samples_per_sec if row.steps else None,
        "rates_are_lower_bounds": row.are_rates_least,
        "since_baseline": None if row.rate_change is None else change_fields(row.rate_change),
        "step_p50_us": row.steps.p50_us if row.steps else None,
        "produced": row.loss.produced,
        "dropped": row.loss.dropped,
        "dropped_before_attach": row.loss.before_attach,
        "lost": row.loss.lost,
        "lost_percent": row.loss.lost_percent,
        "unread": row.loss.unread,
        "announcements_left_out": row.loss.left_out,
        "lag_s": row.lag_s,
        "devices": None if row.devices is None else list(row.devices),
        "overhead_percent": sampling.overhead_percent if sampling else None,
        "overhead_low_percent": sampling.low_percent if sampling else None,
        "overhead_high_percent": sampling.high_percent if sampling else None,
        **clock_fields(row.clock),
        "unknown": {unknown.figure: unknown.why for unknown in row.unknown},
    }


def cost_fields(cost: ProcessCost) -> dict[str, Any]:
    """Return the JSON fields for the cost of a cbtop process."""
    return asdict(cost)


def change_fields(found: Change) -> dict[str, Any]:
    """Return the JSON fields for the change of a figure since the baseline, with the interval that decides the
    verdict.
    """
    told = found.decisive
    return {
        "before": told.before,
        "now": told.now,
        "delta": told.delta,
        "plus_minus": told.half,
        "percent": told.percent,
        "beyond_noise": found.is_beyond_noise,
        "relative_to_others": told is not found,
    }


def clock_fields(clock: ClockView | None) -> dict[str, float | None]:
    """Return the clocks of a source's host minus our clocks, as JSON fields."""
    return {
        "clock_offset_us": clock.offset_us if clock else None,
        "clock_monotonic_offset_us": clock.monotonic_offset_us if clock else None,
        "clock_uncertainty_us": clock.uncertainty_us if clock else None,
    }


def stall_fields(found: StallView | None) -> dict[str, Any] | None:
    """Return the JSON fields of a stall (lack of progress), or None (null) if the process makes progress."""
    return None if found is None else asdict(found)


def straggler_fields(found: StragglerView | None) -> dict[str, Any] | None:
    """Return the JSON fields of the straggler (slowest rank), or None (null) without a straggler."""
    return None if found is None else asdict(found)


def _stragglers(rows: Sequence[SourceRow]) -> list[StragglerView]:
    """Return the straggler (slowest rank) of each job that has one."""
    return list(dict.fromkeys(row.straggler for row in rows if row.straggler is not None))
