"""The dashboard for a recording. It has the usual views, and additional keys to move in time."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from cbtop.feeds.replay import ReplayFeed
from cbtop.tui.app import CbtopApp
from cbtop.tui.time_travel import TimeTravel

# Actions of the live app that are removed for a recording. A recording has no present, and is already a file.
_NOT_HERE = ("now", "save_history")


def _seek(keys: str, action: str, description: str, *, show: bool = False) -> Binding:
    # The keys that move in time come before the same keys in lists. There, j k g G still move the cursor, and in the
    # graph also h l.
    return Binding(keys, action, description, show=show, priority=True)


class ReplayApp(CbtopApp, inherit_bindings=False):
    """The dashboard for a recording. The space key pauses the playback, and not only the screen."""

    # Do not select new processes. Otherwise a move in time could select a different process.
    FOLLOWS: ClassVar[bool] = False
    BINDINGS: ClassVar[list[BindingType]] = [
        _seek("left", "seek(-5)", "back 5 s", show=True),
        _seek("right", "seek(5)", "on 5 s", show=True),
        _seek("pageup,shift+left", "seek(-60)", "back 1 min"),
        _seek("pagedown,shift+right", "seek(60)", "on 1 min"),
        _seek("home", "seek_to(0)", "to the beginning"),
        _seek("end", "seek_to(1)", "to the end"),
        Binding("w", "save_history", "save the range to a file", show=False),
        # These bindings must come last, because the footer always shows the last two bindings: help and quit.
        *(each for each in CbtopApp.BINDINGS if not (isinstance(each, Binding) and each.action in _NOT_HERE)),
    ]

    def __init__(self, feed: ReplayFeed, *, interval_s: float = 0.5, section: str = "all") -> None:
        super().__init__(feed, interval_s=interval_s, section=section)
        self._recording = feed
        self.window = False

    def _time_travel(self) -> TimeTravel:
        return TimeTravel(
            self, self.show, self.arrive, self._notice.show_progress, self._source_key, past=self._recording
        )

    def action_pause(self) -> None:
        """Pause the recording, or continue it. If a time range is shown, continue at the end of the range."""
        if self.paused or self._recording.range_s is not None:
            self.paused, self._recording.is_playing = False, True
            self._travel.leave_range()
        else:
            self._recording.is_playing = False
            self._freeze()

    def action_steps(self, steps: int) -> None:
        """Pause the recording, then move by `steps` steps of the shown process."""
        if not self.paused:
            self._recording.is_playing = False
            self._freeze()
        super().action_steps(steps)

    def action_seek_to(self, share: float) -> None:
        """Move to a position in the recording. The position 0 is its beginning, and 1 is its end."""
        self._travel.go_to(share * self._recording.duration_s)

    def action_save_history(self) -> None:
        if self._recording.range_s is None:
            self._travel.tell("v chooses a range to write: all else is in the recording already", severity="warning")
        else:
            super().action_save_history()

    def tick(self) -> None:
        """Update the screen. While the recording moves to a target, keep the previous picture."""
        if self._recording.on_its_way is None:
            super().tick()
