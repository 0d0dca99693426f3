"""Read the records of processes for an export.

The records come from the ring and catalog files of a running or ended process, or from a recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from cbtop.errors import NoDataError, UntrustedError
from cbtop.exporters.base import RecordedProcess
from cbtop.exporters.records import Records
from cbtop.profiler.analysis.graph.node_table import MAX_NODES, NodeTable
from cbtop.profiler.analysis.stats import sane
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
from cbtop.protocol.ring_reader import Batch, RingReader
from cbtop.protocol.serving_messages import ServedRequest

# Number of records in a full chunk. A busy process writes this many records in a few seconds.
CHUNK_RECORDS = 1 << 16


def process_of_files(ring: Path, catalog: Path) -> RecordedProcess:
    """Return the records that are still in `ring`.

    The file `catalog` defines their nodes. Raises RingError or DecodeError if a file is missing or has a different
    format.
    """
    reader = RingReader(ring)
    gone = not is_running(reader.pid, reader.process_start)
    batch = reader.read(final=gone)
    reader.close()
    # Read the catalog after the ring. A process writes a node to the catalog before it writes the node's first record
    # to the ring.
    catalog_reader = CatalogReader(catalog)
    messages = catalog_reader.read()
    catalog_reader.close()
    said = _Said(f"catalog {catalog}", ring.stem, reader.pid)
    said.take(messages)
    fit = sane(batch, len(said.nodes))
    rejected = len(fit) - int(fit.sum())
    kept = batch.only(fit)
    return said.recorded(Records([lambda: [kept]]), batch.overwritten, rejected)


def processes_of_recording(reader: RecordingReader) -> dict[str, RecordedProcess]:
    """Return every process of a recording, by key. Messages that cannot be decoded count as lost on the way.

    The records are read later, so `reader` must stay open until then. Raises LimitError if the metadata of the
    processes exceeds the memory limit.
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


def checked_processes(reader: RecordingReader) -> dict[str, RecordedProcess]:
    """Return every process of a recording, as `processes_of_recording` does.

    Raises NoDataError if the recording has no process, and UntrustedError if frames of the recording cannot be
    decoded.
    """
    try:
        processes = processes_of_recording(reader)
        if not processes:
            _check_frames(reader)
    except DecodeError as error:
        raise UntrustedError(f"{reader.path}: {error}") from error
    if not processes:
        raise NoDataError(f"{reader.path} holds no process")
    return processes


def not_closed(path: str | Path) -> str:
    """Return the text about a recording without an end."""
    return f"{path} was not closed: its recorder was killed or still writes, so the end is missing"


def _check_frames(reader: RecordingReader) -> None:
    """Read all frames of the recording. Raises DecodeError if a frame cannot be decoded."""
    for frame in reader.frames():
        for _ in frame.messages() if frame.kind != FrameKind.INDEX else ():
            pass


class _Said:
    """The announcements of one process. Only announcements that exporters need are stored."""

    def __init__(self, where: str, key: str, pid: int = 0) -> None:
        self.where = where
        self.key = key
        self.pid = pid
        self.hello: HostHello | None = None
        self.nodes = NodeTable()
        self.dependencies: dict[Dependency, None] = {}
        self.requests: dict[int, ServedRequest] = {}

    def take(self, messages: Iterable[CatalogMessage]) -> None:
        """Add announcements of the process. Announcements that a keyframe repeats are ignored. Raises DecodeError if
        a node contradicts earlier nodes.
        """
        for message in messages:
            match message:
                case HostHello():
                    self.hello, self.pid = message, message.pid
                case Dependency() if len(self.dependencies) < MAX_NODES:
                    self.dependencies[message] = None
                case ServedRequest() if message.number in self.requests or len(self.requests) < MAX_NODES:
                    self.requests[message.number] = message
                case Node() if message.id > len(self.nodes):
                    try:
                        self.nodes.add(message)
                    except ValueError as error:
                        raise DecodeError(f"{self.where}: {error}") from error
                case _:
                    pass

    def kept(self) -> int:
        """Return the number of stored announcements."""
        return len(self.nodes) + len(self.dependencies) + len(self.requests)

    def recorded(self, records: Records, overwritten: int, rejected: int, missed: int = 0) -> RecordedProcess:
        program = self.hello.program if self.hello else f"pid {self.pid}"
        known = [d for d in self.dependencies if max(d.first, d.then) <= len(self.nodes)]
        rank = self.hello.rank if self.hello else None
        requests = tuple(self.requests[number] for number in sorted(self.requests))
        return RecordedProcess(
            program, self.pid, self.nodes, records, overwritten, rejected, missed, known, self.key, rank, requests
        )


class _Chunk:
    """A chunk: successive record batches of one process in a recording.

    A chunk stores the position of the first batch, the number of batches, and the number of repeated records.
    """

    def __init__(
        self, reader: RecordingReader, key: str, nodes: NodeTable, frame: Frame, skip: int, errors: int
    ) -> None:
        self.errors = errors  # number of damaged frames in the recording before this chunk
        self.records = 0
        self._reader = reader
        self._key = key
        self._nodes = nodes
        self._offset = frame.offset
        self._skip = skip  # number of batches in the first frame that come before the chunk
        self._kinds: set[int] = set()  # kinds of the frames that contain this chunk's batches
        self._batches = 0
        # Index of a batch with repeated records -> how many records at its begin are already in an earlier batch.
        self._known: dict[int, int] = {}

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
    """One process of a recording, collected while the recording is read."""

    def __init__(self, reader: RecordingReader, key: str) -> None:
        self.said = _Said("its catalog", key)
        # the smallest and the largest count of rejected records in the daemon's reports
        self.rejected: tuple[int, int] | None = None
        self._reader = reader
        self._key = key
        self._chunks: list[_Chunk] = []
        self._frame_offset = -1  # position in the recording of the frame with the last batch
        self._in_frame = 0

    def take(self, message: SourceCatalog | SourceState | RecordBatch, known: int, frame: Frame, errors: int) -> None:
        """Apply a message of this process from `frame`. Raises DecodeError if a node contradicts earlier nodes.

        `errors` is the number of damaged frames before `frame`.
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
                # After a damaged frame begin a new chunk, so that the batches before and after it are not confused.
                last = self._chunks[-1] if self._chunks else None
                if last is None or last.records >= CHUNK_RECORDS or last.errors != errors:
                    nodes = self.said.nodes
                    last = _Chunk(self._reader, self._key, nodes, frame, self._in_frame, errors)
                    self._chunks.append(last)
                last.add(message, known, frame)
                self._in_frame += 1

    def recorded(self, books: RecordTally) -> RecordedProcess:
        records = Records(self._chunks)
        # Record batches only have the total number of lost records. The daemon counts the rejected ones, too. Use the
        # growth of this count, because it begins at 0 again if the daemon restarts.
        least, most = self.rejected or (0, 0)
        rejected = min(most - least, books.dropped)
        return self.said.recorded(
            records,
            overwritten=books.dropped - rejected,
            rejected=rejected + books.taken - records.read,
            missed=books.missed + (books.before or 0),
        )
