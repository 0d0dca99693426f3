"""Since when a process has made no progress, and what it is in meanwhile."""

# Progress is a new record or announcement, or a change in its threads: one begins, ends, or is in something else. The
# latter because work in a step without a name leaves no record until it ends.

from __future__ import annotations

from collections.abc import Callable

from cbtop.protocol.messages import Quiet
from cbtop.protocol.ring import NO_NODE, SLOTS
from cbtop.protocol.ring_reader import Batch, InFlight, RingReader

MIN_QUIET_NS = 1_000_000_000  # shorter pauses are not reported
LOOK_NS = 500_000_000  # between looks at the threads of a quiet process


class QuietWatch:
    """Watches one process by its ring. All times are on this host's monotonic clock, which the process shares."""

    def __init__(self, ring: RingReader) -> None:
        self._ring = ring
        self._moved_ns: int | None = None  # its last known progress, except the begin of what runs now
        self._threads: list[InFlight] | None = None  # at the last look; None: something arrived since
        self._looked_ns = -LOOK_NS
        self._version = (0, 0)  # records and messages at the last update
        self._say = False  # whether any of its threads has ever reported what it is in

    def update(self, version: tuple[int, int], batch: Batch, now_ns: int) -> None:
        """Note whether it has made progress since the last update.

        `version` is its number of records and messages, and `batch` its newest records.
        """
        if version != self._version:
            self._version = version
            end_ns = batch.calls().end_ns
            self.recorded(int(end_ns.max()) if len(end_ns) else None, now_ns)
        self.look(now_ns)  # also at first, because it may have been quiet for long

    def recorded(self, ended_ns: int | None, now_ns: int) -> None:
        """Note that something arrived, found at `now_ns`; the newest record ended at `ended_ns`.

        A daemon that starts late learns from that end how long it has been quiet. An end before the known progress or
        in the future is from a different clock or arrived late. Then the arrival counts.
        """
        earliest_ns = self._ring.monotonic_ns if self._moved_ns is None else self._moved_ns
        self._moved_ns = ended_ns if ended_ns is not None and earliest_ns <= ended_ns <= now_ns else now_ns
        self._threads = None

    def look(self, now_ns: int) -> None:
        """Look at what its threads are in, if it has been quiet long enough, or has not reported that before.

        A thread that has ended, for example of a request, has freed its slot.
        """
        if self._moved_ns is None:
            self._moved_ns = now_ns
        is_quiet = now_ns - self._moved_ns >= MIN_QUIET_NS
        if now_ns - self._looked_ns < LOOK_NS or (self._say and not is_quiet):
            return
        self._looked_ns = now_ns
        threads = self._ring.threads()
        self._say = self._say or bool(threads)
        if not is_quiet:
            return
        if self._threads is not None and threads != self._threads:
            self._moved_ns = now_ns
        self._threads = threads

    def quiet(self, now_ns: int, last: int, is_in_step: Callable[[int], bool] = lambda node: True) -> Quiet | None:
        """Return what is known if it has been quiet long enough; `last` is the node of its newest record."""
        if self._threads is None or self._moved_ns is None:
            return None
        inside = [thread for thread in self._threads if thread.node != NO_NODE]
        # If several threads run, the one that began last shows where progress stopped. A thread in a step comes
        # before threads that wait outside steps for a request, because the step is what makes no progress.
        # If its begin is unknown, something in it has ended since, at the last known progress.
        moved_ns = self._moved_ns
        inside.sort(key=lambda thread: self._begun_ns(thread, now_ns) or moved_ns, reverse=True)
        in_steps = [thread for thread in inside if thread.node < 0 or is_in_step(thread.node)]
        newest = next(iter(in_steps or inside), None)
        begun_ns = None if newest is None else self._begun_ns(newest, now_ns)
        quiet_ns = now_ns - max(moved_ns, (inside and self._begun_ns(inside[0], now_ns)) or 0)
        if quiet_ns < MIN_QUIET_NS:
            return None
        return Quiet(
            quiet_ns=quiet_ns,
            in_flight=NO_NODE if newest is None else newest.node,
            in_flight_ns=None if begun_ns is None else now_ns - begun_ns,
            threads=len(inside),
            is_watched=self._say and len(self._threads) < SLOTS,  # if all slots are used, other threads may have none
            last=last,
            in_flight_size=0 if newest is None else newest.size,
        )

    def _begun_ns(self, thread: InFlight, now_ns: int) -> int | None:
        start_ns = thread.start_ns
        return start_ns if start_ns is not None and self._ring.monotonic_ns <= start_ns <= now_ns else None
