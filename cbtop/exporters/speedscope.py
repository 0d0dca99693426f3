"""Export to speedscope's own file format, one evented profile per track.

https://www.speedscope.app/file-format-schema.json describes it. The event `O` opens a frame and `C` closes it. The
times `at` never decrease, and only the frame that was opened last may be closed.

A profile's events must be written together. So records of later tracks go to a temporary file until the first track
is complete.
"""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, TextIO

from cbtop.exporters.base import RecordedProcess
from cbtop.exporters.records import TimedRecord
from cbtop.exporters.tracks import events_of, laid_out
from cbtop.profiler.analysis.graph.nodes import display_name

SCHEMA = "https://www.speedscope.app/file-format-schema.json"
MAX_WAITING = 1 << 16  # At most this many records are in memory, over all tracks except the first.


def write_speedscope(processes: Sequence[RecordedProcess], out: TextIO) -> None:
    """Write every record as a frame. Nodes with the same name share a frame, for example RmsNorm of every layer."""
    frames: dict[str, int] = {}
    for node in (node for recorded in processes for node in recorded.nodes.nodes):
        frames.setdefault(display_name(node), len(frames))
    shared = {"frames": [{"name": name} for name in frames]}
    title = ", ".join(recorded.process for recorded in processes)
    out.write(f'{{"$schema": "{SCHEMA}", "exporter": "cbtop", "name": {json.dumps(title)},\n')
    out.write(f'"shared": {json.dumps(shared)},\n"profiles": [')
    separator = "\n"
    for recorded in processes:
        frame_of = [frames[display_name(node)] for node in recorded.nodes.nodes]
        # With max_size=1, the first write already creates a file on the disk.
        with tempfile.SpooledTemporaryFile(max_size=1) as file:
            beside = _Beside(file)
            out.write(separator)
            _write_profile(f"{recorded.process}, track 1", _first_track(recorded, beside), frame_of, out)
            for number, track in enumerate(beside.tracks(), start=2):
                out.write(",\n")
                _write_profile(f"{recorded.process}, track {number}", track, frame_of, out)
        separator = ",\n"
    out.write("\n]}\n")


def _write_profile(name: str, track: Iterable[TimedRecord], frame_of: Sequence[int], out: TextIO) -> None:
    head = {"type": "evented", "name": name, "unit": "nanoseconds"}
    out.write(f'{json.dumps(head)[:-1]}, "events": [')
    begin_ns: int | None = None
    end_ns = 0
    separator = "\n"
    for opens, record, at_ns in events_of(track):
        frame = frame_of[record.node - 1]
        out.write(f'{separator}{{"type": "{"O" if opens else "C"}", "frame": {frame}, "at": {at_ns}}}')
        separator = ",\n"
        begin_ns = at_ns if begin_ns is None else begin_ns
        end_ns = at_ns
    out.write(f'], "startValue": {begin_ns or 0}, "endValue": {end_ns}}}')


def _first_track(recorded: RecordedProcess, beside: _Beside) -> Iterator[TimedRecord]:
    for track, record in laid_out(recorded):
        if track:
            beside.add(track - 1, record)
        else:
            yield record


class _Beside:
    """The records of all tracks except the first. These records are stored in `file` until they are exported."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        # the records of each track that are still in memory: node, start and end of each record
        self._waiting: list[array[int]] = []
        # for each track: the position of each block of its records in the file, as (offset, size) in bytes
        self._blocks: list[list[tuple[int, int]]] = []
        self._count = 0

    def add(self, track: int, record: TimedRecord) -> None:
        """Store a record of `track`. Tracks must be numbered without gaps."""
        if track == len(self._waiting):
            self._waiting.append(array("q"))
            self._blocks.append([])
        self._waiting[track].extend((record.node, record.start_ns, record.end_ns))
        self._count += 1
        if self._count >= MAX_WAITING:
            self._write()

    def tracks(self) -> Iterator[Iterator[TimedRecord]]:
        """Yield for each track an iterator over its records, in the order of `add`."""
        self._write()
        for blocks in self._blocks:
            yield self._track(blocks)

    def _track(self, blocks: Sequence[tuple[int, int]]) -> Iterator[TimedRecord]:
        for offset, size in blocks:
            self._file.seek(offset)
            block = array("q", self._file.read(size))
            for node, start_ns, end_ns in zip(block[::3], block[1::3], block[2::3], strict=True):
                # Speedscope's format has no field for the number of elements and for failures, so return
                # placeholders.
                yield TimedRecord(node, start_ns, end_ns, elements=0, failed=False)

    def _write(self) -> None:
        for waiting, blocks in zip(self._waiting, self._blocks, strict=True):
            if waiting:
                try:
                    blocks.append((self._file.tell(), len(waiting) * waiting.itemsize))
                    self._file.write(waiting.tobytes())
                # Name the directory of temporary files in the error. Otherwise it would look like an error of the
                # output file.
                except OSError as error:
                    raise OSError(error.errno, error.strerror, tempfile.gettempdir()) from error
                del waiting[:]
        self._count = 0
