"""Where the screen is in time: at the present, at a moment of a recording or of a daemon's history, or in a time
range.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from textual.app import App
from textual.notifications import SeverityLevel

from cbtop.client.stream_recorder import SavedHistory
from cbtop.errors import CbtopError
from cbtop.feeds.replay import ReplayFeed
from cbtop.protocol.errors import ProtocolError
from cbtop.text import time_text
from cbtop.tui.errand import READ_S, Progress
from cbtop.tui.widgets.lines import clean
from cbtop.viewmodels.time_travel import TimeView

# Read a recording for the first number of seconds, then handle keys for the second number of seconds, and repeat.
ADVANCE_S, ANSWER_S = 0.05, 0.005
# Requests the history from the daemon. The returned function blocks until the history has been read.
AskBack = Callable[[], Callable[[], ReplayFeed]]
# A move in time. It maps the current moment to the target, both in seconds from the beginning of the recording.
Way = Callable[[ReplayFeed, float], float]
NO_HISTORY = "there is no one daemon here whose memory could be looked into"


class TimeTravel:
    """Moves the screen through the recording `past`, or without one through the history that `ask` requests.

    `show` redraws the same moment, and `arrive` draws another one. `source` returns the key of a process: moving by
    steps counts its steps.
    """

    def __init__(
        self,
        app: App[int],
        show: Callable[[], None],
        arrive: Callable[[], None],
        show_progress: Progress,
        source: Callable[[], str | None],
        past: ReplayFeed | None = None,
        ask: AskBack | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.past = past
        self.begun_s: float | None = None  # begin of a time range that the user has begun but not ended
        self._app = app
        self._show = show
        self._arrive = arrive
        self._show_progress = show_progress
        self._ask = ask
        self._clock_s = clock_s
        self._held_s = 0.0  # time (on `clock_s`) when the screen was paused
        # Time when the daemon's history was requested. None if no answer is expected from the daemon.
        self._asked_s: float | None = None
        self._ways: list[Way] = []  # moves in time that the user has requested before the history has arrived
        # If the user began a range before the history arrived: the number of moves in `_ways` before that.
        self._begins_after: int | None = None
        self._source = source
        self._told_none = False  # whether the user has already seen the message that no step is near

    @property
    def can_look_back(self) -> bool:
        return self._ask is not None

    @property
    def chosen_s(self) -> tuple[float, float] | None:
        """The time range that is shown or being chosen, in seconds from the beginning of the recording. None without
        a range.
        """
        if self.past is None:
            return None
        if self.begun_s is None:
            return self.past.range_s
        begin_s, end_s = sorted((self.begun_s, self.past.at_s))
        return begin_s, end_s

    def time(self) -> TimeView | None:
        """Return the position of the screen in time, or None if the screen shows live data."""
        if self.past is None:
            return None
        return replace(self.past.watched(), chosen_s=self.chosen_s)

    def hold(self) -> None:
        """Remember the time when the screen was paused at the present. If the user moves in time later, the move
        starts here.
        """
        self._held_s = self._clock_s()

    def leave(self) -> None:
        """Return to the present. If a requested history arrives later, it is ignored."""
        if self._asked_s is not None or (self.past is not None and self.past.on_its_way is not None):
            self._show_progress("")
        self._asked_s = self.begun_s = self._begins_after = None
        if self.past is not None:
            self.past.close()
            self.past = None

    def move(self, by_s: float) -> None:
        """Move by `by_s` seconds in time. If the screen is live, request the daemon's history first."""
        self._move(lambda _, from_s: from_s + by_s)

    def move_steps(self, steps: int) -> None:
        """Move by `steps` steps in time. If the screen is live, request the daemon's history first."""
        self._move(partial(self._steps_away, steps))

    def _move(self, way: Way) -> None:
        if self.past is None:
            self._look_back(way)
        else:
            self.go_to(way(self.past, self.past.at_s))

    def go_to(self, at_s: float) -> None:
        """Show a moment of the recording. If a time range is shown, leave it."""
        if self.past is not None:
            self._set_out(partial(self.past.aim, at_s))

    def mark(self) -> None:
        """Begin a time range at the shown moment. If a range has begun, end it at the shown moment and show it."""
        past = self.past
        if past is None:
            self._look_back(begins_range=True)
        elif self.begun_s is None:
            if past.range_s is not None:
                self.go_to(past.at_s)
            self.begun_s = past.at_s
            self._show()
        elif self.begun_s == past.at_s:
            self.tell("it begins here: go to another moment, where it ends", severity="warning")
        else:
            begun_s, self.begun_s = self.begun_s, None
            self._set_out(partial(past.select, begun_s, past.at_s))

    def leave_range(self) -> None:
        """Leave the time range and show the moment at its end."""
        self.begun_s = self._begins_after = None
        if self.past is not None and self.past.range_s is not None:
            self.go_to(self.past.at_s)
        else:
            self._show()

    def saving(self) -> Callable[[], SavedHistory] | None:
        """Return a function that writes the shown time range to a file, or None if no range is shown."""
        if self.past is None or self.past.range_s is None:
            return None
        cut = self.past.playback.cut_out()

        def save() -> SavedHistory:
            with closing(cut):
                return cut.save(Path.cwd())

        return save

    def tell(self, text: str, severity: SeverityLevel = "information") -> None:
        self._app.notify(clean(text), title="time", severity=severity, timeout=READ_S, markup=False)

    def _steps_away(self, steps: int, past: ReplayFeed, from_s: float) -> float:
        """Return the moment `steps` steps later (negative: earlier). If no step is near, a step is one second."""
        to_s, found = past.search.steps_away(from_s, steps, self._source())
        if not found and not self._told_none:
            where = "before" if steps < 0 else "after"
            self.tell(f"no step of it ended in the minutes {where}: it goes by seconds", severity="warning")
        self._told_none = not found
        return to_s if found else from_s + steps

    def _look_back(self, *ways: Way, begins_range: bool = False) -> None:
        if self._ask is None:
            self.tell(NO_HISTORY, severity="warning")
            return
        is_asked = self._asked_s is not None
        self._ways = [*(self._ways if is_asked else ()), *ways]
        if begins_range:
            self._begins_after = len(self._ways)
        if is_asked:
            return
        self._asked_s = self._clock_s()
        self._show_progress("asking the daemon what it remembers")
        self._app.run_worker(partial(self._fetch, self._ask(), self._asked_s), thread=True, group="time")

    def _fetch(self, fetch: Callable[[], ReplayFeed], asked_s: float) -> None:
        try:
            found = fetch()
        except (CbtopError, ProtocolError, OSError) as error:
            self._app.call_from_thread(self._failed, asked_s, str(error))
        else:
            self._app.call_from_thread(self._begin, asked_s, found)

    def _failed(self, asked_s: float, why: str) -> None:
        if asked_s == self._asked_s:
            self.leave()
            self.tell(why, severity="error")

    def _begin(self, asked_s: float, found: ReplayFeed) -> None:
        # Drop the history, because the user has returned to the present meanwhile, or has requested it again.
        if asked_s != self._asked_s:
            found.close()
            return
        self._asked_s, self.past = None, found
        moments_s = [found.duration_s - (asked_s - self._held_s)]
        for way in self._ways:
            moments_s.append(min(max(way(found, moments_s[-1]), 0), found.duration_s))
        if self._begins_after is not None:
            self.begun_s, self._begins_after = max(0, moments_s[self._begins_after]), None
        self.go_to(moments_s[-1])

    def _set_out(self, aim: Callable[[], None]) -> None:
        assert self.past is not None
        is_going = self.past.on_its_way is not None
        aim()
        if not is_going:
            self._go_on()

    def _go_on(self) -> None:
        """Read the recording for a short time. Then continue later, so that the screen can react to keys in the
        meantime.
        """
        if self.past is None:
            return
        if self.past.advance(ADVANCE_S):
            self._show_progress("")
            self._arrive()
        else:
            self._show_progress(f"reading up to {time_text.position(self.past.at_s)}", self.past.on_its_way)
            self._app.set_timer(ANSWER_S, self._go_on)
