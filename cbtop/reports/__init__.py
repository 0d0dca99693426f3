"""Reports: the viewmodels as text on stdout, one file a format."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cbtop.reports.json import json_report
from cbtop.reports.text import DEVICES, SECTIONS, text_report
from cbtop.viewmodels.model import ReplayView, SourceView

Report = Callable[[Sequence[SourceView], Sequence[str], ReplayView | None], str]

VIEWS = (*SECTIONS, DEVICES)
REPORTS: dict[str, Report] = {"text": text_report, "json": json_report}

__all__ = ["DEVICES", "REPORTS", "SECTIONS", "VIEWS", "Report"]
