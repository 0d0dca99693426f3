"""Write the figures of a single run as text and Markdown for a gate without a baseline."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.comparison.part_diff import PartDiff, PlaceDiff
from cbtop.comparison.phase_rates import IN_STEPS, RATE_UNITS, SAMPLES
from cbtop.comparison.run_diff import RunDiff
from cbtop.reports.run_diff import named, work_done
from cbtop.reports.tables import Table, escaped, markdown_table, table
from cbtop.units import NOT_MEASURED, counted, duration, number


def run_text(found: RunDiff) -> str:
    """Return the figures of a run as text for terminals and logs."""
    lines = [named(found.now), *(f"  {note}" for note in found.notes), "", *_rate_lines(found)]
    for part in found.parts:
        lines += ["", _head(part)]
        for rows in _tables(part):
            lines += ["", table(rows, left=1)]
    return "\n".join(lines)


def run_markdown(found: RunDiff) -> str:
    """Return the figures of a run as a Markdown summary for a CI step."""
    lines = [f"### {escaped(named(found.now))}", "", *(f"- {escaped(note)}" for note in found.notes)]
    lines += ["", *(f"{escaped(line)}  " for line in _rate_lines(found))]
    for part in found.parts:
        lines += ["", f"**{escaped(_head(part))}**"]
        for rows in _tables(part):
            lines += ["", *markdown_table(rows)]
    return "\n".join(lines)


def _rate_lines(found: RunDiff) -> list[str]:
    """Return a line for the rates of each phase, such as `decode: 27.62 tokens/s, 61.75 tokens/s without pauses`.

    Phases without known rates are left out.
    """
    lines = []
    for rates in found.now.rates:
        names = [name for name in (rates.main, SAMPLES, IN_STEPS) if name in rates.times_us]
        if names:
            lines.append(
                f"{rates.phase}: {', '.join(f'{number(rates.per_sec(name))} {RATE_UNITS[name]}' for name in names)}"
            )
    return lines


def _head(part: PartDiff) -> str:
    """Return the number of steps in a group as text, such as `decode: 300 steps`."""
    return f"{work_done(part)}: {counted(part.now.steps, 'step')}"


def _tables(part: PartDiff) -> Iterator[Table]:
    """Yield a table with a row for each brick of the run, and a table with a row for each layer."""
    for places in (part.bricks, part.layers):
        if places:
            yield [("", "median", "p99", f"µs/{part.unit}"), *(_row(place) for place in places)]


def _row(place: PlaceDiff) -> tuple[str, ...]:
    side = place.now
    if side is None:
        return place.name, *(NOT_MEASURED for _ in range(3))
    median, p99 = (duration(figure.mean) if figure else NOT_MEASURED for figure in (side.p50, side.p99))
    return place.name, median, p99, number(side.time.mean)
