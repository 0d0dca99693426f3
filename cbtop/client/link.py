"""A viewer's link to one daemon: what came over it, and how long it has been silent."""

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
    """Connects to `endpoint`; with None, to this user's daemon, starting one inside where none runs.

    That one remembers the last `history_s` seconds. Raises EndpointError for an address that cannot be one, KeysError
    for another host's without `keys`.
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
        """Take in what arrived; wait at most `timeout_ms` for something to arrive."""
        self._collector.poll(timeout_ms)
        self._daemon.check(is_silent=self._collector.is_silent)

    def want(self, source: str) -> None:
        """Have what this source left read, if it was not."""
        self._collector.want(source)

    def follow_records(self, on: bool) -> None:
        """Receive every record too, or no more."""
        self._collector.follow_records(on)

    @property
    def is_daemon_inside(self) -> bool:
        """Whether the daemon is ours: nobody else was there to watch."""
        return self._daemon.inside is not None

    @property
    def endpoint(self) -> str:
        """The address of the daemon."""
        return self._collector.endpoint

    @property
    def is_complete(self) -> bool:
        """Whether the daemon has answered with all it knows."""
        return self.store.daemon is not None

    @property
    def is_behind(self) -> bool:
        """Whether some of what the daemon has said is still to be read."""
        return self._collector.is_behind

    @property
    def refused(self) -> str:
        """Why the daemon does not take us, or we not its messages; empty when all is well or may yet be."""
        return self._collector.refused

    @property
    def trouble(self) -> str:
        """Why nothing comes from the daemon; empty while something does, or nothing is known."""
        if self.is_complete and self.stale_s is None:
            return self._collector.trouble
        return self._collector.trouble or stopped_holder(self.endpoint)

    @property
    def no_daemon(self) -> str:
        """Why no daemon could be started inside; empty where one was, or where another was asked for."""
        return self._daemon.trouble

    @property
    def stale_s(self) -> float | None:
        """How long nothing was heard; None while something is."""
        return self._collector.silent_s if self._collector.is_silent else None

    @property
    def clock_offset(self) -> ClockOffset | None:
        """How far the clocks of the daemon's host are from ours; None while that is not known."""
        return self._collector.clock_offset

    @property
    def name(self) -> str:
        """What a user would call the other end."""
        return "own daemon" if self._daemon.inside else self._collector.endpoint

    @property
    def complaint(self) -> str:
        """What is wrong, in one line; empty when nothing is."""
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
        """Close the link, and the daemon inside."""
        self._collector.close()
        self._daemon.close()
