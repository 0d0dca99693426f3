"""What stands out in a recording: where a process stalled or ended, as far as the recording was read."""

from __future__ import annotations

from collections.abc import Iterable

from cbtop.client.store import SourceRecord
from cbtop.viewmodels.model import Mark, Standstill
from cbtop.viewmodels.stall import stall_view

MAX_MARKS = 10_000
_STILL = (Standstill.STALLED, Standstill.SUSPENDED)


class Marks:
    """By the second of the recording what was found there, once in a second of it."""

    def __init__(self) -> None:
        self.found: dict[int, Mark] = {}
        self._ended: set[str] | None = None

    def forget_before(self) -> None:
        """What comes does not follow what came: who has ended meanwhile ended nobody knows when."""
        self._ended = None

    def look(self, second: int, records: Iterable[SourceRecord]) -> None:
        """Take in how `records` stand at `second`."""
        known = list(records)
        ended = {record.key for record in known if record.has_ended}
        has_ended = self._ended is not None and not ended <= self._ended
        self._ended = ended
        if len(self.found) >= MAX_MARKS:
            return
        if any((stall := stall_view(record)) and stall.word in _STILL for record in known):
            self.found[second] = Mark.STALLED
        elif has_ended:
            self.found.setdefault(second, Mark.ENDED)
