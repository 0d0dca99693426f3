"""The dashboard over a recording: the same screens, and keys that move in time."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from cbtop import formatting
from cbtop.client.replay import ReplayFeed
from cbtop.tui.app import CbtopApp
from cbtop.tui.views.time_bar import TimeBar
from cbtop.viewmodels.model import ReplayView

READ_S, ANSWER_S = 0.05, 0.005  # a recording is read for so long, and then keys are answered for so long


def _seek(keys: str, action: str, description: str, *, show: bool = False) -> Binding:
    # They come before the lists', which keep j k g G and, in the graph, h l.
    return Binding(keys, action, description, show=show, priority=True)


class ReplayApp(CbtopApp, inherit_bindings=False):
    """Space holds the recording, not only the screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *(each for each in CbtopApp.BINDINGS if not (isinstance(each, Binding) and each.action == "save_history")),
        _seek("left", "seek(-5)", "back 5 s", show=True),
        _seek("right", "seek(5)", "on 5 s", show=True),
        _seek("pageup,shift+left", "seek(-60)", "back 1 min"),
        _seek("pagedown,shift+right", "seek(60)", "on 1 min"),
        _seek("left_square_bracket", "seek(-1)", "back 1 s"),
        _seek("right_square_bracket", "seek(1)", "on 1 s"),
        _seek("left_curly_bracket", "seek(-10)", "back 10 s"),
        _seek("right_curly_bracket", "seek(10)", "on 10 s"),
        _seek("home", "seek_to(0)", "to the beginning"),
        _seek("end", "seek_to(1)", "to the end"),
    ]

    def __init__(self, feed: ReplayFeed, *, interval_s: float = 0.5, section: str = "all") -> None:
        super().__init__(feed, interval_s=interval_s, section=section)
        self._recording = feed
        self.window = False

    def compose(self) -> ComposeResult:
        yield from super().compose()
        self._time_bar = TimeBar(id="time")
        yield self._time_bar

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """The help and the filter keep their arrows."""
        if action in ("seek", "seek_to"):
            return len(self.screen_stack) == 1 and not isinstance(self.focused, Input)
        return True

    def replay(self) -> ReplayView | None:
        return self._recording.replay()

    def _show_surroundings(self) -> None:
        super()._show_surroundings()
        self._time_bar.show_replay(self._recording.replay(), self._recording.marks)

    def on_time_bar_chosen(self, event: TimeBar.Chosen) -> None:
        self.action_seek_to(event.share)

    def action_pause(self) -> None:
        """Hold the recording where it is, or let it go on."""
        self._recording.is_playing = not self._recording.is_playing
        super().action_pause()

    def action_seek(self, by_s: float) -> None:
        """Move in time; a recording that is held stays held, at the new place."""
        self._go_to(self._recording.at_s + by_s)

    def action_seek_to(self, share: float) -> None:
        """Move to a share of the whole: 0 is the beginning, 1 the end."""
        self._go_to(share * self._recording.duration_s)

    def _go_to(self, at_s: float) -> None:
        is_going = self._recording.on_its_way is not None
        self._recording.aim(at_s)
        if not is_going:
            self._go_on()

    def _go_on(self) -> None:
        """Read on, and let the screen answer to keys meanwhile."""
        if self._recording.advance(READ_S):
            self._notice.show_progress("")
            self.show()
        else:
            self._notice.show_progress(
                f"reading up to {formatting.position(self._recording.at_s)}", self._recording.on_its_way
            )
            self.set_timer(ANSWER_S, self._go_on)

    def tick(self) -> None:
        """Until it is there, what was shown before stays."""
        if self._recording.on_its_way is None:
            super().tick()
