"""A cache for pictures of a source. They are drawn at most once a second, because each takes as long as a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import TypeVar, cast

from cbtop.viewmodels.source import SourceView

T = TypeVar("T")


class Pictures:
    """The pictures of a source drawn in the current second."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._begun_s = 0.0
        self._of: object = None
        self._drawn: dict[Hashable, object] = {}

    def begin(self, source: SourceView, *of: Hashable) -> None:
        """Begin a picture of `source` and the other keys in `of`. Drops cached drawings if these have changed.

        Also drops them in a new second of the daemon or our clock, or if the source is held.
        """
        now, now_s = (source.second, source.rows_of, *of), self._clock_s()
        if source.second is None or now != self._of or now_s - self._begun_s >= 1:
            self.let_go()
            self._of, self._begun_s = now, now_s

    def drawn(self, what: Hashable, draw: Callable[[], T]) -> T:
        """Return the result of `draw`, from cache if possible."""
        if what not in self._drawn:
            self._drawn[what] = draw()
        return cast("T", self._drawn[what])

    def let_go(self) -> None:
        """Drop all pictures, because the screen moved in time."""
        self._of = None
        self._drawn.clear()
