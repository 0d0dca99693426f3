"""View of the traces: results of the process's own tracer about activations, attention, logits, quantisation and the
KV cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cbtop.protocol.messages import TraceAnomaly, TraceNumber, TraceSummary


@dataclass(frozen=True, slots=True)
class NamedNumber:
    name: str
    value: float | None


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One row of a trace, such as a layer or a brick. Rows may have different sets of numbers."""

    name: str
    numbers: tuple[NamedNumber, ...]


@dataclass(frozen=True, slots=True)
class TraceView:
    """A trace of the model's internals (such as its logits), from `forwards` sampled forward passes."""

    trace: str  # id of the kind of trace, from MLT-01 to MLT-05
    name: str
    about: str
    forwards: int
    totals: tuple[NamedNumber, ...]
    rows: tuple[TraceRow, ...]
    anomalies: tuple[str, ...]


def trace_views(summaries: Iterable[TraceSummary]) -> tuple[TraceView, ...]:
    """Return the traces, sorted by id. Within a row, numbers are in the order in which the process sent them."""
    return tuple(_view(summary) for summary in sorted(summaries, key=lambda summary: summary.trace))


def _view(summary: TraceSummary) -> TraceView:
    rows: dict[str, list[NamedNumber]] = {}
    for number in summary.numbers:
        # Only a hostile process sends other types here, so ignore them.
        if isinstance(number, TraceNumber):
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
