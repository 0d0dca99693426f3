"""The key that records the kernels of the next steps of the shown process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager

from textual.app import App

from cbtop.feeds.kernel_request import KernelRequest, own_source
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.text import kernel_text
from cbtop.tui.errand import BackgroundTask, Progress
from cbtop.viewmodels.kernels import BurstView
from cbtop.viewmodels.source import SourceView


class Kernels(BackgroundTask[BurstView]):
    """The background task that records the kernels of the next steps.

    The graph shows the recorded kernels, unless the screen is paused. They are not part of the statistics.
    """

    TITLE = "kernels"
    AT_IT = "one process is being asked already"

    def __init__(self, app: App[int], show_progress: Progress, is_paused: Callable[[], bool]) -> None:
        super().__init__(app, show_progress)
        self._is_paused = is_paused

    def why_not(self, source: SourceView | None, *, is_recording: bool) -> str:
        if is_recording:
            return "this is a recording: only a process that is live can be asked"
        if source is None:
            return "there is no process yet that could be asked"
        if source.merged is not None:
            return "these are several processes, and one alone is asked: press m until one is shown"
        if source.state != SourceStatus.LIVE:
            return f"pid {source.pid} is {source.state}: only a process that is live can be asked"
        return ""

    @contextmanager
    def ask(self, source: SourceView) -> Iterator[KernelRequest]:
        with closing(own_source(source.key)) as own, KernelRequest(own) as request:
            yield request

    def told(self, source: SourceView, found: BurstView) -> Iterable[str]:
        after = ", after Space" if self._is_paused() else ""
        where = f"Graph shows them under their bricks{after}: Enter unfolds one" if found.phases else ""
        return (*kernel_text.burst(found), *kernel_text.burst_notes(found), where)
