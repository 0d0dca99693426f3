"""Interface of the feeds that provide the screen's data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from cbtop.comparison.baseline import Snapshot
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import SourceSummary, SourceView
from cbtop.viewmodels.time_travel import TimeView


class AppFeedEnd(Protocol):
    """Failure of the program that was started with this app. The caller of the app reports the reason."""

    @property
    def exit_code(self) -> int: ...


class HistoryFile(Protocol):
    """A file with a daemon's history."""

    @property
    def path(self) -> Path: ...

    @property
    def size_bytes(self) -> int: ...


class AppFeed(Protocol):
    """Provider of all data on the screen. None of its methods blocks."""

    def poll(self) -> None:
        """Apply the data that has arrived. Called at every tick, also while the screen is paused."""

    def sources(self) -> tuple[SourceSummary, ...]:
        """Return every source, in a stable order."""

    def view(self, key: str | None, phase: str | None, *, window: bool) -> SourceView | None:
        """Return the view of source `key` in `phase`, or None if the source does not exist.

        A `key` of None selects the newest live source, and a `phase` of None the default phase. The statistics cover
        all data, or the recent window if `window` is true.
        """

    def merged(self, mode: MergeMode, key: str | None, phase: str | None, *, window: bool) -> SourceView | None:
        """Return one merged view of all sources that belong together with source `key`."""

    def follow_records(self, on: bool) -> None:
        """Start or stop receiving every record. Only a timeline needs every record."""

    @property
    def is_complete(self) -> bool:
        """Whether all running processes are known. If so, any new process has just started."""

    def mark_baseline(self, key: str) -> bool:
        """Use the recent window of each process as its baseline. Returns False if process `key` has too few steps."""

    def clear_baseline(self) -> None:
        """Stop comparing with a baseline."""

    baselines: Sequence[Snapshot]  # At most one per process.

    def watched(self) -> TimeView | None:
        """Return the last minutes as a time range with notable events, or None if unknown."""

    def status(self) -> str:
        """Return one line about the connection to the daemon."""

    @property
    def refused(self) -> str:
        """Why the daemon and this client do not understand each other, or "" if they do."""

    def finished(self) -> AppFeedEnd | None:
        """Return the failure of the program started with this app, or None."""
