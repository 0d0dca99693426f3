"""A cache for the pictures of a source.

Each picture is drawn at most once a second, because drawing a picture takes as long as drawing a table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import TypeVar, cast

from cbtop.viewmodels.source import SourceView

T = TypeVar("T")


class Pictures:
    """The pictures of a source that were drawn during the current second."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._begun_s = 0.0
        self._of: object = None
        self._drawn: dict[Hashable, object] = {}

    def begin(self, source: SourceView, *of: Hashable) -> None:
        """Prepare for a picture of `source` that also depends on the values in `of`.

        All cached pictures are dropped if the source, these values or the daemon's second have changed, or if the
        pictures are one second old. All pictures are also dropped if the source is frozen (`SourceView.held`).
        """
        now, now_s = (source.second, source.rows_of, *of), self._clock_s()
        if source.second is None or now != self._of or now_s - self._begun_s >= 1:
            self.let_go()
            self._of, self._begun_s = now, now_s

    def drawn(self, what: Hashable, draw: Callable[[], T]) -> T:
        """Return the picture named `what` from the cache.

        If the cache does not contain the picture, draw the picture.
        """
        if what not in self._drawn:
            self._drawn[what] = draw()
        return cast("T", self._drawn[what])

    def let_go(self) -> None:
        """Drop all pictures, because the screen has moved in time."""
        self._of = None
        self._drawn.clear()
