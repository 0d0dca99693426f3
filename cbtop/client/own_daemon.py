"""The daemon that runs inside a viewer if no other daemon runs."""

from __future__ import annotations

import time

from cbtop.daemon.daemon import DaemonInside
from cbtop.daemon.history import MAX_HISTORY_S
from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.errors import EndpointError

RETRY_INSIDE_S = 1.0
# hint for the user if it is not known why the daemon does not answer
NO_ANSWER = "check the address, or start `cbtop daemon` there"


class DaemonIfNone:
    """The daemon that a viewer listens to. It is the daemon at `endpoint`. If `endpoint` is None, it is this user's
    daemon.

    In this case, a daemon is started in this process if no other runs, or if the running one falls silent later. The
    started daemon remembers the last `history_s` seconds. Raises EndpointError if there are too few file descriptors.
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
        """Start a daemon in this process if the other daemon has fallen silent. No data is lost, because both daemons
        read the same files.
        """
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
            self.inside = None  # Another daemon already runs or is starting. Connect to that daemon.
            self.trouble = str(error)
