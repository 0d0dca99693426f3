"""A viewer's link to one daemon: the daemon's data, and the seconds since its last message."""

from __future__ import annotations

from cbtop.client import DEFAULT_WINDOW_S
from cbtop.client.clock_offset import ClockOffset
from cbtop.client.collector import Collector
from cbtop.client.own_daemon import DaemonIfNone
from cbtop.client.store import Budget, Store
from cbtop.daemon.history import MAX_HISTORY_S
from cbtop.protocol.endpoint import stopped_holder
from cbtop.protocol.keys import ViewerKeys


class Link:
    """Connects to `endpoint`. None: to this user's daemon, which is started in this process if none runs.

    Such a daemon remembers the last `history_s` seconds. Raises EndpointError for an invalid address, and KeysError
    if an address on another host needs `keys`.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        window_s: float = DEFAULT_WINDOW_S,
        keys: ViewerKeys | None = None,
        budget: Budget | None = None,
        history_s: float = MAX_HISTORY_S,
    ) -> None:
        self.store = Store(window_s, budget)
        self._daemon = DaemonIfNone(endpoint, history_s)
        self._collector = Collector(self._daemon.endpoint, self.store, keys=keys)

    def poll(self, timeout_ms: int = 0) -> None:
        """Apply the daemon's messages. Wait at most `timeout_ms` for the first."""
        self._collector.poll(timeout_ms)
        self._daemon.check(is_silent=self._collector.is_silent)

    def want(self, source: str) -> None:
        """Request an ended process's data, unless it was already read."""
        self._collector.want(source)

    def follow_records(self, on: bool) -> None:
        """Start or stop receiving every single record from the daemon."""
        self._collector.follow_records(on)

    @property
    def is_daemon_inside(self) -> bool:
        """Whether the daemon runs in this process, because no other was running."""
        return self._daemon.inside is not None

    @property
    def endpoint(self) -> str:
        """The address that this link is connected to."""
        return self._collector.endpoint

    @property
    def is_complete(self) -> bool:
        """Whether the daemon has sent all the data that it has now."""
        return self.store.daemon is not None

    @property
    def is_behind(self) -> bool:
        """Whether some messages of the daemon were received but not applied yet."""
        return self._collector.is_behind

    @property
    def refused(self) -> str:
        """Why the daemon and this viewer will never accept each other (different versions or keys), or ""."""
        return self._collector.refused

    @property
    def trouble(self) -> str:
        """Why no data arrives from the daemon. "" if data arrives, or if the reason is unknown."""
        if self.is_complete and self.stale_s is None:
            return self._collector.trouble
        return self._collector.trouble or stopped_holder(self.endpoint)

    @property
    def no_daemon(self) -> str:
        """Why no daemon could be started in this process. "" if one was found, or if the user gave an address."""
        return self._daemon.trouble

    @property
    def stale_s(self) -> float | None:
        """Seconds since the daemon's last message. None if the daemon is not silent."""
        return self._collector.silent_s if self._collector.is_silent else None

    @property
    def clock_offset(self) -> ClockOffset | None:
        """Difference between the clocks of the daemon's host and ours. None if not known yet."""
        return self._collector.clock_offset

    @property
    def name(self) -> str:
        """Where data comes from, as shown to the user."""
        return "read here" if self._daemon.inside else self._collector.endpoint

    @property
    def complaint(self) -> str:
        """One line about a problem with the link to this daemon, or ""."""
        inside = self._daemon.inside
        if self.refused or self.trouble:
            return f"{self.endpoint}: {'refused' if self.refused else self.trouble}"
        if inside and inside.error:
            return f"the daemon inside stopped: {inside.error}"
        if self.stale_s is not None:
            return f"{self.name}: nothing heard for {self.stale_s:.0f} s"
        damaged = f"{self._collector.damaged} damaged messages" if self._collector.damaged else ""
        wrong = [text for text in (self.store.complaint(), damaged) if text]
        return " · ".join((self.name, *wrong)) if wrong else ""

    def close(self) -> None:
        """Close the link, and stop the daemon in this process."""
        self._collector.close()
        self._daemon.close()
