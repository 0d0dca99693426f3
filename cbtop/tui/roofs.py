"""The key that measures the roofs (speed limits of the hardware) of the shown process again."""

from __future__ import annotations

from collections.abc import Iterable

from cbtop.feeds.calibration import Calibration, why_not_measured
from cbtop.tui.errand import BackgroundTask
from cbtop.viewmodels.source import SourceView


class Roofs(BackgroundTask[list[str]]):
    """The background task that measures roofs. It uses the whole machine for some seconds, so the user must confirm
    it.
    """

    TITLE = "roofs"
    AT_IT = "they are being measured already"
    QUESTION = "measuring takes seconds, uses the whole machine and slows what runs on it: press C again to measure"

    def why_not(self, source: SourceView | None, *, is_recording: bool) -> str:
        if is_recording:
            return "this is a recording: its roofs are those of then"
        if source is None:
            return "there is no process yet whose roofs could be measured"
        return why_not_measured(source)

    def ask(self, source: SourceView) -> Calibration:
        return Calibration(source)

    def told(self, source: SourceView, found: list[str]) -> Iterable[str]:
        later = "" if source.roofline.ceilings else "programs that start from now on are shown under them"
        return (*(" ".join(line.split()) for line in found), later)
