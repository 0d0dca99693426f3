"""Which process is shown: the one that was first or that was chosen, until a key says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop.protocol.vocabulary import SourceStatus
from cbtop.tui.widgets.lines import clean
from cbtop.viewmodels.model import SourceSummary


class Selection:
    """The key of the process shown. What starts or ends elsewhere never moves it, and is told."""

    def __init__(self) -> None:
        self.key: str | None = None  # None: the newest live one, whichever that is
        self._live: dict[str, str] = {}  # those that were live at the last look: label by key
        self._known: frozenset[str] = frozenset()  # all that there were then

    def look(self, sources: Sequence[SourceSummary], *, is_complete: bool) -> str:
        """Stay with the process shown, and say what became of it or of others, and which key goes there.

        None is shown for good before `is_complete`: all that runs has been told.
        """
        live = {summary.key: clean(summary.label) for summary in sources if summary.state == SourceStatus.LIVE}
        before, self._live = self._live, live
        known, self._known = self._known, frozenset(summary.key for summary in sources)
        if self.key not in [summary.key for summary in sources]:
            self.key = sources[0].key if sources and is_complete else None
            return ""
        # In a recording that is moved back what had ended runs again: it has not started.
        if started := [key for key in live if key not in known]:
            what = live[started[0]] if len(started) == 1 else f"{len(started)} processes"
            return f"{what} started: {self._way_to(started[0], sources)}"
        if live and self.key in before and self.key not in live:
            newest = next(iter(live))
            others = f"{len(live)} others run" if len(live) > 1 else f"{live[newest]} runs"
            return f"{before[self.key]} has ended; {others}: {self._way_to(newest, sources)}"
        return ""

    def step(self, steps: int, sources: Sequence[SourceSummary]) -> None:
        """Go on by so many processes."""
        keys = [summary.key for summary in sources]
        if keys:
            self.key = keys[((keys.index(self.key) if self.key in keys else 0) + steps) % len(keys)]

    def position(self, sources: Sequence[SourceSummary]) -> str:
        """`2/3`; empty where there is but one."""
        keys = [summary.key for summary in sources]
        return f"{keys.index(self.key) + 1}/{len(keys)}" if len(keys) > 1 and self.key in keys else ""

    def _way_to(self, key: str, sources: Sequence[SourceSummary]) -> str:
        keys = [summary.key for summary in sources]
        on = (keys.index(key) - keys.index(self.key or key)) % len(keys)
        step, times = (">", on) if on < len(keys) - on else ("<", len(keys) - on)
        return f"{step}{'' if times == 1 else f' {times} times'} shows it"
