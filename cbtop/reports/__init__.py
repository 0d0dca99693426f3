"""Reports: the view models as text on stdout, one file per format."""

# `cbtop --help` needs this list, so slow imports such as numpy wait for the first report.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cbtop.text.row_filter import RowChoice
    from cbtop.viewmodels.source import SourceView
    from cbtop.viewmodels.time_travel import ReplayView


class ReportMaker(Protocol):
    """Makes a report of sources. `rows` has the user's filter and order of bricks."""

    def __call__(
        self,
        views: Sequence[SourceView],
        sections: Sequence[str],
        replay: ReplayView | None = None,
        rows: RowChoice | None = None,
    ) -> str: ...


OVERVIEW = "overview"  # a section of one screen, printed alone
SOURCES, DEVICES = "sources", "devices"  # sections about all sources
TIMELINE = "timeline"  # a section made of records, which are received only for it
VIEWS = ("bricks", "categories", "layers", TIMELINE, "roofline", "tree", "trace", SOURCES, DEVICES)  # as in text.py


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
    from cbtop.reports.json import json_report

    return json_report(views, sections, replay)


REPORTS: dict[str, ReportMaker] = {"text": _text, "json": _json}
