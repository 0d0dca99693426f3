"""The interface of feeds that the screen needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from cbtop.comparison.baseline import Snapshot
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import SourceSummary, SourceView
from cbtop.viewmodels.time_travel import TimeView


class AppFeedEnd(Protocol):
    """The program started with this app has failed. Whoever started the app reports why."""

    @property
    def exit_code(self) -> int: ...


class HistoryFile(Protocol):
    """A file with a daemon's history."""

    @property
    def path(self) -> Path: ...

    @property
    def size_bytes(self) -> int: ...


class AppFeed(Protocol):
    """The source of all data. No call blocks."""

    def poll(self) -> None:
        """Apply what has arrived. Called every tick, also while the screen is paused."""

    def sources(self) -> tuple[SourceSummary, ...]:
        """Return every source, in a stable order."""

    def view(self, key: str | None, phase: str | None, *, window: bool) -> SourceView | None:
        """Return the view of source `key` (None: the newest live one) in `phase` (None: the default), or None.

        Its statistics cover all data, or the recent `window`.
        """

    def merged(self, mode: MergeMode, key: str | None, phase: str | None, *, window: bool) -> SourceView | None:
        """Return all sources that belong together with `key` as one view."""

    def follow_records(self, on: bool) -> None:
        """Start or stop receiving every record, which a timeline needs."""

    @property
    def is_complete(self) -> bool:
        """Whether all running processes are known, so that a new one has just started."""

    def mark_baseline(self, key: str) -> bool:
        """Use the recent window of each process as baseline. Returns False if `key` has too few steps."""

    def clear_baseline(self) -> None:
        """Stop comparing with a baseline."""

    baselines: Sequence[Snapshot]  # one per process

    def watched(self) -> TimeView | None:
        """Return the last minutes with their notable events, or None if unknown."""

    def status(self) -> str:
        """Return one line about the link."""

    @property
    def refused(self) -> str:
        """Why the daemon rejects us or we its messages; empty if all is well or may become so."""

    def finished(self) -> AppFeedEnd | None:
        """Return the failure of the program started with this app, or None."""
