"""Finds how long a process has made no progress, and the bricks that its threads are in."""

# Progress is a new record, a new announcement, or a change in the threads: one begins, ends, or enters a different
# brick. Threads are watched because work without a name inside a step leaves no record until the step ends.

from __future__ import annotations

from collections.abc import Callable

from cbtop.protocol.messages import Quiet
from cbtop.protocol.ring import NO_NODE, SLOTS
from cbtop.protocol.ring_reader import Batch, InFlight, RingReader

MIN_QUIET_NS = 1_000_000_000  # shorter pauses are not reported
LOOK_NS = 500_000_000  # time between looks at the threads of a quiet process


class QuietWatch:
    """Watches one process through its ring. All times are on the host's monotonic clock, shared by the process."""

    def __init__(self, ring: RingReader) -> None:
        self._ring = ring
        # time of the last known progress; the begin of a brick that still runs does not count here
        self._moved_ns: int | None = None
        self._threads: list[InFlight] | None = None  # the threads at the last look; None if something arrived since
        self._looked_ns = -LOOK_NS
        self._version = (0, 0)  # numbers of records and messages at the last update
        self._say = False  # whether any thread has ever reported the brick that it is in

    def update(self, version: tuple[int, int], batch: Batch, now_ns: int) -> None:
        """Update the time of the last progress.

        `version` is the process's number of records and messages, and `batch` has its newest records.
        """
        if version != self._version:
            self._version = version
            end_ns = batch.calls().end_ns
            self.recorded(int(end_ns.max()) if len(end_ns) else None, now_ns)
        self.look(now_ns)  # look at the first update, too, because the process may have been quiet for long

    def recorded(self, ended_ns: int | None, now_ns: int) -> None:
        """Note that something arrived by `now_ns`. The newest record ended at `ended_ns`.

        Progress is dated `ended_ns`, so that a daemon that starts late learns how long the process has been quiet. It
        is dated `now_ns` if `ended_ns` is in the future or before the last known progress. Such a record comes from a
        different clock, or arrived late.
        """
        earliest_ns = self._ring.monotonic_ns if self._moved_ns is None else self._moved_ns
        self._moved_ns = ended_ns if ended_ns is not None and earliest_ns <= ended_ns <= now_ns else now_ns
        self._threads = None

    def look(self, now_ns: int) -> None:
        """Look at the threads, if the process has been quiet for MIN_QUIET_NS or none has ever reported a brick.

        A thread that has ended, such as a thread of a request, has freed its slot.
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
        """Return the stall, or None if the process has not been quiet for long. `last` is its newest record's
        node.
        """
        if self._threads is None or self._moved_ns is None:
            return None
        inside = [thread for thread in self._threads if thread.node != NO_NODE]
        # If several threads run, the one that began last shows where progress stopped. Threads in a step come before
        # threads that wait for a request outside steps, because the stalled step matters. A brick with an unknown
        # begin counts from the last known progress, because something inside the brick has ended since.
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
            # if all slots are used, other threads may have none
            is_watched=self._say and len(self._threads) < SLOTS,
            last=last,
            in_flight_size=0 if newest is None else newest.size,
        )

    def _begun_ns(self, thread: InFlight, now_ns: int) -> int | None:
        start_ns = thread.start_ns
        return start_ns if start_ns is not None and self._ring.monotonic_ns <= start_ns <= now_ns else None
