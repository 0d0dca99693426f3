"""Pictures of a source, drawn once a second: nobody reads two of them a second, and each takes as long as a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import TypeVar, cast

from cbtop.viewmodels.model import SourceView

T = TypeVar("T")


class Pictures:
    """What was drawn of a source in the second that is shown."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._begun_s = 0.0
        self._of: object = None
        self._drawn: dict[Hashable, object] = {}

    def begin(self, source: SourceView, *of: Hashable) -> None:
        """What follows is of `source` and of whatever else is named; where that is another, or another second of it,
        which a recording may play slowly, or where it is held, nothing drawn before is."""
        now, now_s = (source.second, source.rows_of, *of), self._clock_s()
        if source.second is None or now != self._of or now_s - self._begun_s >= 1:
            self.let_go()
            self._of, self._begun_s = now, now_s

    def drawn(self, what: Hashable, draw: Callable[[], T]) -> T:
        """What `draw` gives, or gave before."""
        if what not in self._drawn:
            self._drawn[what] = draw()
        return cast("T", self._drawn[what])

    def let_go(self) -> None:
        """Draw all of them anew: the screen went elsewhere in time."""
        self._of = None
        self._drawn.clear()
