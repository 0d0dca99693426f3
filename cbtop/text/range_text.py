"""Write the time range that the shown figures cover, and the parts of this range."""

from __future__ import annotations

from cbtop.text.breakdown_text import longest
from cbtop.text.time_text import between, since
from cbtop.units import NOT_MEASURED, count, duration, percent
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.sources import SourceRow
from cbtop.viewmodels.steps import OVERLAP, StepsView
from cbtop.viewmodels.time_range import TimeRangeView


def shown_time(source: SourceView, *, with_date: bool = False) -> str:
    """Format the time range of figures.

    - Recent window: `last 10.4 s`, or `its last 10.4 s` of an ended process. - Recent window of a merge in which only
      some members run: `last 10.4 s of the 2 that run`. - Since the start: `since 20:02:11`. For a sum of members
      with different ranges, `since 20:02:11 at the earliest`. - Chosen range: `20:02:11.3–20:02:19.8, 41 steps`.
    """
    if source.window is not None and source.window.range_s is not None:
        steps = f", {count(source.steps.count)} step{'s' * (source.steps.count != 1)}" if source.steps else ""
        return f"{between(source.window.range_s, with_date=with_date)}{steps}"
    if source.window is not None:
        runs, members = (source.merged.running, len(source.merged.members)) if source.merged is not None else (0, 0)
        its = "its " if source.state in ("ended", "gone", "faulty") and not runs else ""
        whose = f" of the {runs} that run{'s' * (runs == 1)}" if 0 < runs < members else ""
        return f"{its}last {source.window.covers_s:.1f} s{whose}"
    if source.since_s is None:
        return "all that was seen"
    is_sum = source.merged is not None and source.merged.mode is MergeMode.SUM
    begun = since(source.since_s, source.time_range.wall_us if source.time_range else None, with_date=with_date)
    return f"since {begun}{' at the earliest' * is_sum}"


def between_steps(found: TimeRangeView | None) -> str:
    """Format the time between steps: `between steps 49.7 % (4.97 s of 10.0 s)`, or "" if unknown.

    It has `at least` if a step from before the range counts completely.
    """
    if found is None or found.between_us is None:
        return ""
    if found.since_last_us == found.wall_us:
        return f"no step has ended in these {duration(found.wall_us)}"
    share = f"{'at least ' * found.counts_whole}{percent(found.between_percent)}"
    return f"between steps {share} ({duration(found.between_us)} of {duration(found.wall_us)})"


def time_range(source: SourceView) -> str:
    """Format the parts of a time range: `wall clock 10.0 s = in steps 5.01 s + between steps 4.97 s (49.7 %) + …`."""
    found = source.time_range
    if found is None:
        return ""
    is_sum = source.merged is not None and source.merged.mode is not MergeMode.MAX
    is_last = source.window is not None and source.window.range_s is None
    many = 0 if source.merged is None else (is_last and source.merged.running) or len(source.merged.members)
    added = f" (of {many} processes, added up)" if is_sum else ""
    wall = f"wall clock {duration(found.wall_us)}{added}"
    if found.in_steps_us is None:
        return f"{wall}: in how much of it steps ran is {NOT_MEASURED}"
    phases = ", ".join(f"{phase.name} {duration(phase.us)}" for phase in found.by_phase)
    if sum(phase.us for phase in found.by_phase) > OVERLAP * found.in_steps_us:
        phases += "; they overlap"
    included = "" if found.warm_up_us is not None else ", warm-ups included,"
    in_steps = f"in steps{included} {duration(found.in_steps_us)}{f' ({phases})' if len(found.by_phase) > 1 else ''}"
    warm_up = [f"warm-up {duration(found.warm_up_us)}"] if found.warm_up_us else []
    names = f"; outside of steps ran {longest(source.outside)}" if source.outside else ""
    between = f"between steps {duration(found.between_us)} ({percent(found.between_percent)}{names})"
    parts = [in_steps, *warm_up, between]
    if found.since_last_us is not None:
        says = f" (it says: {source.activity})" if source.activity else ""
        parts.append(f"since the last one ended {duration(found.since_last_us)}{says}")
    whole = " (a step that began before counts whole: when it ran is not known)" if found.counts_whole else ""
    return f"{wall} = {' + '.join(parts)}{whole}"


def steps_ran(source: SourceView, steps: StepsView) -> str:
    """Format how long steps of a phase ran: `steps ran 352 ms of 18.99 s`.

    If models ran one after another, the rates of one are over a part of the shown time. The text then names this
    part.
    """
    found, ran_us = source.time_range, None
    if found is not None:
        ran_us = next((phase.us for phase in found.by_phase if phase.name == steps.phase), None)
    ran = f"steps ran {duration(steps.union_us if ran_us is None else ran_us)}"
    if source.merged is None and found is not None and 0 < steps.wall_us < found.wall_us:
        ran += f" of the {duration(steps.wall_us)} of this model's rates"
    elif ran_us is not None and found is not None:
        ran += f" of {duration(found.wall_us)}"
    before_us = (steps.union_us or 0) - (ran_us or steps.union_us or 0)
    return f"{ran}, and {duration(before_us)} before" if before_us > 0.01 * (ran_us or 0) else ran


def rates_since(row: SourceRow) -> str:
    """Format the time range of the rates in a row of a table: `20:02:11` if they cover the time since the start, or
    `last 10.4 s`.
    """
    if row.window is not None and row.window.range_s is not None:
        return between(row.window.range_s)
    if row.window is not None:
        return f"last {row.window.covers_s:.1f} s"
    return NOT_MEASURED if row.since_s is None else since(row.since_s, row.wall_us)
