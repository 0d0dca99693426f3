"""One profiled process in the daemon. Its ring and catalog are read and checked, and its records added up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cbtop.daemon.announced import Announced
from cbtop.daemon.liveness import Liveness
from cbtop.daemon.quiet import QuietWatch
from cbtop.daemon.totals import Totals
from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.errors import DecodeError, RingError
from cbtop.protocol.messages import (
    CatalogMessage,
    HostHello,
    Quiet,
    RecordBatch,
    SourceCatalog,
    SourceState,
    StatsUpdate,
)
from cbtop.protocol.process import is_suspended, pid_namespace
from cbtop.protocol.record_batch import batches, joined
from cbtop.protocol.ring_reader import Batch, RingReader
from cbtop.protocol.vocabulary import SourceStatus

_log = logging.getLogger("cbtop.daemon")

# A source without changes is in one of this many keyframes (twice a minute).
QUIET_ROUNDS = 6
# The longest host name in Linux (HOST_NAME_MAX). A longer one would leave no room for the pid in a source's key.
MAX_HOST_CHARS = 64


class Source:
    """Reads a ring and its catalog, and adds up the records. Errors in these files affect only this source.

    With `on_demand`, only the hello and the number of records of an ended process are read, until `want` requests the
    rest.
    """

    def __init__(
        self, ring_path: Path, clock_s: Callable[[], float] = time.monotonic, *, on_demand: bool = False
    ) -> None:
        self.ring_path = ring_path
        self.state = SourceStatus.LIVE
        self.reason = ""
        self.ended_at_s: float | None = None
        self._announced = Announced()
        self.nodes = self._announced.nodes
        # number of announcements that the process left out of its catalog
        self._left_out_there = 0
        self._totals = Totals()
        self.stats = self._totals.stats
        self._clock_s = clock_s
        self._produced = 0  # number of the ring's next record to count
        self._unread = 0
        self._read_ns = time.perf_counter_ns()  # later records may not be in the statistics yet
        self._quiet_version = (0, 0)  # (number of records, number of messages) of the source at the last keyframe
        self._quiet_rounds = 0  # number of consecutive keyframes without new records or messages
        # Two numbers: of catalog messages, and of consecutive keyframes without a new catalog message.
        self._quiet_catalog = 0, 0
        self._fresh: list[Batch] = []
        self._handed_out = 0  # number of the first record that `records` has not returned yet
        self._is_wanted = False  # whether a viewer has requested the data of this ended process
        self._ring = RingReader(ring_path)
        self._watch = QuietWatch(self._ring)
        try:
            self._catalog_reader = CatalogReader(ring_path.with_suffix(".catalog"))
        except DecodeError:
            self._ring.close()
            raise
        self._liveness = Liveness(self._ring, ring_path, self._catalog_reader.path, clock_s)
        self.is_left_unread = False
        if on_demand:
            self._look_at_what_is_left()

    @property
    def hello(self) -> HostHello | None:
        """The hello: the catalog's first message. None before it is read."""
        return self._announced.hello

    @property
    def key(self) -> str:
        """The key of the source, host:pid:start:serial, which never changes."""
        host = self.hello.host[:MAX_HOST_CHARS] if self.hello else "?"
        return f"{host}:{self.ring_path.stem.replace('-', ':')}"

    def pid_in(self, namespace: int | None) -> int | None:
        """Return the pid of the process if it runs in the pid namespace `namespace`, else None."""
        if self.hello is None or self.state is not SourceStatus.LIVE or self.hello.pid_namespace != namespace:
            return None
        return self.hello.pid

    @property
    def catalog(self) -> list[CatalogMessage]:
        """The valid catalog messages. Replaced messages are left out."""
        return self._announced.messages

    @property
    def is_behind(self) -> bool:
        """Whether the last poll could not read the whole catalog, because it is long. Records are read only after all
        of it.
        """
        return (self.state is SourceStatus.LIVE or self._is_wanted) and self._catalog_reader.is_behind

    def want(self) -> None:
        """Let the next poll read the data of this ended process."""
        if self.is_left_unread:
            self.is_left_unread, self._is_wanted = False, True

    @property
    def is_filling(self) -> bool:
        """Whether the ring may overflow before the next poll."""
        try:
            return self.state is SourceStatus.LIVE and self._ring.is_filling
        except RingError:
            return True  # Poll the ring soon, to report the error.

    def poll(self) -> None:
        """Read all new data of the process. If it violates the protocol, mark the source as `faulty` and stop
        reading.
        """
        if self.state is not SourceStatus.LIVE and not self._is_wanted:
            if self.ended_at_s is None and not self._liveness.is_alive(self.hello):
                self.ended_at_s = self._clock_s()
            return
        try:
            # The hello tells how to check whether the process runs, so read it first.
            self._announced.add(self._catalog_reader.read_piece())
            if self._catalog_reader.is_behind:
                return  # Other sources need not wait: a long catalog takes several polls.
            # Check whether the process runs before reading its ring. If it has ended, this read gets all its records.
            alive = self._liveness.is_alive(self.hello)
            batch = self._read_ring(final=not alive)
            # A node is announced before its first record. So read the catalog after the ring, to know all nodes in
            # `batch`.
            self._announced.add(self._catalog_reader.read())
            self._count(batch)
            self._unread = self._ring.unread
            self._left_out_there = self._ring.left_out
            if self._announced.goodbye is not None:
                # The goodbye comes after the last record, so read the ring to its end.
                self._count(self._read_ring(final=True))
                self._end(SourceStatus.ENDED, self._announced.goodbye.reason)
            elif not alive:
                self._end(SourceStatus.GONE, "no goodbye: it was killed, or left by os._exit or exec")
            else:
                self._watch.update(self.version, batch, self._now_ns())
        except Exception as error:  # noqa: BLE001 - errors provoked by a hostile file affect only its source
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Stop reading this source, because its data caused `error`."""
        _log.debug("%s", self.ring_path, exc_info=error)
        why = "no memory for it" if isinstance(error, MemoryError) else str(error) or type(error).__name__
        self._end(SourceStatus.FAULTY, why)

    def state_message(self) -> SourceState:
        """Return the message with the state of the process and its counters."""
        return SourceState(
            source=self.key,
            state=self.state,
            reason=self.reason,
            produced=self._produced,
            received=self._totals.received,
            overwritten=self._totals.overwritten,
            before_attach=self._totals.before_attach,
            rejected=self._totals.rejected,
            unread=self._unread,
            left_out=self._left_out_there + self._announced.left_out,
            quiet=self._quiet() if self.state is SourceStatus.LIVE else None,
            without_node=self._totals.without_node,
        )

    def delta(self) -> list[SourceCatalog | StatsUpdate | SourceState]:
        """Return the changes since the last call, for viewers that have all earlier data."""
        messages: list[SourceCatalog | StatsUpdate | SourceState] = []
        if changed := self._announced.changes():
            messages.append(SourceCatalog(self.key, complete=False, messages=changed))
        messages += self._totals.changes(self.key, self._read_ns)
        if messages:
            messages.append(self.state_message())
        return messages

    @property
    def waiting(self) -> int:
        """Number of records that `records` will return."""
        return sum(len(batch.node) for batch in self._fresh)

    def records(self) -> list[RecordBatch]:
        """Return the records that were read since the last call, for recorders."""
        produced, first = self._ring.read_to, self._handed_out
        fresh, self._fresh, self._handed_out = joined(self._fresh), [], produced
        return list(batches(self.key, first, produced, fresh)) if produced > first else []

    def pass_over_records(self) -> None:
        """Make the next call of `records` skip all records that were read until now."""
        self._fresh, self._handed_out = [], self._ring.read_to

    def snapshot(self) -> list[SourceCatalog | StatsUpdate | SourceState]:
        """Return all data of the source for a new viewer.

        Keyframes repeat it for viewers that lost messages. While a long catalog is being read, the statistics are
        left out, because a viewer's window begins with the first ones.
        """
        return [
            SourceCatalog(self.key, complete=True, messages=tuple(self.catalog)),
            *(() if self.is_behind or self.is_left_unread else self._totals.everything(self.key, self._read_ns)),
            self.state_message(),
        ]

    def keyframe(self) -> list[SourceCatalog | StatsUpdate | SourceState]:
        """Return the source's data for a keyframe, mostly without unchanged data.

        Unchanged data is repeated in the next two keyframes, and then in one of QUIET_ROUNDS. The catalog and the
        other data are counted separately.
        """
        self._quiet_rounds = self._quiet_rounds + 1 if self.version == self._quiet_version else 0
        self._quiet_version = self.version
        heard, rounds = self._quiet_catalog
        self._quiet_catalog = self._announced.received, rounds + 1 if heard == self._announced.received else 0
        if _is_due(self._quiet_catalog[1]):
            return self.snapshot()
        return self.snapshot()[1:] if _is_due(self._quiet_rounds) else []

    @property
    def version(self) -> tuple[int, int]:
        """The numbers of records and messages that were read. Without a change of these, the snapshot is the same."""
        return self._produced, self._announced.received

    def close(self) -> None:
        """Close the files."""
        self._ring.close()
        self._catalog_reader.close()

    def _now_ns(self) -> int:
        return round(self._clock_s() * 1e9)

    def _quiet(self) -> Quiet | None:
        """Return the stall of the process, or None if it makes progress."""
        last, lane = self._totals.last
        quiet = self._watch.quiet(self._now_ns(), last, self._announced.is_in_step)
        if quiet is None or self.hello is None:
            return quiet
        here = self.hello.pid_namespace == pid_namespace()
        step = int(self.nodes.step_of[last])
        if not quiet.threads and not quiet.is_watched and last != step > 0 and self.stats.running.is_open(step, lane):
            # By the records, this step has begun and not ended. So the process is stalled in this step.
            quiet = replace(quiet, in_flight=step)
        return replace(quiet, is_suspended=here and is_suspended(self.hello.pid))

    def _look_at_what_is_left(self) -> None:
        """Read only the hello and the number of records of an ended process.

        Without a hello in the catalog, mark the source for a complete read.
        """
        try:
            self._announced.add(self._catalog_reader.read_first())
            how = SourceStatus.ENDED if self._ring.is_closed else SourceStatus.GONE
            left = self._ring.produced
        except Exception as error:  # noqa: BLE001 - errors provoked by a hostile file affect only its source
            self.fail(error)
            return
        if self.hello is not None:
            self._end(how, "")
            self._unread, self.is_left_unread = left, True

    def _end(self, state: SourceStatus, reason: str) -> None:
        self.state, self.reason, self._unread, self._is_wanted = state, reason, 0, False
        # The files of ended processes are deleted. A faulty one may still run, so do not mark it as ended.
        if state is not SourceStatus.FAULTY:
            self.ended_at_s = self._clock_s()

    def _read_ring(self, *, final: bool) -> Batch:
        # Reading a full ring takes up to a second, so take the time first. Records written meanwhile come with the
        # next read.
        self._read_ns = time.perf_counter_ns()
        return self._ring.read(final=final)

    def _count(self, batch: Batch) -> None:
        self._produced = self._ring.read_to
        valid = self._totals.sift(batch, self.nodes)
        if len(valid.node):
            self._fresh.append(valid)
            self._totals.add(valid, self.nodes)


def _is_due(quiet_rounds: int) -> bool:
    return quiet_rounds < 2 or quiet_rounds % QUIET_ROUNDS == 0
