"""Reports write view models as text, JSON or other formats to stdout. Each format has its own file."""

# `cbtop --help` imports this module for the list of reports. So slow modules such as numpy are imported when a report
# is made.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cbtop.text.row_filter import RowChoice
    from cbtop.viewmodels.source import SourceView
    from cbtop.viewmodels.time_travel import ReplayView


class ReportMaker(Protocol):
    """A function that makes a report about sources.

    `rows` is the user's filter and sort order for the rows of bricks.
    """

    def __call__(
        self,
        views: Sequence[SourceView],
        sections: Sequence[str],
        replay: ReplayView | None = None,
        rows: RowChoice | None = None,
    ) -> str: ...


OVERVIEW = "overview"  # name of the section that fits on one screen; it is printed without other sections
SOURCES, DEVICES = "sources", "devices"  # names of the sections about all sources together
HTML = "html"  # the format with every section, so it needs every record, too
# The section about single records, which the daemon sends only on request.
TIMELINE = "timeline"
# names of all other sections; text.py must use the same names
VIEWS = (
    "training",
    "requests",
    "bricks",
    "categories",
    "layers",
    TIMELINE,
    "roofline",
    "tree",
    "trace",
    SOURCES,
    DEVICES,
)


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
    """Return all sections of the report as JSON.

    `sections` and `rows` are ignored, because programs select the data themselves.
    """
    from cbtop.reports.json import json_report

    return json_report(views, replay)


def _html(
    views: Sequence[SourceView],
    sections: Sequence[str],
    replay: ReplayView | None = None,
    rows: RowChoice | None = None,
) -> str:
    """Return all sections as one HTML document. `sections` is ignored, because a reader can scroll."""
    from cbtop.reports.html import html_report

    return html_report(views, replay, rows)


REPORTS: dict[str, ReportMaker] = {"text": _text, "json": _json, HTML: _html}
