"""Traces of recorded processes: from the ring and the catalog of one, running or gone, or from a recording."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cbtop.exporters.base import TimedRecord, Trace
from cbtop.profiler.graph.node_table import MAX_NODES, NodeTable
from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.messages import (
    CatalogMessage,
    Dependency,
    HostHello,
    Node,
    RecordBatch,
    SourceCatalog,
    SourceState,
)
from cbtop.protocol.process import process_start
from cbtop.protocol.record_batch import MAX_TALLIES, RecordTally, tally, unpack
from cbtop.protocol.recording import Frame, FrameKind, RecordingReader
from cbtop.protocol.ring import FLAG_FAILED, Batch, RingReader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CHUNK_RECORDS = 4096


def trace_of_files(ring: Path, catalog: Path) -> Trace:
    """What `ring` still holds, and the nodes that `catalog` defines.

    Raises RingError or DecodeError when a file is missing, or not one of ours.
    """
    reader = RingReader(ring)
    gone = process_start(reader.pid) != reader.process_start
    batch = reader.read(final=gone)
    reader.close()
    # After the ring: a node is in the catalog before the first record that names it is in the ring.
    catalog_reader = CatalogReader(catalog)
    messages = catalog_reader.read()
    catalog_reader.close()
    said = _Said(f"catalog {catalog}", reader.pid)
    said.take(messages)
    fit = _fit(batch, said.nodes)
    rejected = len(fit) - int(fit.sum())
    return said.trace(BatchRecords(batch.only(fit)), batch.overwritten, rejected)


def traces_of_recording(reader: RecordingReader) -> dict[str, Trace]:
    """Every process of a recording by its key. What cannot be understood counts as lost on the way."""
    sources: dict[str, _Recorded] = {}
    tallies: dict[str, RecordTally] = {}
    for frame in reader.frames():
        try:
            for message in frame.messages() if frame.kind != FrameKind.INDEX else ():
                known = tally(tallies, message)
                match message:
                    case SourceCatalog() | SourceState() | RecordBatch():
                        if message.source not in sources and len(sources) < MAX_TALLIES:
                            sources[message.source] = _Recorded(message.source)
                        if source := sources.get(message.source):
                            source.take(message, known, frame)
                    case _:
                        pass
        except DecodeError:
            continue
    return {
        key: source.trace(tallies.get(key, RecordTally())) for key, source in sources.items() if source.said.hello
    }


class _Said:
    """What a process has said of itself, as far as exporters ask."""

    def __init__(self, where: str, pid: int = 0) -> None:
        self.where = where
        self.pid = pid
        self.hello: HostHello | None = None
        self.nodes = NodeTable()
        self.dependencies: dict[Dependency, None] = {}

    def take(self, messages: Iterable[CatalogMessage]) -> None:
        """Take in what is new: a keyframe says everything again. Raises DecodeError when a node does not fit."""
        for message in messages:
            match message:
                case HostHello():
                    self.hello, self.pid = message, message.pid
                case Dependency() if len(self.dependencies) < MAX_NODES:
                    self.dependencies[message] = None
                case Node() if message.id > len(self.nodes):
                    try:
                        self.nodes.add(message)
                    except ValueError as error:
                        raise DecodeError(f"{self.where}: {error}") from error
                case _:
                    pass

    def trace(self, records: Iterable[TimedRecord], overwritten: int, rejected: int, missed: int = 0) -> Trace:
        program = self.hello.program if self.hello else f"pid {self.pid}"
        known = [d for d in self.dependencies if max(d.first, d.then) <= len(self.nodes)]
        return Trace(program, self.pid, self.nodes, records, overwritten, rejected, missed, known)


class _Recorded:
    """One process of a recording."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.said = _Said("its catalog")
        self.rejected: tuple[int, int] | None = None  # the least and the most that was told
        self.frames: list[tuple[Frame, list[int]]] = []  # of each batch in it, how many were here before

    def take(self, message: SourceCatalog | SourceState | RecordBatch, known: int, frame: Frame) -> None:
        """Take in a message of this process, which lies in `frame`. Raises DecodeError when a node does not fit."""
        match message:
            case SourceCatalog():
                self.said.take(message.messages)
            case SourceState():
                least, most = self.rejected or (message.rejected, message.rejected)
                self.rejected = min(least, message.rejected), max(most, message.rejected)
            case RecordBatch():
                if not self.frames or self.frames[-1][0] is not frame:
                    self.frames.append((frame, []))
                self.frames[-1][1].append(known)

    def trace(self, books: RecordTally) -> Trace:
        records = PackedRecords(self.key, self.frames, self.said.nodes)
        # A new daemon counts anew what it rejects; the sum of both kinds of loss is known from the batches.
        least, most = self.rejected or (0, 0)
        rejected = min(most - least, books.dropped)
        return self.said.trace(
            records,
            overwritten=books.dropped - rejected,
            rejected=rejected + books.taken - records.count,
            missed=books.missed + (books.before or 0),
        )


def _fit(batch: Batch, nodes: NodeTable) -> NDArray[np.bool_]:
    """Which records name a node and run forward."""
    fit: NDArray[np.bool_] = (batch.node >= 1) & (batch.node <= len(nodes)) & (batch.end_ns >= batch.start_ns)
    return fit


class PackedRecords:
    """A process's records in many frames; they stay deflated, and are unpacked batch by batch as they are walked."""

    def __init__(self, key: str, frames: Sequence[tuple[Frame, Sequence[int]]], nodes: NodeTable) -> None:
        self._key = key
        self._frames = frames
        self._nodes = nodes
        self.count = sum(len(batch.node) for batch in self._unpacked())

    def __iter__(self) -> Iterator[TimedRecord]:
        for batch in self._unpacked():
            yield from BatchRecords(batch)

    def _unpacked(self) -> Iterator[Batch]:
        for frame, known_of in self._frames:
            said = (m for m in frame.messages() if isinstance(m, RecordBatch) and m.source == self._key)
            # By those that were taken: what follows in the frame may be damaged.
            for known, message in zip(known_of, said, strict=False):
                batch = unpack(message)
                fit = _fit(batch, self._nodes)
                fit[:known] = False  # they were here before
                yield batch.only(fit)


class BatchRecords:
    """The records of a batch one at a time, made as they are walked: the batch stays in its columns."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[TimedRecord]:
        batch = self._batch
        columns = (batch.node, batch.start_ns, batch.end_ns, batch.elements, batch.flags & FLAG_FAILED)
        for first in range(0, len(batch.node), CHUNK_RECORDS):
            chunk = (column[first : first + CHUNK_RECORDS].tolist() for column in columns)
            for node, start_ns, end_ns, elements, failed in zip(*chunk, strict=True):
                yield TimedRecord(node, start_ns, end_ns, elements, bool(failed))
