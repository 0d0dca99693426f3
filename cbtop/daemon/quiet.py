"""Since when a process has not gone on, and what it is in meanwhile."""

# It goes on when a record or an announcement comes, or when one of its threads begins, ends or is in something else
# than before: what runs in a step that has no name yet leaves no record until it ends.

from __future__ import annotations

from collections.abc import Callable

from cbtop.protocol.messages import Quiet
from cbtop.protocol.ring import NO_NODE, SLOTS, InFlight, RingReader

MIN_QUIET_NS = 1_000_000_000  # of less nothing is said
LOOK_NS = 500_000_000  # at the threads of one that is quiet


class QuietWatch:
    """Watches one process by its ring. All times are of the monotonic clock of this host, which is the process's."""

    def __init__(self, ring: RingReader) -> None:
        self._ring = ring
        self._moved_ns: int | None = None  # when it was last seen to go on, other than to begin what runs now
        self._threads: list[InFlight] | None = None  # as they were at the last look; None: since then something came
        self._looked_ns = -LOOK_NS
        self._say = False  # whether any of its threads was ever seen to say what it is in

    def recorded(self, ended_ns: int | None, now_ns: int) -> None:
        """Something came, which a look at `now_ns` found; of records the newest ended at `ended_ns`.

        Who comes late learns from that end how long it has been quiet. An end that lies before what is known or in
        the future is not of this clock, or was told late: then what counts is that something came.
        """
        earliest_ns = self._ring.monotonic_ns if self._moved_ns is None else self._moved_ns
        self._moved_ns = ended_ns if ended_ns is not None and earliest_ns <= ended_ns <= now_ns else now_ns
        self._threads = None

    def look(self, now_ns: int) -> None:
        """See what its threads are in, where it has been quiet for long enough; and before, whether they say it.

        One that has ended, as that of a request does, has given its slot back.
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
        """What is known, where it has been quiet for long enough; `last` is the node of its newest record."""
        if self._threads is None or self._moved_ns is None:
            return None
        inside = [thread for thread in self._threads if thread.node != NO_NODE]
        # Of several the one that began last is what it went on with, and then no more. One that is in a step comes
        # before those that wait outside of all steps, for a request: the step does not go on.
        # Where it is not known when, something in it has ended since: that is when the process was last seen to move.
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
            is_watched=self._say and len(self._threads) < SLOTS,  # there are no more slots: others may have none
            last=last,
        )

    def _begun_ns(self, thread: InFlight, now_ns: int) -> int | None:
        start_ns = thread.start_ns
        return start_ns if start_ns is not None and self._ring.monotonic_ns <= start_ns <= now_ns else None
