"""The text report that fits on one screen: speed, the time breakdown, problems, and losses."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop import units
from cbtop.reports.tables import Table, first_lines, table
from cbtop.reports.text import (
    baseline_text,
    books_text,
    cells,
    filtered_text,
    foot_text,
    head_text,
    heads,
    ranks_text,
    replay_text,
    verdicts_text,
)
from cbtop.text import merge_text, rate_text, recording_text, sampled_text, serving_text, source_text, training_text
from cbtop.text.row_filter import AS_THEY_COME, RowChoice
from cbtop.text.statistics import OVERVIEW_REPORT
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.time_travel import ReplayView

MAX_LINES = 60
MAX_VERDICTS = 4
MIN_BRICKS, MAX_BRICKS = 3, 12
MAX_HEAD = 18  # The head of the overview has at most this many lines.
MAX_COMPARED = 10  # The comparison with a baseline has at most this many lines.
MAX_OTHERS = 5
THE_REST = "the rest: --view all"


def overview_report(
    sources: Sequence[SourceView], replay: ReplayView | None = None, rows: RowChoice | None = None
) -> str:
    """Return the overview, at most 60 lines. The first source takes most of these lines.

    Each further source has one line.
    """
    first, *others = sources
    before = [] if replay is None else [replay_text(replay), ""]
    after = _others(others)
    room = MAX_LINES - len(before) - len(after) - 2
    return "\n".join([*before, *_source(first, rows or AS_THEY_COME, room), "", *after, THE_REST])


def bricks_and_verdicts(view: SourceView, most: int) -> list[str]:
    """Return the lines about one source, with at most `most` bricks and its worst verdicts."""
    found = _verdicts(view)
    sampled = [line for place in view.sampled for line in sampled_text.lines(place)]
    return [*brick_lines(view, most), *(["", *sampled] if sampled else []), *(["", *found] if found else [])]


def _source(view: SourceView, rows: RowChoice, room: int) -> list[str]:
    shown = rows.of(view)
    parts = [
        first_lines(head_text(view).splitlines(), MAX_HEAD),
        first_lines(baseline_text(view.baseline).splitlines(), MAX_COMPARED),
        _verdicts(view),
        [filtered_text(view, shown, rows.filter)] if rows.filter else [],
        [training_text.parts(view, view.training), *training_text.below(view, view.training)]
        if view.training
        else [],
        serving_text.lines(view.serving) if view.serving else [],
        books_text(view).splitlines(),
        foot_text(view).splitlines(),
    ]
    left = room - sum(len(part) + 1 for part in parts if part)
    parts.insert(-2, brick_lines(shown, max(MIN_BRICKS, min(left - 2, MAX_BRICKS))))
    lines: list[str] = []
    for part in parts:
        lines += ["", *part] if part and lines else part
    return first_lines(lines, room)


def _verdicts(view: SourceView) -> list[str]:
    more = len(view.verdicts) - MAX_VERDICTS
    lines = verdicts_text(view, MAX_VERDICTS).splitlines()
    return [*lines, f"  {units.counted(more, 'more verdict')}"] if more > 0 else lines


def brick_lines(view: SourceView, most: int) -> list[str]:
    """Return the bricks that take the most time. If the user has chosen an order, return the first bricks in this
    order.
    """
    if view.ranks is not None:
        return first_lines(ranks_text(view.ranks).splitlines(), most + 1)
    if not view.bricks:
        return [f"bricks: n/a ({recording_text.no_bricks(view)})"]
    cut: Table = [("brick", "category", *heads(OVERVIEW_REPORT))]
    cut += [(row.name, row.category.display_name, *cells(OVERVIEW_REPORT, row)) for row in view.bricks[:most]]
    more = len(view.bricks) - most
    return [*table(cut, left=2).splitlines(), *([f"{units.counted(more, 'more brick')}"] if more > 0 else [])]


def _others(sources: Sequence[SourceView]) -> list[str]:
    lines = []
    for view in sources[:MAX_OTHERS]:
        steps = view.steps
        rates = "no step has ended" if steps is None else f"{steps.phase} {rate_text.throughput(view, steps)}"
        who = (view.program, f"pid {view.pid}", merge_text.rank(view.rank, view.world_size))
        lines.append(f"{', '.join(word for word in who if word)}: {source_text.standing(view)}, {rates}")
    more = len(sources) - MAX_OTHERS
    return [*lines, f"{more} more process{'es' * (more > 1)}: --view sources"] if more > 0 else lines
