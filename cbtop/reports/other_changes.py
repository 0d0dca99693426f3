"""Write a diff's lines about changes that are not in the lists of slower and faster bricks: drift, long calls, and
figures without a verdict that moved beyond their interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cbtop.comparison.noise import Change
from cbtop.comparison.part_diff import PartDiff, PlaceDiff
from cbtop.comparison.steadiness import drift_text, tail_text
from cbtop.comparison.tails import tails_of
from cbtop.units import duration

MAX_NAMED = 6  # One line has at most this many figures.


def other_changes(part: PartDiff, shown: Sequence[PlaceDiff]) -> list[str]:
    """Return a line for each change that is not listed elsewhere in the report.

    `shown` has the bricks and layers of the report. Returns [] if no figure of the report has changed.
    """
    lines = [f"new: {part.phase}: {one.name}, {one.delta_us:+.1f} µs/{part.unit}" for one in part.new]
    lines += [
        f"gone: {part.phase}: {one.name}, {one.delta_us:+.1f} µs/{part.unit}"
        for one in part.bricks
        if one.verdict == "gone"
    ]
    if part.wall.is_beyond_noise and part.wall.delta < 0:
        lines.append(f"faster: {part.phase}: a {part.unit} takes {_percents(part.wall)} by the wall clock")
    if part.drift is not None and part.drift.is_slower:
        lines.append(f"drift: {drift_text(part, part.drift)}")
    lines += [
        f"longer p99: {part.phase}: {tail.place.name}: {tail_text(tail)}" for tail in tails_of(part) if tail.is_longer
    ]
    if without_verdict := list(_without_verdict(part, shown)):
        named = "; ".join(text for _, text in sorted(without_verdict, reverse=True)[:MAX_NAMED])
        more = len(without_verdict) - MAX_NAMED
        lines.append(f"beyond its interval, without a verdict: {named}{f'; and {more} more' if more > 0 else ''}")
    return lines


def _without_verdict(part: PartDiff, shown: Sequence[PlaceDiff]) -> Iterator[tuple[float, str]]:
    """Yield (change in percent, text) for each figure without a verdict that moved beyond its interval."""
    judged = [("wall clock", part.wall, part.wall.is_beyond_noise), ("typical step", part.typical, False)]
    if part.drift is not None:
        judged.append(("drift", part.drift.change, part.drift.is_slower))
    for name, change, has_verdict in judged:
        if change is not None and not has_verdict and is_beyond_interval(change):
            yield abs(change.percent or 0.0), f"{part.phase}: {name} {_percents(change)}"
    longer = {id(tail.place) for tail in tails_of(part) if tail.is_longer}
    for place in [part.step, *shown]:
        if place.is_below_resolution:
            continue
        moved = place.verdict in ("slower", "faster")
        figures = (
            ("typical time", place.change, moved),
            ("mean", place.mean, moved),
            ("median call", place.p50, moved),
        )
        for name, change, has_verdict in (*figures, ("p99", place.p99, id(place) in longer)):
            if change is not None and not has_verdict and is_beyond_interval(change):
                sides = f"{duration(change.before)} → {duration(change.now)}, "
                text = f"{part.phase}: {place.name}: {name} {sides}{_percents(change)}"
                yield abs(change.percent or 0.0), text


def is_beyond_interval(change: Change) -> bool:
    """Return whether a figure changed between two runs by more than half the width of its confidence interval.

    Even a very small change may be beyond the interval.
    """
    return change.percent is not None and abs(change.delta) > change.half


def _percents(one: Change) -> str:
    return f"{one.percent or 0.0:+.1f} % ± {one.half_percent or 0.0:.1f}"
