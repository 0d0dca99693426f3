"""What the screen wants of whoever gives it its views."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from cbtop.viewmodels.baseline import Snapshot
from cbtop.viewmodels.model import MergeMode, SourceSummary, SourceView, TimeView


class AppFeedEnd(Protocol):
    """The workload this app was started for has failed; saying why is left to whoever started the app."""

    @property
    def exit_code(self) -> int: ...


class SavedHistory(Protocol):
    """A file made of what the daemon remembered."""

    @property
    def path(self) -> Path: ...

    @property
    def size_bytes(self) -> int: ...


class AppFeed(Protocol):
    """Where the numbers come from. No call blocks."""

    def poll(self) -> None:
        """Take in what has arrived. Called every tick, also while the screen is paused."""

    def sources(self) -> tuple[SourceSummary, ...]:
        """Every source seen, in a stable order."""

    def view(self, key: str | None, phase: str | None, *, window: bool) -> SourceView | None:
        """Source `key` (None: the newest live one) in `phase` (None: the default); None: none seen yet.

        Its statistics are of all that was seen, or of the `window`, the last seconds.
        """

    def merged(self, mode: MergeMode, key: str | None, phase: str | None, *, window: bool) -> SourceView | None:
        """All sources like `key` as one."""

    def follow_records(self, on: bool) -> None:
        """Receive every record too, as a timeline needs them, or no more."""

    @property
    def is_complete(self) -> bool:
        """Whether all that runs has been told; what comes later has started since."""

    def mark_baseline(self, key: str) -> bool:
        """Compare from now on with the last seconds of each process; False where there are too few of `key`."""

    def clear_baseline(self) -> None:
        """Compare with nothing any more."""

    baselines: Sequence[Snapshot]  # one a process

    def watched(self) -> TimeView | None:
        """The last minutes, and what stood out in them; None where that is not known."""

    def status(self) -> str:
        """One line about the link."""

    @property
    def refused(self) -> str:
        """Why the daemon does not take us, or we not its messages; empty when all is well or may yet be."""

    def finished(self) -> AppFeedEnd | None:
        """Not None when the workload this app was started for has failed."""
