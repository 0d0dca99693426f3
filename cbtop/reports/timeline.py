"""The timeline of the newest step as text."""

from __future__ import annotations

from cbtop import units
from cbtop.reports.tables import Table, table
from cbtop.text import comparison_text, timeline_text
from cbtop.viewmodels.source import SourceView

TIMELINE_LINES = 200  # At most this many lines are about the newest step.


def timeline_section(view: SourceView) -> str:
    """Return the timeline as text: the sums of each lane, and the records of the newest step. Return "" if records
    were not received.
    """
    found = view.timeline
    if found is None:
        return ""
    lines = [f"timeline: {units.counted(found.steps, 'step')} in {units.duration(found.length_ns / 1e3)}"]
    for lane in found.lanes:
        counts = ", ".join(f"{row.name} {units.count(len(row.spans))}" for row in lane.rows if row.spans)
        lines += [f"lane {lane.name}: {counts}", f"  {timeline_text.lane_sum(lane, 0, found.length_ns)}"]
    if found.newest is not None:
        lines.append(f"newest whole {found.newest.name}: {units.exact(found.newest.duration_ns)}, from its beginning")
        if view.baseline is not None:
            lines.append(f"Δ (derived): {comparison_text.step_beside(view.baseline, found.newest)}")
        rows: Table = [("what", "from µs", "duration µs", "in", "lane")]
        parts = found.newest_parts()
        for lane, part in parts[:TIMELINE_LINES]:
            times = (part.start_ns - found.newest.start_ns, part.duration_ns)
            from_, lasts = (units.exact(ns).removesuffix(" µs") for ns in times)
            rows.append((part.name, from_, lasts, " · ".join(part.where[1:]), lane.name))
        lines.append(table(rows, left=1))
        if len(parts) > TIMELINE_LINES:
            lines.append(f"{units.count(len(parts) - TIMELINE_LINES)} more of it are not listed")
    return "\n".join([*lines, *timeline_text.timeline_notes(found)])
