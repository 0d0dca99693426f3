"""A viewer's link to one daemon: what came over it, how long it has been silent, and a daemon inside if need be."""

from __future__ import annotations

import time

from cbtop.clock_offset import ClockOffset
from cbtop.collector import SILENT_AFTER_S, Collector
from cbtop.daemon import DaemonInside
from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.errors import EndpointError
from cbtop.store import Store
from cbtop.window import DEFAULT_WINDOW_S

RETRY_INSIDE_S = 1.0


class Link:
    """Connects to `endpoint`; with None, to this user's daemon, starting one inside where none runs.

    When a daemon that ran elsewhere falls silent one is started inside: the rings are still there, so nothing is
    lost with it. Raises EndpointError for an address that cannot be one.
    """

    def __init__(self, endpoint: str | None = None, window_s: float = DEFAULT_WINDOW_S) -> None:
        self.store = Store(window_s)
        self._own = endpoint is None
        self._inside: DaemonInside | None = None
        self._tried_s = time.monotonic()
        address = default_endpoint() if endpoint is None else endpoint
        if self._own:
            self._start_inside(address)
        self._collector = Collector(address, self.store)

    def poll(self, timeout_ms: int = 0) -> None:
        """Take in what arrived; wait at most `timeout_ms` for something to arrive."""
        self._collector.poll(timeout_ms)
        alone = self._own and self._inside is None and self._collector.silent_s > SILENT_AFTER_S
        if alone and time.monotonic() - self._tried_s > RETRY_INSIDE_S:
            self._tried_s = time.monotonic()
            self._start_inside(self._collector.endpoint)

    @property
    def is_daemon_inside(self) -> bool:
        """Whether the daemon is ours: nobody else was there to watch."""
        return self._inside is not None

    @property
    def endpoint(self) -> str:
        """The address of the daemon."""
        return self._collector.endpoint

    @property
    def is_complete(self) -> bool:
        """Whether the daemon has answered with all it knows."""
        return self.store.daemon is not None

    @property
    def refused(self) -> str:
        """Why the daemon's messages are not taken; empty when they are."""
        return self._collector.refused

    @property
    def stale_s(self) -> float | None:
        """How long nothing was heard; None while something is."""
        return self._collector.silent_s if self._collector.silent_s > SILENT_AFTER_S else None

    @property
    def clock_offset(self) -> ClockOffset | None:
        """How far the clocks of the daemon's host are from ours; None while that is not known."""
        return self._collector.clock_offset

    @property
    def trouble(self) -> str:
        """What is wrong with the link; empty when nothing is."""
        if self._collector.refused:
            return self._collector.refused
        if self._inside and self._inside.error:
            return f"the daemon inside stopped: {self._inside.error}"
        if self.stale_s is not None:
            return f"{self.name}: nothing heard for {self.stale_s:.0f} s"
        return f"{self.name} · {self._collector.damaged} damaged messages" if self._collector.damaged else ""

    @property
    def name(self) -> str:
        """What a user would call the other end."""
        return "own daemon" if self._inside else self._collector.endpoint

    def close(self) -> None:
        """Close the link, and the daemon inside."""
        self._collector.close()
        if self._inside:
            self._inside.close()

    def _start_inside(self, address: str) -> None:
        try:
            self._inside = DaemonInside(address)
        except EndpointError:
            self._inside = None  # one runs already, or is about to: that is the one to listen to
