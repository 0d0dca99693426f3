"""The traces of what a model computes, as text."""

from __future__ import annotations

from cbtop import units
from cbtop.reports.tables import Table, table
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.traces import TraceView


def traces_section(view: SourceView) -> str:
    return "\n\n".join(_trace(trace) for trace in view.traces)


def _trace(trace: TraceView) -> str:
    passes = f", {units.count(trace.forwards)} passes traced" if trace.forwards else ""
    lines = [f"{trace.trace} {trace.name}{passes}: {trace.about}"]
    totals: Table = [(number.name, _traced(number.value)) for number in trace.totals]
    if trace.totals:
        lines.append(", ".join(" ".join(pair) for pair in totals) if trace.rows else table(totals, left=1))
    if trace.rows:
        columns = tuple(number.name for number in trace.rows[0].numbers)
        rows: Table = [("", *columns)]
        for row in trace.rows:
            numbers = {number.name: number.value for number in row.numbers}
            rows.append((row.name, *(_traced(numbers.get(column)) for column in columns)))
        lines.append(table(rows, left=1))
    lines += [f"anomaly: {text}" for text in trace.anomalies] or ["no anomalies"]
    return "\n".join(lines)


def _traced(value: float | None) -> str:
    """Format a number of a model trace with four digits. Very large and very small numbers get an exponent."""
    if value is None:
        return units.NOT_MEASURED
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e12 else f"{value:.4g}"
