"""Find out how long a process has made no progress, and which bricks its threads are running."""

# A process makes progress if a new record or announcement arrives, or if its threads change: a thread begins, ends,
# or enters a different brick. Threads are watched, because work in a step outside of any brick leaves no record until
# the step ends.

from __future__ import annotations

from collections.abc import Callable

from cbtop.protocol.messages import Quiet
from cbtop.protocol.ring import NO_NODE, SLOTS
from cbtop.protocol.ring_reader import Batch, InFlight, RingReader

# A pause in the progress of a process is reported only if the pause is at least this long (ns).
MIN_QUIET_NS = 1_000_000_000
LOOK_NS = 500_000_000  # The threads of a process without progress are read at this interval (ns).


class QuietWatch:
    """Watches one process through its ring. All times are on the monotonic clock of the host."""

    def __init__(self, ring: RingReader) -> None:
        self._ring = ring
        # Time of the last known progress. The begin of a brick that still runs does not count as progress here.
        self._moved_ns: int | None = None
        # the threads of the process at the last reading; None if new data has arrived since that reading
        self._threads: list[InFlight] | None = None
        self._looked_ns = -LOOK_NS
        self._version = (0, 0)  # (number of records, number of messages) of the process at the last update
        self._say = False  # whether any thread has ever reported its current brick

    def update(self, version: tuple[int, int], batch: Batch, now_ns: int) -> None:
        """Update the time of the last progress.

        `version` is the number of records and the number of messages of the process. `batch` has the newest records
        of the process.
        """
        if version != self._version:
            self._version = version
            end_ns = batch.calls().end_ns
            self.recorded(int(end_ns.max()) if len(end_ns) else None, now_ns)
        # Read the threads already at the first update, because the process may have made no progress for a long time.
        self.look(now_ns)

    def recorded(self, ended_ns: int | None, now_ns: int) -> None:
        """Store the time of the last progress. New data arrived at `now_ns`, and its newest record ended at
        `ended_ns`.

        Usually `ended_ns` is stored as the time of progress. So even a daemon that starts late knows how long the
        process has been quiet. If `ended_ns` is in the future, or before the last known progress, the record has a
        different clock or arrived late. In this case, `now_ns` is stored.
        """
        earliest_ns = self._ring.monotonic_ns if self._moved_ns is None else self._moved_ns
        self._moved_ns = ended_ns if ended_ns is not None and earliest_ns <= ended_ns <= now_ns else now_ns
        self._threads = None

    def look(self, now_ns: int) -> None:
        """Read the threads of the process if it has been quiet for MIN_QUIET_NS, or if no thread has ever reported a
        brick.

        An ended thread, such as the thread of a request, cannot be read, because it has left the ring.
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
        """Return the stall of the process, or None if its last progress is less than MIN_QUIET_NS ago.

        `last` is the id of the newest record's node.
        """
        if self._threads is None or self._moved_ns is None:
            return None
        inside = [thread for thread in self._threads if thread.node != NO_NODE]
        # If several threads run bricks, the stall is shown at the brick that began last. Bricks in a step come first,
        # because a thread outside of steps may only be waiting for a request. A brick with an unknown begin counts as
        # begun at the time of the last known progress.
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
            # If all slots of the ring are used, other threads may run without a slot. The daemon cannot watch such
            # threads.
            is_watched=self._say and len(self._threads) < SLOTS,
            last=last,
            in_flight_size=0 if newest is None else newest.size,
        )

    def _begun_ns(self, thread: InFlight, now_ns: int) -> int | None:
        start_ns = thread.start_ns
        return start_ns if start_ns is not None and self._ring.monotonic_ns <= start_ns <= now_ns else None
