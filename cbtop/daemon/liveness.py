"""Check whether a profiled process still runs, by its pid, its lock on the catalog, and its mapping of the ring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cbtop.protocol.catalog import is_locked
from cbtop.protocol.messages import HostHello
from cbtop.protocol.process import has_mapped, is_running, pid_namespace
from cbtop.protocol.ring_reader import RingReader

ALIVE_CHECK_S = 0.5


class Liveness:
    """Checks whether the process of a ring runs, at most once every ALIVE_CHECK_S."""

    def __init__(self, ring: RingReader, ring_path: Path, catalog_path: Path, clock_s: Callable[[], float]) -> None:
        self._ring = ring
        self._ring_path = ring_path
        self._catalog_path = catalog_path
        self._clock_s = clock_s
        self._checked_s = -ALIVE_CHECK_S

    def is_alive(self, hello: HostHello | None) -> bool:
        """Whether the process that sent `hello` runs. Returns True without a check if the last check was recent, or
        if no check is possible.
        """
        now_s = self._clock_s()
        if now_s - self._checked_s < ALIVE_CHECK_S:
            return True
        self._checked_s = now_s
        pid = self._ring.pid
        try:
            is_locked_now = hello is not None and hello.locked and is_locked(self._catalog_path)
            if hello is not None and hello.locked and hello.pid_namespace != pid_namespace():
                # The pid of a process in another pid namespace has no meaning here. Only the lock tells.
                return is_locked_now
            if not is_running(pid, self._ring.process_start):
                return False
            # The process may have lost its lock because it became another program (exec), or because it closed all
            # its files. In the second case it still maps the ring.
            return hello is None or not hello.locked or is_locked_now or has_mapped(pid, self._ring_path)
        except OSError:  # No file descriptor is left, so nothing can be checked.
            return True
