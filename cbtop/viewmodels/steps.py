"""Steps: how long a forward pass takes and how many tokens it brings, phase by phase."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from cbtop.client.store import SourceRecord
from cbtop.profiler.graph.node_table import NodeTable
from cbtop.profiler.graph.nodes import display_name
from cbtop.profiler.stats import NodeStats
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from cbtop.viewmodels.model import SpanView, StepsView

RECENT_NS = 3_000_000_000


def steps_views(record: SourceRecord, stats: NodeStats, covers_s: float | None = None) -> tuple[StepsView, ...]:
    """One entry a phase that ever ended a step, in the order they first ran, with the numbers of `stats`.

    `covers_s` is how many seconds these numbers are of; None: of the time from the first step to the last.
    """
    steps = [node for node in record.nodes.children[None] if node.kind is NodeKind.STEP]
    counts = record.stats.column("count")
    ran = [step for step in steps if step.id < len(counts) and counts[step.id]]
    in_others = _names_in_others(record.nodes) if record.sample_every > 1 else set()

    def is_sample(step: Node) -> bool:
        """Where none was plain, others may have left nothing (llama.cpp's do); those in a plain one leave nothing."""
        is_known = record.stats.rare("plain", (step.id,)) and display_name(step) not in in_others
        return record.sample_every > 1 and not is_known

    return tuple(_steps_view(record, stats, step, covers_s, is_sample=is_sample(step)) for step in ran)


def tokens_per_sec_history(record: SourceRecord, phase: str | None) -> tuple[float, ...]:
    """Tokens per second of the time in which steps ran, one value a second, oldest first; 0 where no step ended."""
    samples = list(record.history.get(phase or "", ()))
    return tuple(_rate(new.tokens - old.tokens, new.union_ns - old.union_ns) or 0.0 for old, new in pairwise(samples))


def _names_in_others(nodes: NodeTable) -> set[str]:
    """The names of steps that ran inside other steps."""
    step_of = nodes.column("step_of")
    is_inside = (nodes.column("kind_of") == NodeKind.STEP) & (step_of >= 0) & (step_of != np.arange(len(step_of)))
    return {display_name(nodes[node]) for node in np.flatnonzero(is_inside).tolist()}


def _steps_view(
    record: SourceRecord, stats: NodeStats, step: Node, covers_s: float | None, *, is_sample: bool
) -> StepsView:
    phase = display_name(step)
    calls, recent = stats.calls([step.id]), _recent(record, phase)
    if calls is None:  # none of them in these statistics
        return StepsView(phase, 0, 0, None, recent, recorded=0, is_sample=is_sample)
    count, tokens, total_ns = calls.count, calls.elements, calls.total_ns
    union_ns = stats.rare("union_ns", (step.id,))
    first_ns, last_ns = stats.rare("first_ns", (step.id,)), stats.rare("last_ns", (step.id,))
    wall_ns = last_ns - first_ns if covers_s is None else round(covers_s * 1e9)
    p50, p95, p99 = (_us(value) for value in (calls.p50_ns, calls.p95_ns, calls.p99_ns))
    is_counted = not stats.rare("uncounted", (step.id,))  # else the tokens are those of some steps only
    tokens_a_step = tokens / count if is_counted else 0
    return StepsView(
        phase=phase,
        count=count,
        recorded=max(0, count - stats.rare("plain", (step.id,))),
        tokens=tokens,
        tokens_per_sec=_rate(tokens, union_ns) if is_counted else None,
        recent_tokens_per_sec=recent if is_counted else None,
        mean_us=total_ns / count / 1e3,
        p50_us=p50,
        p95_us=p95,
        p99_us=p99,
        us_per_token_p50=p50 / tokens_a_step if p50 and tokens_a_step else None,
        us_per_token_p99=p99 / tokens_a_step if p99 and tokens_a_step else None,
        union_us=union_ns / 1e3,
        at_once=total_ns / union_ns if union_ns and not is_sample else None,
        wall_us=wall_ns / 1e3 if wall_ns else None,
        tokens_per_wall_sec=_rate(tokens, wall_ns) if is_counted and not is_sample else None,
        sequences=_span(stats, step.id, "sequences"),
        cached=_span(stats, step.id, "kept"),
        is_sample=is_sample,
    )


def _span(stats: NodeStats, step: int, name: str) -> SpanView | None:
    given = stats.rare(f"{name}_given", (step,))
    if not given:
        return None
    least, most = (
        stats.rare(column, (step,)) if step in stats.nodes_with(column) else None
        for column in (f"{name}_least", f"{name}_most")
    )
    return SpanView(stats.rare(name, (step,)) / given, least, most, given)


def _recent(record: SourceRecord, phase: str) -> float | None:
    latest = record.latest.get(phase)
    if latest is None:
        return None
    older = [s for s in record.history.get(phase, ()) if latest.monotonic_ns - s.monotonic_ns <= RECENT_NS]
    if not older:
        return None
    return _rate(latest.tokens - older[0].tokens, latest.union_ns - older[0].union_ns)


def _rate(tokens: int, time_ns: int) -> float | None:
    return tokens / time_ns * 1e9 if time_ns > 0 else None


def _us(value_ns: float | None) -> float | None:
    return None if value_ns is None else value_ns / 1e3
