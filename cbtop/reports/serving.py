"""Tables about the requests that an engine serves, and about the engine's time."""

from __future__ import annotations

from cbtop import units
from cbtop.protocol.vocabulary import EnginePart
from cbtop.reports.tables import Table, table
from cbtop.text import serving_text
from cbtop.viewmodels.serving import LoadView, SchedulesView, ServingView
from cbtop.viewmodels.source import SourceView

MAX_REQUESTS = 20  # newest requests in the table; the JSON has all
MAX_LOADS = 20  # rows of the load over time
IN_MODEL = ("PrepareInputs", "Sampling")  # bricks of a model step that are not the model


def serving_tables(view: SourceView) -> str:
    """Return tables of the engine's parts, its load over time and its newest requests. Returns "" without an
    engine.
    """
    found = view.serving
    if found is None:
        return ""
    texts = ["\n".join(serving_text.lines(found)[:1])]
    texts += [_parts(found, view)] if found.parts else []
    texts += [_queues(found.schedules)] if found.schedules else []
    texts += [_loads(found.loads)] if found.loads else []
    texts += [_requests(found)] if found.requests else []
    return "\n\n".join(texts)


def _parts(found: ServingView, view: SourceView) -> str:
    rows: Table = [(f"{found.engine}, {serving_text.of_iterations(found)}", "share %", "mean ms", "p50 ms")]
    for part in found.parts:
        times = map(units.milliseconds, (part.mean_us, part.p50_us))
        rows.append((part.name, units.percent_number(part.percent), *times))
        if part.name == EnginePart.MODEL:
            rows += _inside_model(view)
    rows.append(("engine step", units.percent_number(100.0), units.milliseconds(found.mean_us), ""))
    return table(rows, left=1)


def _inside_model(view: SourceView) -> Table:
    """Return rows of the shown phase: its steps, and bricks of a step that are not the model."""
    times = [] if view.steps is None else [(f"{view.steps.phase} step", view.steps.mean_us, view.steps.p50_us)]
    # These bricks run once in each step, so their time per call is their time per step.
    inside = (brick for name in IN_MODEL for brick in view.bricks if brick.name == name)
    times += [(brick.name, brick.avg_inclusive_us, brick.p50_us) for brick in inside]
    return [(f"  {name}", "", *map(units.milliseconds, both)) for name, *both in times]


def _queues(found: SchedulesView) -> str:
    limit = units.NOT_MEASURED if found.max_running is None else units.count(found.max_running)
    text = (
        f"{units.number(found.mean_requests)} requests in a step, at most {limit}; {units.count(found.preemptions)} "
        f"preempted (the latest {units.counted(found.count, 'schedule')})"
    )
    rows: Table = [("requests waited because of", "schedules %", "running", "waiting", "KV cache %")]
    for queue in found.queues:
        cache = units.NOT_MEASURED if queue.cache_percent is None else units.percent_number(queue.cache_percent)
        means = map(units.number, (queue.mean_running, queue.mean_waiting))
        rows.append((queue.reason, units.percent_number(queue.percent), *means, cache))
    return f"{text}\n{table(rows, left=1)}" if found.queues else text


def _loads(loads: tuple[LoadView, ...]) -> str:
    """Return at most MAX_LOADS evenly spread rows, which include the first and the newest load."""
    last = len(loads) - 1
    chosen = sorted({round(at * last / max(1, MAX_LOADS - 1)) for at in range(MAX_LOADS)})
    rows: Table = [("load at s", "running", "waiting", "KV cache %")]
    for load in (loads[at] for at in chosen):
        cache = units.NOT_MEASURED if load.cache_percent is None else units.percent_number(load.cache_percent)
        rows.append((f"{load.at_s:.1f}", units.count(load.running), units.count(load.waiting), cache))
    return table(rows, left=1)


def _requests(found: ServingView) -> str:
    heads = (
        "request",
        "arrived s",
        "queued ms",
        "engine TTFT ms",
        "ms/token",
        "total ms",
        "prompt",
        "cached",
        "output",
    )
    rows: Table = [(*heads, "preempted", "end")]
    for row in found.requests[-MAX_REQUESTS:]:
        times = map(units.milliseconds, (row.queued_us, row.first_token_us, row.per_token_us, row.total_us))
        counts = map(units.count, (row.prompt_tokens, row.cached_tokens, row.output_tokens, row.preemptions))
        rows.append((row.name, f"{row.arrived_s:.3f}", *times, *counts, row.reason or "runs"))
    text = table(rows, left=1)
    more = len(found.requests) - MAX_REQUESTS + found.left_out
    return f"{text}\n{units.count(more)} earlier requests are not listed" if more > 0 else text
