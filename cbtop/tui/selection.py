"""The process shown: the newest running one, until the user chooses one."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop.protocol.vocabulary import SourceStatus
from cbtop.tui.widgets.lines import clean
from cbtop.viewmodels.source import SourceSummary


class Selection:
    """The key of the process shown. If `follows`, it moves to the newest live process until one is chosen."""

    def __init__(self, *, follows: bool = True) -> None:
        self.key: str | None = None  # None: the newest live one
        self._follows = follows
        self._live: dict[str, str] = {}  # live ones at the last look: label by key
        self._known: frozenset[str] = frozenset()  # all keys at the last look

    def choose(self, key: str) -> None:
        """Show this process from now on, whatever starts or ends."""
        self.key, self._follows = key, False

    def look(self, sources: Sequence[SourceSummary], *, is_complete: bool, may_move: bool = True) -> str:
        """Move to the newest live process, unless one was chosen or `may_move` is false. Return a message or "".

        The message names the process now shown, or a change of this or other processes and the key that shows them.
        Before `is_complete`, when not all running processes are known, the selection is not fixed.
        """
        live = {summary.key: clean(summary.label) for summary in sources if summary.state == SourceStatus.LIVE}
        before, self._live = self._live, live
        known, self._known = self._known, frozenset(summary.key for summary in sources)
        if self.key not in [summary.key for summary in sources]:
            self.key = sources[0].key if sources and is_complete else None
            return ""
        first = sources[0]
        if self._follows and may_move and is_complete and first.key != self.key and first.key in live:
            ended = before.get(self.key or "") if self.key not in live else None
            self.key = first.key
            why = f"{ended} has ended: " if ended else ""
            return f"{why}{live[first.key]} {'runs' if first.key in known else 'started'} and is shown now"
        # In a recording moved backwards, an ended process runs again. It has not started.
        if started := [key for key in live if key not in known]:
            what = live[started[0]] if len(started) == 1 else f"{len(started)} processes"
            return f"{what} started: {self._way_to(started[0], sources)}"
        if live and self.key in before and self.key not in live:
            newest = next(iter(live))
            others = f"{len(live)} others run" if len(live) > 1 else f"{live[newest]} runs"
            return f"{before[self.key]} has ended; {others}: {self._way_to(newest, sources)}"
        return ""

    def step(self, steps: int, sources: Sequence[SourceSummary]) -> None:
        """Select the process `steps` further, and stay there."""
        self._follows = False
        keys = [summary.key for summary in sources]
        if keys:
            self.key = keys[((keys.index(self.key) if self.key in keys else 0) + steps) % len(keys)]

    def position(self, sources: Sequence[SourceSummary]) -> str:
        """Return the position, for example `2/3`; "" if there is only one."""
        keys = [summary.key for summary in sources]
        return f"{keys.index(self.key) + 1}/{len(keys)}" if len(keys) > 1 and self.key in keys else ""

    def _way_to(self, key: str, sources: Sequence[SourceSummary]) -> str:
        keys = [summary.key for summary in sources]
        on = (keys.index(key) - keys.index(self.key or key)) % len(keys)
        step, times = (">", on) if on < len(keys) - on else ("<", len(keys) - on)
        return f"{step}{'' if times == 1 else f' {times} times'} shows it"
