"""Traces: results of the process's own tracer for activations, attention, logits, quantisation and the KV cache."""

from __future__ import annotations

from collections.abc import Iterable

from cbtop.protocol.messages import TraceAnomaly, TraceNumber, TraceSummary
from cbtop.viewmodels.model import NamedNumber, TraceRow, TraceView


def trace_views(summaries: Iterable[TraceSummary]) -> tuple[TraceView, ...]:
    """Return each trace by id, with the numbers of a row in the order they were sent."""
    return tuple(_view(summary) for summary in sorted(summaries, key=lambda summary: summary.trace))


def _view(summary: TraceSummary) -> TraceView:
    rows: dict[str, list[NamedNumber]] = {}
    for number in summary.numbers:
        if isinstance(number, TraceNumber):  # a hostile process may nest other messages
            rows.setdefault(number.row, []).append(NamedNumber(number.name, number.value))
    totals = rows.pop("", [])
    return TraceView(
        trace=summary.trace,
        name=summary.name,
        about=summary.about,
        forwards=summary.forwards,
        totals=tuple(totals),
        rows=tuple(TraceRow(name, tuple(numbers)) for name, numbers in rows.items()),
        anomalies=tuple(anomaly.text for anomaly in summary.anomalies if isinstance(anomaly, TraceAnomaly)),
    )
