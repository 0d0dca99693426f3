"""Reports: the viewmodels as text on stdout, one file a format."""

# Which there are is asked by `cbtop --help`: what they are made with, numpy among it, is loaded by the first report.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbtop.viewmodels.model import ReplayView, SourceView

Report = Callable[["Sequence[SourceView]", Sequence[str], "ReplayView | None"], str]

DEVICES = "devices"  # the section that is of no source
TIMELINE = "timeline"  # the section that is made of records, which are received for it alone
VIEWS = ("bricks", "categories", "layers", TIMELINE, "roofline", "tree", "trace", DEVICES)  # as in text.py


def _text(views: Sequence[SourceView], sections: Sequence[str], replay: ReplayView | None = None) -> str:
    from cbtop.reports.text import text_report

    return text_report(views, sections, replay)


def _json(views: Sequence[SourceView], sections: Sequence[str], replay: ReplayView | None = None) -> str:
    from cbtop.reports.json import json_report

    return json_report(views, sections, replay)


REPORTS: dict[str, Report] = {"text": _text, "json": _json}
