"""The daemon run inside a viewer, so that `cbtop` alone is enough to watch."""

from __future__ import annotations

import time

from cbtop.daemon.daemon import DaemonInside
from cbtop.daemon.history import MAX_HISTORY_S
from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.errors import EndpointError

RETRY_INSIDE_S = 1.0


class DaemonIfNone:
    """The daemon that a viewer listens to: the one at `endpoint`, or with None this user's.

    With None, one is started inside the viewer where none runs, and later where the one that ran falls silent.
    It remembers the last `history_s` seconds.
    Raises EndpointError where there are too few descriptors for it.
    """

    def __init__(self, endpoint: str | None, history_s: float = MAX_HISTORY_S) -> None:
        self.endpoint = default_endpoint() if endpoint is None else endpoint
        self.inside: DaemonInside | None = None
        self.trouble = ""  # why none could be started inside
        self._own, self._history_s = endpoint is None, history_s
        self._tried_s = time.monotonic()
        if self._own:
            self._start()

    def check(self, *, is_silent: bool) -> None:
        """Start one inside if the other is silent. Nothing is lost: the rings are still there."""
        alone = self._own and self.inside is None and is_silent
        if alone and time.monotonic() - self._tried_s > RETRY_INSIDE_S:
            self._tried_s = time.monotonic()
            self._start()

    def close(self) -> None:
        """Stop the one inside."""
        if self.inside:
            self.inside.close()

    def _start(self) -> None:
        self.trouble = ""
        try:
            self.inside = DaemonInside(self.endpoint, history_s=self._history_s)
        except EndpointError as error:
            self.inside = None  # one runs already, or is about to: that is the one to listen to
            self.trouble = str(error)
