"""A viewer's end of the wire: drains the socket into a store, and says how the link is."""

from __future__ import annotations

import time
from collections.abc import Callable

from cbtop.protocol.errors import DecodeError, VersionError
from cbtop.protocol.keys import ViewerKeys
from cbtop.protocol.messages import DaemonHello
from cbtop.protocol.subscriber import Subscriber
from cbtop.store import Store

SILENT_AFTER_S = 3.0  # three heartbeats
MAX_DRAINED = 200  # messages a poll, so that a flood cannot hold up the screen


class Collector:
    """Applies what arrives at `endpoint` to `store`. Nothing here waits unless asked to."""

    def __init__(
        self,
        endpoint: str,
        store: Store,
        clock_s: Callable[[], float] = time.monotonic,
        keys: ViewerKeys | None = None,
    ) -> None:
        self.store = store
        self.damaged = 0  # messages that were not messages
        self._clock_s = clock_s
        self._heard_s = clock_s()
        self._other_version = ""
        self._subscriber = Subscriber(endpoint, keys)

    @property
    def endpoint(self) -> str:
        return self._subscriber.endpoint

    @property
    def refused(self) -> str:
        """Why the daemon does not take us, or we not its messages; empty when all is well or may yet be."""
        return self._other_version or (self.trouble if self._subscriber.is_refused else "")

    @property
    def trouble(self) -> str:
        """Why there is no link; empty while there is one, or nothing is known."""
        return self._subscriber.trouble

    @property
    def received(self) -> int:
        """How many messages came."""
        return self._subscriber.received

    @property
    def silent_s(self) -> float:
        """How long nothing was heard, or since the beginning when nothing ever was."""
        return self._clock_s() - self._heard_s

    def poll(self, timeout_ms: int = 0) -> None:
        """Take in what has arrived; wait up to `timeout_ms` for the first message."""
        for _ in range(MAX_DRAINED):
            try:
                messages = self._subscriber.receive(timeout_ms)
                if not messages:
                    return
                for message in messages:
                    if isinstance(message, DaemonHello):
                        self._other_version = ""
                    if not self._other_version:
                        self.store.apply(message)
            except VersionError as error:
                self._other_version = str(error)
            except DecodeError:
                self.damaged += 1
            self._heard_s = self._clock_s()
            timeout_ms = 0

    def close(self) -> None:
        """Close the socket."""
        self._subscriber.close()
