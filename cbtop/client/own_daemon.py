"""The daemon inside a viewer, for when no other daemon runs."""

from __future__ import annotations

import time

from cbtop.daemon.daemon import DaemonInside
from cbtop.daemon.history import MAX_HISTORY_S
from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.errors import EndpointError

RETRY_INSIDE_S = 1.0
# hint for the user if a daemon does not answer for unknown reasons
NO_ANSWER = "check the address, or start `cbtop daemon` there"


class DaemonIfNone:
    """The daemon that a viewer listens to: the daemon at `endpoint`. If `endpoint` is None, this user's daemon.

    This user's daemon is started in this process if none runs, or if it falls silent later. It then remembers the
    last `history_s` seconds. Raises EndpointError if there are too few file descriptors.
    """

    def __init__(self, endpoint: str | None, history_s: float = MAX_HISTORY_S) -> None:
        self.endpoint = default_endpoint() if endpoint is None else endpoint
        self.inside: DaemonInside | None = None
        self.trouble = ""  # why no daemon could be started in this process, or ""
        self._own, self._history_s = endpoint is None, history_s
        self._tried_s = time.monotonic()
        if self._own:
            self._start()

    def check(self, *, is_silent: bool) -> None:
        """Let the daemon in this process send its next update, because the last one was taken.

        Start one if the other daemon has fallen silent. Both read the same files, so no data is lost.
        """
        if self.inside is not None:
            self.inside.tell_drawn()
        alone = self._own and self.inside is None and is_silent
        if alone and time.monotonic() - self._tried_s > RETRY_INSIDE_S:
            self._tried_s = time.monotonic()
            self._start()

    def close(self) -> None:
        """Stop the daemon, if it runs in this process."""
        if self.inside:
            self.inside.close()

    def _start(self) -> None:
        self.trouble = ""
        try:
            self.inside = DaemonInside(self.endpoint, history_s=self._history_s)
        except EndpointError as error:
            self.inside = None  # Another daemon runs or is starting, so connect to that.
            self.trouble = str(error)
