"""The list of sources: one line each, and which rank is slower than the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cbtop import formatting as fmt
from cbtop.reports.json import clock_fields, stall_fields, straggler_fields
from cbtop.reports.tables import Table, table
from cbtop.viewmodels.model import SourceView, StragglerView

SCHEMA = "cbtop.sources/1"
PROVENANCE = {
    "derived from measured": [
        "tokens_per_sec",
        "tokens_per_sec_in_steps",
        "since_s",
        "clock_offset_us",
        "clock_monotonic_offset_us",
        "clock_uncertainty_us",
        "stragglers",
    ],
    "static": ["rank", "local_rank", "world_size", "sample_every", "model"],
}


def sources_text(views: Sequence[SourceView]) -> str:
    """One line a source, in the order given; then the stragglers and the clocks that are not ours."""
    rows: Table = [
        ("pid", "host", "rank", "program", "model", "state", "phase", "since", "tokens/s", "step p50", "drops")
    ]
    rows += [_row(view) for view in views]
    lines = [table(rows, left=8)]
    lines += [f"pid {view.pid} of {view.host}: {fmt.stall(view.stall)}" for view in views if view.stall]
    lines += [f"straggler: {fmt.straggler(found)} (derived)" for found in _stragglers(views)]
    lines += [
        f"pid {view.pid} of {view.host}: {view.loss.left_out} announcements left out"
        for view in views
        if view.loss.left_out
    ]
    lines += [
        f"pid {view.pid} of {view.host}: {sample}{', in every figure' if view.steps and view.steps.is_sample else ''}"
        for view in views
        if (sample := fmt.sample(view.sample_every))
    ]
    clocks = {view.host: view.clock for view in views if view.clock is not None and view.clock.uncertainty_us}
    lines += [
        f"clock of {host}: {fmt.clock_offset(clock.offset_us, clock.uncertainty_us)} (derived)"
        for host, clock in clocks.items()
    ]
    return "\n".join(lines)


def sources_json(views: Sequence[SourceView]) -> str:
    """The same for programs."""
    document = {
        "schema": SCHEMA,
        "provenance": PROVENANCE,
        "sources": [_source(view) for view in views],
        "stragglers": [straggler_fields(found) for found in _stragglers(views)],
    }
    return json.dumps(document, allow_nan=False)


def _row(view: SourceView) -> tuple[str, ...]:
    rank = "–" if view.rank is None else f"{view.rank}/{'?' if view.world_size is None else view.world_size}"
    state = fmt.standing(view)
    state = state if view.stale_s is None else f"{state}, {fmt.stale(view.stale_s)}"
    return (
        str(view.pid),
        view.host,
        rank,
        view.program,
        view.model or fmt.NOT_MEASURED,
        state,
        view.phase or fmt.NOT_MEASURED,
        fmt.shown_time(view).removeprefix("since ") if view.since_s is not None else fmt.NOT_MEASURED,
        fmt.number(view.steps.tokens_per_sec if view.steps else None),
        fmt.duration(view.steps.p50_us if view.steps else None),
        fmt.count(view.loss.dropped),
    )


def _source(view: SourceView) -> dict[str, Any]:
    return {
        "key": view.key,
        "host": view.host,
        "pid": view.pid,
        "rank": view.rank,
        "local_rank": view.local_rank,
        "world_size": view.world_size,
        "sample_every": view.sample_every,
        "program": view.program,
        "model": view.model,
        "state": view.standing,
        "state_reason": view.state_reason,
        "stall": stall_fields(view.stall),
        "stale_s": view.stale_s,
        "phase": view.phase,
        "steps": view.steps.count if view.steps else None,
        "recorded_steps": view.steps.recorded if view.steps else None,
        "since_s": view.since_s,
        "tokens_per_sec": view.steps.tokens_per_sec if view.steps else None,
        "tokens_per_sec_in_steps": view.steps.tokens_per_sec_in_steps if view.steps else None,
        "step_p50_us": view.steps.p50_us if view.steps else None,
        "produced": view.loss.produced,
        "dropped": view.loss.dropped,
        "announcements_left_out": view.loss.left_out,
        **clock_fields(view.clock),
    }


def _stragglers(views: Sequence[SourceView]) -> list[StragglerView]:
    """One a job."""
    return list(dict.fromkeys(view.straggler for view in views if view.straggler is not None))
