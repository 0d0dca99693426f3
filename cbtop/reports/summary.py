"""The end of a run in ten lines."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop import formatting as fmt
from cbtop.viewmodels.model import Severity, SourceView, StepsView

MAX_BRICKS = 5
MAX_VERDICTS = 2


def summary(view: SourceView, next_command: str, more_processes: int = 0) -> list[str]:
    """Return at most ten lines on the steps of `view`, its costliest bricks and its worst verdicts."""
    lines = [_rates(view, view.steps)] if view.steps else []
    lines += _costliest(view)
    worst = [verdict for verdict in view.verdicts if verdict.severity is not Severity.NOTE]
    lines += [f"{verdict.severity} {verdict.id}: {verdict.sentence}" for verdict in worst[:MAX_VERDICTS]]
    if more_processes:
        lines.append(f"{more_processes} more process{'es' * (more_processes > 1)}: {next_command}")
    return [*lines, f"next: {next_command}"]


def _rates(view: SourceView, steps: StepsView) -> str:
    """`decode: 42.1 tokens/s, step p50 23.7 ms, p99 25.0 ms (last 421 steps, 10.0 s)`."""
    p50, p99 = fmt.duration(steps.p50_us), fmt.duration(steps.p99_us)
    of = f"last {fmt.counted(steps.count, 'step')}"
    if view.stretch is not None:
        of += f", {fmt.duration(view.stretch.wall_us)}"
    return f"{steps.phase}: {fmt.throughput(view, steps)}, step p50 {p50}, p99 {p99} ({of})"


def _costliest(view: SourceView) -> Iterator[str]:
    """A line for each of the bricks that take most of the step time."""
    rows = [row for row in view.bricks if row.percent is not None]
    rows = sorted(rows, key=lambda row: row.total_exclusive_us, reverse=True)[:MAX_BRICKS]
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        yield f"  {row.name:<{width}}  {fmt.percent(row.percent):>6}  {fmt.duration(row.avg_inclusive_us)} a call"
