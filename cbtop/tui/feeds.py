"""The interface of the feeds that provide the data on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from cbtop.comparison.baseline import Snapshot
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import SourceSummary, SourceView
from cbtop.viewmodels.time_travel import TimeView


class AppFeedEnd(Protocol):
    """The program that was started with this app has failed. The command that runs the app reports the reason."""

    @property
    def exit_code(self) -> int: ...


class HistoryFile(Protocol):
    """A recording file with the history that a daemon remembers."""

    @property
    def path(self) -> Path: ...

    @property
    def size_bytes(self) -> int: ...


class AppFeed(Protocol):
    """The source of all data on the screen. The methods of a feed never block."""

    def poll(self) -> None:
        """Apply the data that has arrived. The app calls this at every tick, also while the screen is paused."""

    def sources(self) -> tuple[SourceSummary, ...]:
        """Return all sources, in an order that does not change."""

    def view(self, key: str | None, phase: str | None, *, window: bool) -> SourceView | None:
        """Return the view of the source `key` for `phase`, or None if the source does not exist.

        If `key` is None, the newest live source is used. If `phase` is None, the default phase is used. The
        statistics cover all data, or the recent window if `window` is true.
        """

    def merged(self, mode: MergeMode, key: str | None, phase: str | None, *, window: bool) -> SourceView | None:
        """Return one view of several sources: the source `key`, and all sources that can be merged with it."""

    def follow_records(self, on: bool) -> None:
        """Start or stop receiving every single record, which only a timeline needs."""

    @property
    def is_complete(self) -> bool:
        """Whether the feed has reported all running processes.

        If so, a process that appears later has just started.
        """

    def mark_baseline(self, key: str) -> bool:
        """Use the recent window of each process as the baseline of this process.

        Returns False if the process `key` has too few steps.
        """

    def clear_baseline(self) -> None:
        """Forget the baselines, so that nothing is compared with a baseline any longer."""

    baselines: Sequence[Snapshot]  # the baselines for comparisons, at most one per process

    def watched(self) -> TimeView | None:
        """Return the time bar of the last minutes with its notable events (such as stalls).

        Return None if unknown.
        """

    @property
    def starting(self) -> str:
        """The program that this cbtop has started, if it runs and has not reported anything yet. Otherwise ""."""

    def status(self) -> str:
        """Return one line about the connection to the daemon."""

    @property
    def refused(self) -> str:
        """The reason why the daemon and this viewer will never accept each other, such as different versions.

        The text is "" without such a reason.
        """

    def finished(self) -> AppFeedEnd | None:
        """Return the failure of the program that was started with this app. Return None if it has not failed."""
