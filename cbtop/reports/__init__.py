"""Reports: the viewmodels as text on stdout, one file a format."""

# Which there are is asked by `cbtop --help`: what they are made with, numpy among it, is loaded by the first report.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cbtop.row_choice import RowChoice
    from cbtop.viewmodels.model import ReplayView, SourceView


class Report(Protocol):
    """Makes a report of sources; `rows` is which bricks a person wants to read, and in which order."""

    def __call__(
        self,
        views: Sequence[SourceView],
        sections: Sequence[str],
        replay: ReplayView | None = None,
        rows: RowChoice | None = None,
    ) -> str: ...


OVERVIEW = "overview"  # the section that is one screen long, and alone
SOURCES, DEVICES = "sources", "devices"  # the sections that are of no one source
TIMELINE = "timeline"  # the section that is made of records, which are received for it alone
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


REPORTS: dict[str, Report] = {"text": _text, "json": _json}
