"""One profiled process in the daemon: its ring and catalog are read, checked and added up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from cbtop.daemon.quiet import QuietWatch
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.histograms import MAX_CELLS, Column, distinct
from cbtop.profiler.analysis.node_columns import ANY_STEP, COLUMNS
from cbtop.profiler.analysis.stats import NodeStats, sane
from cbtop.profiler.analysis.step_intervals import MAX_SAID_INTERVALS
from cbtop.protocol import codec
from cbtop.protocol.announcements import Announcements, Key, comes_to_fail, key_of
from cbtop.protocol.catalog import CatalogReader, is_locked
from cbtop.protocol.columns import pack_columns
from cbtop.protocol.errors import DecodeError, RingError
from cbtop.protocol.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    CatalogMessage,
    Goodbye,
    HostHello,
    Node,
    Packed,
    Quiet,
    RecordBatch,
    SourceCatalog,
    SourceState,
    StatsUpdate,
)
from cbtop.protocol.process import has_mapped, is_running, is_suspended, pid_namespace
from cbtop.protocol.record_batch import batches, joined
from cbtop.protocol.ring import LANE_SHIFT, LANES, NO_NODE
from cbtop.protocol.ring_reader import Batch, RingReader
from cbtop.protocol.vocabulary import SourceStatus

_log = logging.getLogger("cbtop.daemon")

ALIVE_CHECK_S = 0.5
QUIET_ROUNDS = 6  # a quiet source is in one keyframe of this many: every half minute at the daemon's pace
MAX_HOST_CHARS = 64  # HOST_NAME_MAX; a longer name would crowd the pid out of the key


class Source:
    """Reads one ring and its catalog, and keeps the totals. Errors in them affect only this source.

    For an ended process, `on_demand` reads only its hello and number of records, and the rest when it is requested.
    """

    def __init__(
        self, ring_path: Path, clock_s: Callable[[], float] = time.monotonic, *, on_demand: bool = False
    ) -> None:
        self.ring_path = ring_path
        self.state = SourceStatus.LIVE
        self.reason = ""
        self.ended_at_s: float | None = None
        self.hello: HostHello | None = None
        self._announced: Announcements[CatalogMessage] = Announcements()
        self._left_out_there = 0  # announcements dropped by the process
        self._left_out = 0  # announcements dropped here for lack of room
        self._changed: dict[Key, CatalogMessage] = {}  # announced since the last publication
        self.stats = NodeStats()
        self._clock_s = clock_s
        self._alive_checked_s = -ALIVE_CHECK_S
        self._nodes = NodeTable()
        self._produced = 0  # records below this number are counted
        self._read_ns = time.perf_counter_ns()  # what ended later is in no statistics
        self._received = self._overwritten = self._before_attach = self._rejected = 0
        self._sequence = self._unread = 0
        self._heard = 0  # messages of the catalog
        self._quiet_version = (0, 0)  # records and messages, at the last keyframe
        self._quiet_rounds = 0  # keyframes since then without news
        self._quiet_catalog = 0, 0  # the same for the catalog: messages, and keyframes without news
        self._goodbye: Goodbye | None = None
        self._changed_nodes: list[Column] = []
        self._changed_cells: list[Column] = []
        self._changed_from_ns: int | None = None  # the records of these changes began no earlier
        self._fresh: list[Batch] = []
        self._handed_out = 0  # the ring's records below this number
        self._last = NO_NODE, 0  # the node of the newest record, and its lane
        self._came = self.version  # records and messages at the last check for arrivals
        self._is_wanted = False  # to be read although it has ended
        self._ring = RingReader(ring_path)
        self._watch = QuietWatch(self._ring)
        try:
            self._catalog_reader = CatalogReader(ring_path.with_suffix(".catalog"))
        except DecodeError:
            self._ring.close()
            raise
        self.is_left_unread = False
        if on_demand:
            self._look_at_what_is_left()

    @property
    def key(self) -> str:
        """host:pid:start:serial, stable for the life of the process."""
        host = self.hello.host[:MAX_HOST_CHARS] if self.hello else "?"
        return f"{host}:{self.ring_path.stem.replace('-', ':')}"

    def pid_in(self, namespace: int | None) -> int | None:
        """Return its pid if it runs and is in that pid namespace."""
        if self.hello is None or self.state is not SourceStatus.LIVE or self.hello.pid_namespace != namespace:
            return None
        return self.hello.pid

    @property
    def catalog(self) -> list[CatalogMessage]:
        """The valid messages of the process; of messages that replace each other, the newest."""
        first = [] if self.hello is None else [self.hello]
        last = [] if self._goodbye is None else [self._goodbye]
        return [*first, *self._nodes.nodes, *self._announced, *last]

    @property
    def is_behind(self) -> bool:
        """Whether the catalog is too long for one poll, and records follow later."""
        return (self.state is SourceStatus.LIVE or self._is_wanted) and self._catalog_reader.is_behind

    def want(self) -> None:
        """Read unread data with the next poll."""
        if self.is_left_unread:
            self.is_left_unread, self._is_wanted = False, True

    @property
    def is_filling(self) -> bool:
        """Whether the ring is filling so fast that the next regular poll may be too late."""
        try:
            return self.state is SourceStatus.LIVE and self._ring.is_filling
        except RingError:
            return True  # the poll will report the error

    def poll(self) -> None:
        """Read what is new. A source that violates the protocol becomes `faulty` and is not read any longer."""
        if self.state is not SourceStatus.LIVE and not self._is_wanted:
            if self.ended_at_s is None and not self._is_alive():
                self.ended_at_s = self._clock_s()
            return
        try:
            self._take_in(self._catalog_reader.read_piece())  # the first message says how to tell that it lives
            if self._catalog_reader.is_behind:
                return  # a long catalog takes several polls, so that other sources need not wait
            alive = self._is_alive()  # asked first: if it is dead now, this read gets everything
            batch = self._read_ring(final=not alive)
            self._take_in(self._catalog_reader.read())  # every node was announced before its records
            self._count(batch)
            self._unread = self._ring.unread
            self._left_out_there = self._ring.left_out
            if self._goodbye is not None:
                # All records before the goodbye are in the ring by now: read it to its end.
                self._count(self._read_ring(final=True))
                self._end(SourceStatus.ENDED, self._goodbye.reason)
            elif not alive:
                self._end(SourceStatus.GONE, "no goodbye: it was killed, or left by os._exit or exec")
            else:
                self._watch_on(batch)
        except Exception as error:  # noqa: BLE001 - whatever a hostile file provokes stays with its source
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Stop reading it, because its data caused `error`."""
        _log.debug("%s", self.ring_path, exc_info=error)
        why = "no memory for it" if isinstance(error, MemoryError) else str(error) or type(error).__name__
        self._end(SourceStatus.FAULTY, why)

    def state_message(self) -> SourceState:
        """Return its state and counters."""
        return SourceState(
            source=self.key,
            state=self.state,
            reason=self.reason,
            produced=self._produced,
            received=self._received,
            overwritten=self._overwritten,
            before_attach=self._before_attach,
            rejected=self._rejected,
            unread=self._unread,
            left_out=self._left_out_there + self._left_out,
            quiet=self._quiet() if self.state is SourceStatus.LIVE else None,
        )

    def delta(self) -> list[SourceCatalog | StatsUpdate | SourceState]:
        """Return what changed since the last call, for viewers that have the rest."""
        messages: list[SourceCatalog | StatsUpdate | SourceState] = []
        if self._changed:
            messages.append(SourceCatalog(self.key, complete=False, messages=tuple(self._changed.values())))
            self._changed.clear()
        if self._changed_nodes:
            node = distinct(np.concatenate(self._changed_nodes))
            cells = distinct(np.concatenate(self._changed_cells))
            messages += self._updates(node, cells, self._changed_from_ns)
            self._changed_from_ns = None
            self._changed_nodes.clear()
            self._changed_cells.clear()
        if messages:
            messages.append(self.state_message())
        return messages

    @property
    def waiting(self) -> int:
        """Number of records that the next call of `records` returns."""
        return sum(len(batch.node) for batch in self._fresh)

    def records(self) -> list[RecordBatch]:
        """Return the records since the last call, for recorders."""
        produced, first = self._ring.read_to, self._handed_out
        fresh, self._fresh, self._handed_out = joined(self._fresh), [], produced
        return list(batches(self.key, first, produced, fresh)) if produced > first else []

    def pass_over_records(self) -> None:
        """Skip the records until now; the next call of `records` returns later ones."""
        self._fresh, self._handed_out = [], self._ring.read_to

    def snapshot(self) -> list[SourceCatalog | StatsUpdate | SourceState]:
        """Return everything known, for a new viewer; as a keyframe, it also repairs one that lost messages.

        While a long catalog is being read, statistics are left out, because a viewer's window begins with them.
        """
        node = self.stats.nodes_with_records()
        return [
            SourceCatalog(self.key, complete=True, messages=tuple(self.catalog)),
            *(() if self.is_behind or self.is_left_unread else self._updates(node, self.stats.all_buckets(), 0)),
            self.state_message(),
        ]

    def keyframe(self) -> list[SourceCatalog | StatsUpdate | SourceState]:
        """Return everything again.

        Unchanged parts (all, or the catalog) are repeated twice, then only occasionally.
        """
        self._quiet_rounds = self._quiet_rounds + 1 if self.version == self._quiet_version else 0
        self._quiet_version = self.version
        heard, rounds = self._quiet_catalog
        self._quiet_catalog = self._heard, rounds + 1 if heard == self._heard else 0
        if _is_due(self._quiet_catalog[1]):
            return self.snapshot()
        return self.snapshot()[1:] if _is_due(self._quiet_rounds) else []

    @property
    def version(self) -> tuple[int, int]:
        """Number of records and messages in its snapshot: nothing has changed while it is equal."""
        return self._produced, self._heard

    def close(self) -> None:
        """Close the files."""
        self._ring.close()
        self._catalog_reader.close()

    def _is_alive(self) -> bool:
        now_s = self._clock_s()
        if now_s - self._alive_checked_s < ALIVE_CHECK_S:
            return True
        self._alive_checked_s = now_s
        pid, hello = self._ring.pid, self.hello
        try:
            is_locked_now = hello is not None and hello.locked and is_locked(self._catalog_reader.path)
            if hello is not None and hello.locked and hello.pid_namespace != pid_namespace():
                return is_locked_now  # its pid does not exist here, or is a different process
            if not is_running(pid, self._ring.process_start):
                return False
            # Without its lock it has become a different program, or has only closed all its files.
            return hello is None or not hello.locked or is_locked_now or has_mapped(pid, self.ring_path)
        except OSError:  # no descriptor left to check
            return True

    def _now_ns(self) -> int:
        return round(self._clock_s() * 1e9)

    def _watch_on(self, batch: Batch) -> None:
        """Note whether it has made progress since the last poll."""
        now_ns = self._now_ns()
        if self.version != self._came:
            self._came = self.version
            end_ns = batch.calls().end_ns
            self._watch.recorded(int(end_ns.max()) if len(end_ns) else None, now_ns)
        self._watch.look(now_ns)  # also at first, because it may have been quiet for long

    def _quiet(self) -> Quiet | None:
        """Return that it makes no progress, and what it is in; None if it does."""
        last, lane = self._last
        quiet = self._watch.quiet(self._now_ns(), last, self._is_in_step)
        if quiet is None or self.hello is None:
            return quiet
        here = self.hello.pid_namespace == pid_namespace()
        step = int(self._nodes.step_of[last])
        if not quiet.threads and not quiet.is_watched and last != step > 0 and self.stats.running.is_open(step, lane):
            quiet = replace(quiet, in_flight=step)  # a step with records, but not its end
        return replace(quiet, is_suspended=here and is_suspended(self.hello.pid))

    def _is_in_step(self, node: int) -> bool:
        return node <= len(self._nodes) and self._nodes.step_of[node] > 0

    def _look_at_what_is_left(self) -> None:
        """Read its hello and its number of records. If it has no hello, it is read like others."""
        try:
            self._take_in(self._catalog_reader.read_first())
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
        if state is not SourceStatus.FAULTY:  # a faulty process may still run, and keeps its files that long
            self.ended_at_s = self._clock_s()

    def _take_in(self, said: list[CatalogMessage]) -> None:
        self._heard += len(said)
        for message in said:
            if (self.hello is None) != isinstance(message, HostHello):
                raise ValueError("the catalog does not begin with one hello")
            key = key_of(message)
            match message:
                case HostHello():
                    if message.protocol_major != PROTOCOL_MAJOR:
                        raise ValueError(
                            f"it records protocol {message.protocol_major}.{message.protocol_minor}, "
                            f"this cbtop reads {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
                        )
                    self.hello = message
                case Node():
                    self._nodes.add(message)
                case Goodbye():
                    self._goodbye = message
                case _:
                    last = comes_to_fail(message, self._announced.get(key))
                    if not self._announced.keep(key, message, len(codec.encode(message)), last=last):
                        self._left_out += 1
                        continue
                    if last:
                        self._changed.pop(key, None)
            self._changed[key] = message

    def _read_ring(self, *, final: bool) -> Batch:
        # Reading a long, full ring takes a second. What ends meanwhile comes with the next read.
        self._read_ns = time.perf_counter_ns()
        return self._ring.read(final=final)

    def _count(self, batch: Batch) -> None:
        self._produced = self._ring.read_to
        self._overwritten += batch.overwritten
        if not self._received and not self._rejected:
            self._before_attach = self._overwritten
        if not len(batch.node):
            return
        good = sane(batch, len(self._nodes))
        self._rejected += int(len(good) - good.sum())
        if not good.all():
            batch = batch.only(good)
        if not len(batch.node):
            return
        self._received += len(batch.node)
        self._fresh.append(batch)
        if len((calls := batch.calls()).node):
            self._last = int(calls.node[-1]), int(calls.flags[-1]) >> LANE_SHIFT & LANES - 1
            first_ns, known_ns = int(calls.start_ns.min()), self._changed_from_ns
            self._changed_from_ns = first_ns if known_ns is None else min(first_ns, known_ns)
        self.stats.grow(len(self._nodes) + 1)
        nodes, cells = self.stats.add(batch, *self._nodes.columns())
        self._changed_nodes.append(nodes)
        self._changed_cells.append(cells)

    def _updates(self, node: Column, cell: Column, ran_from_ns: int | None) -> Iterator[StatsUpdate]:
        """Yield the totals of `node`, the counts of the ascending histogram cells, and when steps ran."""
        yield self._update(node, cell[:MAX_CELLS], ran_from_ns)
        for at in range(MAX_CELLS, len(cell), MAX_CELLS):
            yield self._update(node[:0], cell[at : at + MAX_CELLS], None)

    def _update(self, node: Column, cell: Column, ran_from_ns: int | None) -> StatsUpdate:
        self._sequence += 1
        columns = {name: _bytes(self.stats.column(name)[node]) for name in COLUMNS}
        rare = self.stats.sparse.values_of(node.tolist())
        ran = () if ran_from_ns is None else self.stats.intervals.since(ran_from_ns, MAX_SAID_INTERVALS)
        return StatsUpdate(
            source=self.key,
            sequence=self._sequence,
            monotonic_ns=self._read_ns,
            received=self._received,
            node=_bytes(node),
            cells=Packed(pack_columns((np.diff(cell, prepend=0), self.stats.buckets(cell)))),
            rare_node=_bytes(rare[0]),
            rare_column=_bytes(rare[1]),
            rare_value=rare[2].astype("<f8", copy=False).tobytes(),
            steps_ns=self.stats.sparse["union_ns"].get(ANY_STEP),
            first_ns=self.stats.sparse["first_ns"].get(ANY_STEP),
            ran=Packed(pack_columns(ran) if ran else b""),
            **columns,
        )


def _is_due(quiet_rounds: int) -> bool:
    return quiet_rounds < 2 or quiet_rounds % QUIET_ROUNDS == 0


def _bytes(column: Column) -> bytes:
    return column.astype("<i8", copy=False).tobytes()
