"""Keep track of the selected process. It is the newest running process until the user chooses one."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop.protocol.vocabulary import SourceStatus
from cbtop.tui.widgets.lines import clean
from cbtop.viewmodels.source import SourceSummary


class Selection:
    """Stores the key of the selected process.

    If `follows` is true, the newest live process is selected until the user chooses a process.
    """

    def __init__(self, *, follows: bool = True) -> None:
        self.key: str | None = None  # key of the selected process; None selects the newest live process
        self._follows = follows
        # (key, label) of each process that was live at the last call of `look`
        self._live: dict[str, str] = {}
        self._known: frozenset[str] = frozenset()  # keys of all processes that existed at the last call of `look`

    def choose(self, key: str) -> None:
        """Select the process `key`. From now on, starts and ends of processes do not change the selection."""
        self.key, self._follows = key, False

    def look(self, sources: Sequence[SourceSummary], *, is_complete: bool, may_move: bool = True) -> str:
        """Select the newest live process if the selection may change. Return a message for the user, or "".

        The selection stays if the user chose a process, or if `may_move` is false. The message names the newly
        selected process, or one that has started or ended, with a key to show it. While `is_complete` is false,
        nothing is selected, because the feed may not know all running processes.
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
        # If a recording moves backwards, an ended process runs again. It is in `known`, so it does not count as new.
        if started := [key for key in live if key not in known]:
            what = live[started[0]] if len(started) == 1 else f"{len(started)} processes"
            return f"{what} started: {self._way_to(started[0], sources)}"
        if live and self.key in before and self.key not in live:
            newest = next(iter(live))
            others = f"{len(live)} others run" if len(live) > 1 else f"{live[newest]} runs"
            return f"{before[self.key]} has ended; {others}: {self._way_to(newest, sources)}"
        return ""

    def step(self, steps: int, sources: Sequence[SourceSummary]) -> None:
        """Select the process `steps` positions later in the list. From now on, starts and ends do not change the
        selection.
        """
        self._follows = False
        keys = [summary.key for summary in sources]
        if keys:
            self.key = keys[((keys.index(self.key) if self.key in keys else 0) + steps) % len(keys)]

    def position(self, sources: Sequence[SourceSummary]) -> str:
        """Return the position of the selected process in the list, such as `2/3`. Return "" if there is only one
        process.
        """
        keys = [summary.key for summary in sources]
        return f"{keys.index(self.key) + 1}/{len(keys)}" if len(keys) > 1 and self.key in keys else ""

    def _way_to(self, key: str, sources: Sequence[SourceSummary]) -> str:
        keys = [summary.key for summary in sources]
        on = (keys.index(key) - keys.index(self.key or key)) % len(keys)
        step, times = (">", on) if on < len(keys) - on else ("<", len(keys) - on)
        return f"{step}{'' if times == 1 else f' {times} times'} shows it"
