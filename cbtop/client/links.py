"""A viewer's links to one or several daemons, and their state in sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

from cbtop.client.clock_offset import ClockOffset
from cbtop.client.link import Link
from cbtop.client.own_daemon import NO_ANSWER
from cbtop.client.store import Budget
from cbtop.protocol.keys import ViewerKeys


class Links:
    """Connects to each of `endpoints`. Without any: to this user's daemon, which is started in this process if none
    runs. `keys` has the keys for an endpoint that needs some.

    If one daemon fails, other data is not affected. A daemon in this process remembers the last `history_s` seconds.
    Raises EndpointError for an invalid address, and KeysError if an address on another host needs `keys`.
    """

    def __init__(
        self, endpoints: Sequence[str], window_s: float, keys: Mapping[str, ViewerKeys], history_s: float
    ) -> None:
        self._follows_records = False
        with ExitStack() as opened:
            self._links: list[Link] = []
            budget = Budget()
            for endpoint in dict.fromkeys(endpoints or (None,)):
                self._links.append(Link(endpoint, window_s, keys.get(endpoint or ""), budget, history_s))
                opened.callback(self._links[-1].close)
            self._close = opened.pop_all().close

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links)

    def poll(self, timeout_ms: int = 0) -> None:
        """Apply the messages of all daemons. Wait at most `timeout_ms` for the first."""
        for link in self._links:
            link.poll(timeout_ms // len(self._links))

    def follow_records(self, on: bool) -> None:
        """Start or stop receiving every single record from the daemons."""
        if on != self._follows_records:
            self._follows_records = on
            for link in self._links:
                link.follow_records(on)

    def want(self, key: str) -> None:
        """Request the unread data of ended processes, from each daemon one process at a time.

        A later poll reads the answer.
        """
        for link in self._links:
            link.want(key)

    def key_of(self, pid: int) -> str | None:
        """Return the key of the source with this `pid`. None if it has not appeared yet."""
        records = (record for link in self._links for record in link.store.sources.values())
        return next((record.key for record in records if record.hello and record.hello.pid == pid), None)

    def clock_offset_of(self, link: Link) -> ClockOffset | None:
        """Return the best known clock offset of the host of `link`.

        Daemons with the same boot id are on one host, so any of their offsets is valid.
        """
        boot_id = link.store.daemon.boot_id if link.store.daemon else ""
        same = [other for other in self._links if other.store.daemon and other.store.daemon.boot_id == boot_id]
        offsets = [offset for other in (same if boot_id else [link]) if (offset := other.clock_offset)]
        return min(offsets, key=lambda offset: offset.uncertainty_ns, default=None)

    @property
    def heard_ns(self) -> int | None:
        """The time in the daemon's newest message. None with several daemons, because their clocks differ."""
        return self._links[0].store.heard_ns if len(self._links) == 1 else None

    @property
    def is_daemon_inside(self) -> bool:
        """Whether a daemon runs in this process, because no other was running."""
        return any(link.is_daemon_inside for link in self._links)

    @property
    def endpoint(self) -> str | None:
        """The address of the daemon. None if there are several."""
        return self._links[0].endpoint if len(self._links) == 1 else None

    @property
    def unanswered(self) -> tuple[str, ...]:
        """The addresses that have not answered yet, each with the reason. If it is unknown, with a hint for the
        user.
        """
        silent = [link for link in self._links if not link.is_complete]
        return tuple(f"{link.endpoint}: {link.trouble or link.no_daemon or NO_ANSWER}" for link in silent)

    @property
    def answered(self) -> tuple[str, ...]:
        """The addresses that a daemon outside this process has answered from."""
        return tuple(link.endpoint for link in self._links if link.is_complete and not link.is_daemon_inside)

    @property
    def unread(self) -> tuple[str, ...]:
        """The addresses of daemons with messages that are not applied yet."""
        return tuple(link.endpoint for link in self._links if link.is_behind)

    @property
    def is_complete(self) -> bool:
        """Whether a daemon has answered, and all its messages are applied."""
        return any(link.is_complete for link in self._links) and not self.unread

    @property
    def left_out(self) -> str:
        """Number, names and reasons of the sources that were dropped for lack of memory, as one text. "" without
        any.
        """
        return "; ".join(filter(None, (link.store.complaint() for link in self._links)))

    @property
    def refused(self) -> str:
        """Why no daemon will ever accept this viewer, or why this viewer accepts none: different versions or keys. ""
        if a link works or may work later.
        """
        refused = [link.refused for link in self._links]
        return "; ".join(refused) if all(refused) else ""

    def status(self) -> str:
        """Return one line about the state of all links."""
        complaints = [link.complaint for link in self._links if link.complaint]
        if len(self._links) == 1:
            return complaints[0] if complaints else self._links[0].name
        return " · ".join((f"{len(self._links)} daemons", *complaints))

    def close(self) -> None:
        """Close all links, and stop the daemon if it runs in this process."""
        self._close()
