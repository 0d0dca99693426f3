"""Find how long a process has made no progress, and which bricks its threads run."""

# A process makes progress if a record or announcement arrives, or if a thread enters or leaves a brick. Threads count
# because work in a step outside of bricks leaves no record until the step ends.

from __future__ import annotations

from collections.abc import Callable

from cbtop.protocol.messages import Quiet
from cbtop.protocol.ring import NO_NODE, SLOTS
from cbtop.protocol.ring_reader import Batch, InFlight, RingReader

# Shorter pauses (ns) in a process's progress are not reported.
MIN_QUIET_NS = 1_000_000_000
LOOK_NS = 500_000_000  # The threads of a process without progress are read this often (ns).


class QuietWatch:
    """Watches one process through its ring. All times are on the monotonic clock of the host."""

    def __init__(self, ring: RingReader) -> None:
        self._ring = ring
        # Time of the last known progress, without the begins of running bricks.
        self._moved_ns: int | None = None
        # the threads at the last reading; None if data has arrived since
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
        # The process may have made no progress for long, so read the threads at the first update.
        self.look(now_ns)

    def recorded(self, ended_ns: int | None, now_ns: int) -> None:
        """Store the time of the last progress. Data arrived at `now_ns`, and its newest record ended at `ended_ns`.

        Usually `ended_ns` is stored, so that even a late daemon knows how long the process was quiet. If it is in the
        future, or before the last progress, the record is late or has another clock. Then `now_ns` is stored.
        """
        earliest_ns = self._ring.monotonic_ns if self._moved_ns is None else self._moved_ns
        self._moved_ns = ended_ns if ended_ns is not None and earliest_ns <= ended_ns <= now_ns else now_ns
        self._threads = None

    def look(self, now_ns: int) -> None:
        """Read the threads if the process has been quiet for MIN_QUIET_NS, or if no thread has ever reported a brick.

        An ended thread, for example of a request, has left the ring.
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
        """Return the stall of the process. None if its last progress is less than MIN_QUIET_NS ago.

        `last` is the node id of the newest record.
        """
        if self._threads is None or self._moved_ns is None:
            return None
        inside = [thread for thread in self._threads if thread.node != NO_NODE]
        # The stall is shown at the brick that began last. Bricks in a step come first, because a thread outside of
        # steps may only wait for a request. A brick with unknown begin counts from the last progress.
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
            # If all slots of the ring are in use, the daemon may not see some threads.
            is_watched=self._say and len(self._threads) < SLOTS,
            last=last,
            in_flight_size=0 if newest is None else newest.size,
        )

    def _begun_ns(self, thread: InFlight, now_ns: int) -> int | None:
        start_ns = thread.start_ns
        return start_ns if start_ns is not None and self._ring.monotonic_ns <= start_ns <= now_ns else None
