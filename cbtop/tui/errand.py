"""The base of slow tasks that the user starts by a key.

A thread waits for the result. The screen shows the progress and the outcome.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import ClassVar, Generic, Protocol, TypeVar

from textual.app import App
from textual.notifications import SeverityLevel
from textual.worker import get_current_worker

from cbtop.errors import CbtopError
from cbtop.feeds.kernel_request import POLL_S
from cbtop.protocol.errors import ProtocolError
from cbtop.tui.widgets.lines import clean
from cbtop.viewmodels.source import SourceView

READ_S = 10.0  # The outcome of a task stays on the screen for this many seconds.

Found = TypeVar("Found")
Found_co = TypeVar("Found_co", covariant=True)


class Progress(Protocol):
    """Shows the status of a task and its completed part (0 to 1, or None if unknown). An empty status hides both."""

    def __call__(self, status: str, done: float | None = None, /) -> None: ...


class Awaited(Protocol[Found_co]):
    """The pending result of a background task."""

    @property
    def status(self) -> str: ...

    @property
    def done(self) -> float | None: ...

    def poll(self) -> Found_co | None:
        """Return the result of the task, or None while it runs. Raises an error if the task failed."""


class BackgroundTask(ABC, Generic[Found]):
    """A task that runs in the background.

    Only one task can run at a time. It ends when the user leaves the screen.
    """

    TITLE: ClassVar[str]
    AT_IT: ClassVar[str]  # message to the user who starts the task again while it runs
    # A question to confirm before the task starts, by pressing the key again within READ_S seconds.
    QUESTION: ClassVar[str] = ""

    def __init__(self, app: App[int], show_progress: Progress) -> None:
        self._app = app
        self._show_progress = show_progress
        # (key of the shown source, time) of the last question to the user
        self._asked: tuple[str, float] | None = None

    @abstractmethod
    def why_not(self, source: SourceView | None, *, is_recording: bool) -> str:
        """Return why the task cannot run for the shown source. Return "" if it can run."""

    @abstractmethod
    def ask(self, source: SourceView) -> AbstractContextManager[Awaited[Found]]:
        """Start the task and return its pending result. Leaving the context ends the task."""

    @abstractmethod
    def told(self, source: SourceView, found: Found) -> Iterable[str]:
        """Return the result of the task as lines of text."""

    def begin(self, source: SourceView | None, *, is_recording: bool) -> None:
        """Start this task for the shown process. If it cannot start, show the reason."""
        if why := self.why_not(source, is_recording=is_recording) or self._at_it():
            self._tell(why, severity="warning")
        elif source is not None and self.QUESTION and not self._is_confirmed(source):
            self._tell(self.QUESTION)
        elif source is not None:
            self._app.run_worker(partial(self._wait, source), thread=True, group=self.TITLE)

    def _is_confirmed(self, source: SourceView) -> bool:
        """Return whether the user has seen the question about this source in the last READ_S seconds.

        If not, it appears now, so store the time.
        """
        now_s = time.monotonic()
        if self._asked is not None and self._asked[0] == source.key and now_s - self._asked[1] < READ_S:
            self._asked = None
            return True
        self._asked = source.key, now_s
        return False

    def _at_it(self) -> str:
        mine = (worker for worker in self._app.workers if worker.group == self.TITLE)
        return "" if all(worker.is_finished for worker in mine) else self.AT_IT

    def _wait(self, source: SourceView) -> None:
        worker = get_current_worker()
        shown: tuple[str, float | None] = "", None
        try:
            with self.ask(source) as asked:
                while (found := asked.poll()) is None:
                    if worker.is_cancelled:
                        return
                    if shown != (asked.status, asked.done):
                        shown = asked.status, asked.done
                        self._app.call_from_thread(self._show_progress, *shown)
                    worker.cancelled_event.wait(POLL_S)
        except (CbtopError, ProtocolError, OSError) as error:
            tell = partial(self._tell, str(error), severity="error")
        else:
            tell = partial(self._tell, *self.told(source, found))
        self._app.call_from_thread(self._show_progress, "")
        self._app.call_from_thread(tell)

    def _tell(self, *lines: str, severity: SeverityLevel = "information") -> None:
        text = "\n".join(clean(line) for line in lines if line)
        self._app.notify(text, title=self.TITLE, severity=severity, timeout=READ_S, markup=False)
