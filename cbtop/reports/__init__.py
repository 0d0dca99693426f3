"""Reports: the view models as text for stdout. There is one file per format."""

# `cbtop --help` imports this list, so only the first report imports slow modules such as numpy.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cbtop.text.row_filter import RowChoice
    from cbtop.viewmodels.source import SourceView
    from cbtop.viewmodels.time_travel import ReplayView


class ReportMaker(Protocol):
    """Function that makes a report of sources. `rows` has the user's filter and order of bricks."""

    def __call__(
        self,
        views: Sequence[SourceView],
        sections: Sequence[str],
        replay: ReplayView | None = None,
        rows: RowChoice | None = None,
    ) -> str: ...


OVERVIEW = "overview"  # A section that fits on one screen, and is printed alone.
SOURCES, DEVICES = "sources", "devices"  # Sections about all sources.
TIMELINE = "timeline"  # A section made of records. If it is not requested, records are not received.
# The same sections as in text.py.
VIEWS = ("training", "bricks", "categories", "layers", TIMELINE, "roofline", "tree", "trace", SOURCES, DEVICES)


def _text(
    views: Sequence[SourceView],
    sections: Sequence[str],
    replay: ReplayView | None = None,
    rows: RowChoice | None = None,
) -> str:
    if OVERVIEW in sections and views:
        from cbtop.reports.overview import overview_report

        return overview_report(views, replay, rows)
    from cbtop.reports.text import text_report

    return text_report(views, sections, replay, rows)


def _json(
    views: Sequence[SourceView],
    sections: Sequence[str],
    replay: ReplayView | None = None,
    rows: RowChoice | None = None,
) -> str:
    """Return all sections as JSON. Filter and order are ignored, because a program selects what it needs."""
    from cbtop.reports.json import json_report

    return json_report(views, replay)


REPORTS: dict[str, ReportMaker] = {"text": _text, "json": _json}
