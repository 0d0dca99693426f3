"""Show a slow task and its progress in one terminal line."""

# rich.progress was tried. It hides the cursor, so a killed or suspended (^Z) command leaves a terminal without one.
# Loading it and drawing the first line takes 57 ms, this module no measurable time. The code was not shorter.

from __future__ import annotations

import time
from typing import TextIO

REDRAW_S = 0.1
BAR_CELLS = 24


class ProgressLine:
    """Redraws one line of `stream`. If `stream` is not a terminal, each new task is printed once, on its own line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._last = ""
        self._drawn_s = 0.0

    def show(self, what: str, done: float | None = None) -> None:
        """Show the name `what` of the task and its progress. `done` is the completed share, 0 to 1. An empty `what`
        clears the line.
        """
        if not what:
            self.clear()
        elif self._live:
            self._redraw(what, done)
        elif what.partition(":")[0] != self._last:
            self._last = what.partition(":")[0]
            self._stream.write(f"{self._last} …\n")
            self._stream.flush()

    def clear(self) -> None:
        """Erase the line."""
        if self._live and self._drawn_s:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn_s = 0.0

    def _redraw(self, what: str, done: float | None) -> None:
        now_s = time.monotonic()
        if what == self._last and now_s - self._drawn_s < REDRAW_S:
            return
        self._last, self._drawn_s = what, now_s
        bar = ""
        if done is not None:
            filled = round(BAR_CELLS * min(max(done, 0), 1))
            bar = f"  {'█' * filled}{'░' * (BAR_CELLS - filled)} {100 * done:3.0f} %"
        self._stream.write(f"\r\x1b[K{what}{bar}")
        self._stream.flush()
