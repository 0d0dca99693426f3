"""Pictures of a source, drawn once a second: nobody reads two of them a second, and each takes as long as a table."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, cast

from cbtop.viewmodels.model import SourceView

T = TypeVar("T")


class Pictures:
    """What was drawn of a source in the second that is shown."""

    def __init__(self) -> None:
        self._of: object = None
        self._drawn: dict[Hashable, object] = {}

    def begin(self, source: SourceView, *of: Hashable) -> None:
        """What follows is of `source` and of whatever else is named; where that is another, or another second of it,
        or where it is held, nothing drawn before is."""
        now = source.second, source.rows_of, *of
        if source.second is None or now != self._of:
            self.let_go()
            self._of = now

    def drawn(self, what: Hashable, draw: Callable[[], T]) -> T:
        """What `draw` gives, or gave before."""
        if what not in self._drawn:
            self._drawn[what] = draw()
        return cast("T", self._drawn[what])

    def let_go(self) -> None:
        """Draw all of them anew: the screen went elsewhere in time."""
        self._of = None
        self._drawn.clear()
