"""Traces of recorded processes: from the ring and the catalog of one, running or gone, or from a recording."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from cbtop.exporters.base import RecordedProcess
from cbtop.exporters.records import Records
from cbtop.profiler.graph.node_table import MAX_NODES, NodeTable
from cbtop.profiler.stats import sane
from cbtop.protocol.announcements import AnnouncedTotal
from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.errors import DecodeError, LimitError
from cbtop.protocol.messages import (
    CatalogMessage,
    Dependency,
    HostHello,
    Node,
    RecordBatch,
    SourceCatalog,
    SourceState,
)
from cbtop.protocol.process import is_running
from cbtop.protocol.record_batch import MAX_TALLIES, RecordTally, tally, unpack
from cbtop.protocol.recording import Frame, FrameKind, RecordingReader
from cbtop.protocol.ring import Batch, RingReader

CHUNK_RECORDS = 1 << 16  # a chunk is full then: of a process that never rests, a few seconds


def process_of_files(ring: Path, catalog: Path) -> RecordedProcess:
    """What `ring` still holds, and the nodes that `catalog` defines.

    Raises RingError or DecodeError when a file is missing, or not one of ours.
    """
    reader = RingReader(ring)
    gone = not is_running(reader.pid, reader.process_start)
    batch = reader.read(final=gone)
    reader.close()
    # After the ring: a node is in the catalog before the first record that names it is in the ring.
    catalog_reader = CatalogReader(catalog)
    messages = catalog_reader.read()
    catalog_reader.close()
    said = _Said(f"catalog {catalog}", reader.pid)
    said.take(messages)
    fit = sane(batch, len(said.nodes))
    rejected = len(fit) - int(fit.sum())
    kept = batch.only(fit)
    return said.recorded(Records([lambda: [kept]]), batch.overwritten, rejected)


def processes_of_recording(reader: RecordingReader) -> dict[str, RecordedProcess]:
    """Every process of a recording by its key. What cannot be understood counts as lost on the way.

    Their records stay in the recording: `reader` has to be open for as long as they are walked. Raises LimitError
    where there is more in them than is kept in memory.
    """
    sources: dict[str, _Recorded] = {}
    tallies: dict[str, RecordTally] = {}
    total = AnnouncedTotal()
    errors = 0
    for frame in reader.frames():
        try:
            for message in frame.messages() if frame.kind != FrameKind.INDEX else ():
                known = tally(tallies, message)
                match message:
                    case SourceCatalog() | SourceState() | RecordBatch():
                        if message.source not in sources and len(sources) < MAX_TALLIES:
                            sources[message.source] = _Recorded(reader, message.source)
                        if source := sources.get(message.source):
                            source.take(message, known, frame, errors)
                            total.set(message.source, source.said.kept())
                    case _:
                        pass
        except LimitError:
            raise
        except DecodeError:
            errors += 1
    return {
        key: source.recorded(tallies.get(key, RecordTally())) for key, source in sources.items() if source.said.hello
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

    def kept(self) -> int:
        """How many announcements are kept."""
        return len(self.nodes) + len(self.dependencies)

    def recorded(self, records: Records, overwritten: int, rejected: int, missed: int = 0) -> RecordedProcess:
        program = self.hello.program if self.hello else f"pid {self.pid}"
        known = [d for d in self.dependencies if max(d.first, d.then) <= len(self.nodes)]
        return RecordedProcess(program, self.pid, self.nodes, records, overwritten, rejected, missed, known)


class _Chunk:
    """A run of batches of one process in a recording: where it begins, how many they are, and what they overlap."""

    def __init__(
        self, reader: RecordingReader, key: str, nodes: NodeTable, frame: Frame, skip: int, errors: int
    ) -> None:
        self.errors = errors  # there were so many frames with errors before
        self.records = 0
        self._reader = reader
        self._key = key
        self._nodes = nodes
        self._offset = frame.offset
        self._skip = skip  # so many batches of its first frame come before it
        self._kinds: set[int] = set()  # of the frames that hold its batches
        self._batches = 0
        self._known: dict[int, int] = {}  # how many of a batch's first records were here before, where any were

    def add(self, batch: RecordBatch, known: int, frame: Frame) -> None:
        self._kinds.add(frame.kind)
        if known:
            self._known[self._batches] = known
        self._batches += 1
        self.records += batch.count

    def __call__(self) -> Iterator[Batch]:
        at = -self._skip
        for frame in self._reader.frames(self._offset, self._kinds):
            try:
                for message in frame.messages():
                    if isinstance(message, RecordBatch) and message.source == self._key:
                        if at >= 0:
                            batch = unpack(message)
                            fit = sane(batch, len(self._nodes))
                            fit[: self._known.get(at, 0)] = False
                            yield batch.only(fit)
                        at += 1
                        if at == self._batches:
                            return
            except DecodeError:
                continue


class _Recorded:
    """One process of a recording."""

    def __init__(self, reader: RecordingReader, key: str) -> None:
        self.said = _Said("its catalog")
        self.rejected: tuple[int, int] | None = None  # the least and the most that was told
        self._reader = reader
        self._key = key
        self._chunks: list[_Chunk] = []
        self._frame_offset = -1  # the frame that held the last batch, and how many it held
        self._in_frame = 0

    def take(self, message: SourceCatalog | SourceState | RecordBatch, known: int, frame: Frame, errors: int) -> None:
        """Take in a message of this process, which lies in `frame`. Raises DecodeError when a node does not fit.

        `errors` is how many frames could not be read to their end so far.
        """
        match message:
            case SourceCatalog():
                self.said.take(message.messages)
            case SourceState():
                least, most = self.rejected or (message.rejected, message.rejected)
                self.rejected = min(least, message.rejected), max(most, message.rejected)
            case RecordBatch():
                if frame.offset != self._frame_offset:
                    self._frame_offset, self._in_frame = frame.offset, 0
                # A chunk ends at an error, so that nothing behind it is counted among its batches.
                last = self._chunks[-1] if self._chunks else None
                if last is None or last.records >= CHUNK_RECORDS or last.errors != errors:
                    nodes = self.said.nodes
                    last = _Chunk(self._reader, self._key, nodes, frame, self._in_frame, errors)
                    self._chunks.append(last)
                last.add(message, known, frame)
                self._in_frame += 1

    def recorded(self, books: RecordTally) -> RecordedProcess:
        records = Records(self._chunks)
        # A new daemon counts anew what it rejects; the sum of both kinds of loss is known from the batches.
        least, most = self.rejected or (0, 0)
        rejected = min(most - least, books.dropped)
        return self.said.recorded(
            records,
            overwritten=books.dropped - rejected,
            rejected=rejected + books.taken - records.read,
            missed=books.missed + (books.before or 0),
        )
