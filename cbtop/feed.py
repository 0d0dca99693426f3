"""The feed: a viewer's link to whatever runs, and the views made from it. TUI and headless share it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

from cbtop.collector import SILENT_AFTER_S, Collector
from cbtop.daemon import DaemonInside
from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.errors import EndpointError
from cbtop.store import Store
from cbtop.viewmodels.model import SourceSummary, SourceView
from cbtop.viewmodels.source import source_view, summaries
from cbtop.window import DEFAULT_WINDOW_S

RETRY_INSIDE_S = 1.0


@dataclass(frozen=True, slots=True)
class FeedEnd:
    """Why a viewer has nothing more to show, and the exit code that goes with it."""

    exit_code: int
    message: str


class Feed:
    """Connects to `endpoint`; with None, to this user's daemon, starting one inside where none runs.

    When a daemon that ran elsewhere falls silent one is started inside: the rings are still there, so nothing is
    lost with it. Raises EndpointError for an address that cannot be one.
    """

    def __init__(self, endpoint: str | None = None, window_s: float = DEFAULT_WINDOW_S) -> None:
        self._store = Store(window_s)
        self._own = endpoint is None
        self._inside: DaemonInside | None = None
        self._tried_s = time.monotonic()
        address = default_endpoint() if endpoint is None else endpoint
        if self._own:
            self._start_inside(address)
        self._collector = Collector(address, self._store)

    @property
    def is_daemon_inside(self) -> bool:
        """Whether the daemon is ours: nobody else was there to watch."""
        return self._inside is not None

    def poll(self, timeout_ms: int = 0) -> None:
        """Take in what arrived; wait at most `timeout_ms` for something to arrive."""
        self._collector.poll(timeout_ms)
        alone = self._own and self._inside is None and self._collector.silent_s > SILENT_AFTER_S
        if alone and time.monotonic() - self._tried_s > RETRY_INSIDE_S:
            self._tried_s = time.monotonic()
            self._start_inside(self._collector.endpoint)

    def sources(self) -> tuple[SourceSummary, ...]:
        """Every source, the newest live one first."""
        return summaries(self._store)

    def view(self, key: str | None = None, phase: str | None = None, *, window: bool = False) -> SourceView | None:
        """What a source shows, of its life or its window; None for `key` is the first of `sources()`.

        None when there is nothing yet.
        """
        if key is None:
            known = self.sources()
            key = known[0].key if known else None
        record = self._store.sources.get(key or "")
        return source_view(record, phase, window=window) if record else None

    def key_of(self, pid: int) -> str | None:
        """The source whose process is `pid`; None while it has not appeared."""
        return next((r.key for r in self._store.sources.values() if r.hello and r.hello.pid == pid), None)

    @property
    def endpoint(self) -> str:
        """The address of the daemon."""
        return self._collector.endpoint

    @property
    def is_complete(self) -> bool:
        """Whether the daemon has answered with all it knows."""
        return self._store.daemon is not None

    @property
    def refused(self) -> str:
        """Why the daemon's messages are not taken; empty when they are."""
        return self._collector.refused

    def status(self) -> str:
        """One line about the link."""
        if self._collector.refused:
            return self._collector.refused
        if self._inside and self._inside.error:
            return f"the daemon inside stopped: {self._inside.error}"
        where = "own daemon" if self._inside else self._collector.endpoint
        if self._collector.silent_s > SILENT_AFTER_S:
            return f"{where}: nothing heard for {self._collector.silent_s:.0f} s"
        damaged = f" · {self._collector.damaged} damaged messages" if self._collector.damaged else ""
        return f"{where}{damaged}"

    def finished(self) -> FeedEnd | None:
        """A feed on whatever runs never ends by itself."""
        return None

    def close(self) -> None:
        """Close the link, and the daemon inside."""
        self._collector.close()
        if self._inside:
            self._inside.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_inside(self, address: str) -> None:
        try:
            self._inside = DaemonInside(address)
        except EndpointError:
            self._inside = None  # one runs already, or is about to: that is the one to listen to
