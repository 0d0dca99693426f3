"""A recording (`.cbtop`): the messages of the wire, frame by frame, in a file.

Layout (little-endian)
    header   magic b"CBTOPREC", protocol major and minor (u16), crc32 of what follows (u32), monotonic and realtime
             ns read together (i64), host (64 bytes of UTF-8, zero-filled); the first three never change
    frames   length of the payload (u32), crc32 of what follows (u32), monotonic ns (i64), kind (u32), payload:
             compressed, a msgpack list of messages that belong together, encoded as on the wire
    range    first and last frame, without messages, if a recording was cut out of a longer one: their
             times are those of the range, and the frames before it lead up to it
    index    last frame of a recording that was closed: the times and offsets of its keyframes
    footer   offset of the index (u64), magic b"CBTOPIDX"

Rules
- A frame is appended by one write. So if the process is killed, at most the last frame is lost, and the index is
  missing. The reader then goes through all frames to find the keyframes.
- The file is damaged if a frame's head is invalid, or if the frames do not end where the footer says. The rest of a
  damaged file is not read.
- A keyframe contains the complete state. To show a moment, read the last keyframe before it and all frames from
  there.
- Payloads are compressed; see compression.py.
- A recording of a newer minor version can be read, because frames and messages of an unknown kind are skipped. A
  different major version is refused.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgpack

from cbtop.protocol import codec
from cbtop.protocol.compression import ERRORS, MAX_PAYLOAD_BYTES, compressed, decompressed
from cbtop.protocol.errors import DecodeError, RecordingError, VersionError
from cbtop.protocol.limits import file_limit, reason
from cbtop.protocol.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Message
from cbtop.protocol.open_file import OpenFile

MAGIC = b"CBTOPREC"
INDEX_MAGIC = b"CBTOPIDX"
SUFFIX = ".cbtop"
MAX_MESSAGES = 4_096  # messages per frame
MAX_KIND = 255  # the highest number of a kind of frame, in any version of the format
# Number of keyframes in the index: two months with one every five seconds. To show a later moment, read on from the
# last keyframe in the index.
MAX_KEYFRAMES = 1 << 20
MAX_REALTIME_NS = 253_402_300_799_000_000_000  # the end of the year 9999, in ns since 1970
# O_NONBLOCK: if the path is a pipe, do not wait for its reader.
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
HEADER = struct.Struct("<8sHHIqq64s")
FRAME_HEAD = struct.Struct("<IIqI")
_TIME_AND_KIND = struct.Struct("<qI")
_ENTRY = struct.Struct("<qq")
_FOOTER = struct.Struct("<Q8s")


class FrameKind(IntEnum):
    """The kind of a frame's content."""

    LIVE = 0  # messages that are sent to every viewer
    KEYFRAME = 1  # the complete state: a daemon's hello and everything that the daemon knows
    RECORDS = 2  # record batches
    INDEX = 3
    RANGE = 4  # marks the first and the last frame if the user cut this recording out of a longer one


@dataclass(frozen=True, slots=True)
class RecordingOrigin:
    """The host and the time of a recording. `monotonic_ns` and `realtime_ns` were read at the same time."""

    host: str
    monotonic_ns: int
    realtime_ns: int


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. Its payload is not decoded yet."""

    kind: int
    time_ns: int
    offset: int
    payload: bytes

    def messages(self, decode: Callable[[bytes], Message | None] = codec.decode) -> Iterator[Message]:
        """Yield the messages of the frame, one at a time.

        Raises DecodeError at the first part that is not a message.
        """
        for part in self._parts():
            if (message := decode(part)) is not None:
                yield message

    def _parts(self) -> Iterator[bytes]:
        # The payload must be one list of byte strings, without lists inside. Nested lists could take much more memory
        # than the frame.
        unpacker = msgpack.Unpacker(
            max_buffer_size=MAX_PAYLOAD_BYTES, max_bin_len=codec.MAX_FRAME_BYTES, max_array_len=0, max_map_len=0,
            max_str_len=0, max_ext_len=0,
        )  # fmt: skip
        pieces, fed_bytes = decompressed(self.payload), 0

        def unpacked(unpack: Callable[[], Any]) -> Any:
            nonlocal fed_bytes
            while True:
                try:
                    return unpack()
                except msgpack.OutOfData:
                    if not (piece := next(pieces, b"")):
                        raise
                    fed_bytes += len(piece)
                    unpacker.feed(piece)

        try:
            count = unpacked(unpacker.read_array_header)
            if count > MAX_MESSAGES:
                raise DecodeError(f"a frame of {count} messages; at most {MAX_MESSAGES} are taken")
            for _ in range(count):
                part = unpacked(unpacker.unpack)
                if type(part) is not bytes:
                    raise DecodeError("a frame that holds something else than messages")
                yield part
            behind = fed_bytes - unpacker.tell() + sum(map(len, pieces))
            if behind:
                raise DecodeError(f"a frame with {behind} bytes behind its messages")
        except (*ERRORS, ValueError, msgpack.UnpackException) as error:
            raise DecodeError(f"a frame that holds no messages: {error}") from error


def encode_frame(kind: FrameKind, time_ns: int, messages: Iterable[bytes]) -> bytes:
    """Return a frame of encoded `messages`. Only one message at a time is in memory.

    The payload begins with the number of messages, which is known only at the end. So that number has a zstd frame of
    its own.
    """
    packer, count = msgpack.Packer(use_bin_type=True), 0

    def packed() -> Iterator[bytes]:
        nonlocal count
        for message in messages:
            count += 1
            yield packer.pack(message)

    parts = compressed(packed())
    return frame_bytes(kind, time_ns, compressed([packer.pack_array_header(count)]) + parts)


def frame_bytes(kind: int, time_ns: int, payload: bytes) -> bytes:
    """Return a frame with `payload`, which is compressed already."""
    rest = _TIME_AND_KIND.pack(time_ns, kind)
    return struct.pack("<II", len(payload), zlib.crc32(payload, zlib.crc32(rest))) + rest + payload


class RecordingWriter:
    """Writes a new recording at `path` (mode 0600), of at most `max_bytes` plus an index.

    Raises RecordingError if the file exists (unless `overwrite`) or cannot be created.
    """

    def __init__(self, path: Path, origin: RecordingOrigin, max_bytes: int, *, overwrite: bool = False) -> None:
        self.path = path
        self.size_bytes = 0
        self._max_bytes = max_bytes
        self._keyframes: list[tuple[int, int]] = []
        self._last_ns = origin.monotonic_ns
        how = os.O_TRUNC if overwrite else os.O_EXCL
        try:
            self._file = os.open(path, _WRITE | how, 0o600)
        except FileExistsError as error:
            raise RecordingError(f"{path} exists; pass --force to overwrite it") from error
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            os.close(self._file)
            raise RecordingError(f"{path}: not a regular file")
        os.fchmod(self._file, 0o600)
        host = origin.host.encode("utf-8", "replace")[:64].ljust(64, b"\0")
        rest = struct.pack("<qq64s", origin.monotonic_ns, origin.realtime_ns, host)
        try:
            self._write(struct.pack("<8sHHI", MAGIC, PROTOCOL_MAJOR, PROTOCOL_MINOR, zlib.crc32(rest)) + rest)
        except RecordingError:
            os.close(self._file)
            path.unlink()
            raise

    def append(self, frame: bytes) -> bool:
        """Append one frame. Returns False, without writing, if the file would become larger than allowed.

        Raises DecodeError if `frame` is not a valid frame, and RecordingError if writing fails. After an error, the
        file is as before.
        """
        length, crc, time_ns, kind = FRAME_HEAD.unpack_from(frame) if len(frame) >= FRAME_HEAD.size else (-1, 0, 0, 0)
        if length != len(frame) - FRAME_HEAD.size or zlib.crc32(memoryview(frame)[8:]) != crc:
            raise DecodeError(f"a damaged frame of {len(frame)} bytes")
        if self.size_bytes + len(frame) > self._max_bytes or length > MAX_PAYLOAD_BYTES:
            return False
        offset = self.size_bytes
        self._write(frame)
        self._last_ns = time_ns
        if kind == FrameKind.KEYFRAME:
            self._keyframes.append((time_ns, offset))
        return True

    def close(self) -> None:
        """Write the index and close the file. A file without room for the index can still be read."""
        entries = (*self._keyframes, (self._last_ns, self.size_bytes))
        payload = b"".join(_ENTRY.pack(*entry) for entry in entries)
        offset = self.size_bytes
        try:
            self._write(frame_bytes(FrameKind.INDEX, self._last_ns, payload) + _FOOTER.pack(offset, INDEX_MAGIC))
        except RecordingError:
            return
        finally:
            os.close(self._file)

    def _write(self, data: bytes) -> None:
        try:
            written = os.write(self._file, data)
            if written < len(data):
                os.ftruncate(self._file, self.size_bytes)
                raise RecordingError(
                    f"{self.path}: no room for more{file_limit()}; it ends after {self.size_bytes} bytes"
                )
        except OSError as error:
            raise RecordingError(f"{self.path}: {reason(error)}; it ends after {self.size_bytes} bytes") from error
        self.size_bytes += written


class RecordingReader:
    """Reads the recording at `path`, which may still be written. Reads what the file contains when it is opened.

    Raises RecordingError if the file is not a recording or cannot be read, and VersionError if its major version
    differs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._damaged: set[int] = set()  # offsets of the frames with a wrong checksum
        try:
            self._file = OpenFile(path)
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror}") from error
        try:
            if not stat.S_ISREG(self._file.status.st_mode):
                raise RecordingError(f"{path}: not a regular file")
            self._size = self._file.status.st_size
            self.version, self.origin = self._header()
            self._index_at = self._footer()
            self.is_closed = self._index_at is not None
            self.keyframes, self.end_ns, self._end = self._index() or self._scan()
        except BaseException:
            self._file.close()
            raise
        self.begin_ns = self.keyframes[0][0] if self.keyframes else self.end_ns
        length, _, time_ns, kind = self._head(HEADER.size)
        is_range = length >= 0 and kind == FrameKind.RANGE and self.begin_ns <= time_ns <= self.end_ns
        self.range_from_ns = time_ns if is_range else None

    def duplicate(self) -> RecordingReader:
        """Return a second reader of the same file, even if the file no longer has a name."""
        other = copy(self)
        other._file, other._damaged = self._file.duplicate(), set()
        return other

    @property
    def damaged(self) -> int:
        """Number of skipped frames. A frame is skipped if it is damaged or its position is not known."""
        return len(self._damaged)

    def frames(self, offset: int = 0, wanted: Collection[int] | None = None) -> Iterator[Frame]:
        """Yield the frames of the `wanted` kinds from `offset` on (0: from the first). Other frames are not read."""
        at = max(offset, HEADER.size)
        while at + FRAME_HEAD.size <= self._end:
            length, crc, time_ns, kind = self._head(at)
            if not 0 <= length <= min(MAX_PAYLOAD_BYTES, self._end - at - FRAME_HEAD.size):
                # The head of this frame is damaged, so its length and the position of the next frame are not known.
                self._damaged.add(at)
                return
            if wanted is None or kind in wanted:
                payload = self._read(length, at + FRAME_HEAD.size)
                if zlib.crc32(payload, zlib.crc32(_TIME_AND_KIND.pack(time_ns, kind))) == crc:
                    yield Frame(kind, time_ns, at, payload)
                else:
                    self._damaged.add(at)
            at += FRAME_HEAD.size + length

    def keyframe_before(self, time_ns: int) -> int:
        """Return the offset of the last keyframe at or before `time_ns`.

        Returns the offset of the first frame if there is no such keyframe.
        """
        before = [offset for at_ns, offset in self.keyframes if at_ns <= time_ns]
        return before[-1] if before else HEADER.size

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self, size: int, at: int) -> bytes:
        try:
            return self._file.read_at(at, size)
        except OSError as error:
            raise RecordingError(f"{self.path}: {error.strerror}") from error

    def _head(self, at: int) -> tuple[int, int, int, int]:
        """Return the head of the frame at `at`.

        The length is -1 if the file ends there or contains only zeros there.
        """
        data = self._read(FRAME_HEAD.size, at)
        if len(data) < FRAME_HEAD.size or not any(data):  # A sparse file can contain terabytes of zeros.
            return -1, 0, 0, 0
        length, crc, time_ns, kind = FRAME_HEAD.unpack(data)
        return length, crc, time_ns, kind

    def _header(self) -> tuple[str, RecordingOrigin]:
        data = self._read(HEADER.size, 0)
        if len(data) < HEADER.size or data[: len(MAGIC)] != MAGIC:
            raise RecordingError(f"{self.path} is not a recording of cbtop; pass a file of `cbtop run --record`")
        _, major, minor, crc, monotonic_ns, realtime_ns, host = HEADER.unpack(data)
        if major != PROTOCOL_MAJOR:
            raise VersionError(
                f"{self.path} is of protocol {major}.{minor}, this cbtop reads {PROTOCOL_MAJOR}.x: "
                "open it with the cbtop that recorded it"
            )
        if zlib.crc32(data[HEADER.size - 80 :]) != crc or not 0 <= realtime_ns <= MAX_REALTIME_NS:
            raise RecordingError(f"{self.path}: its header is damaged")
        name = codec.sanitise(host.rstrip(b"\0").decode("utf-8", "replace"))
        return f"{major}.{minor}", RecordingOrigin(name, monotonic_ns, realtime_ns)

    def _footer(self) -> int | None:
        """Return the offset of the index, as stored in the footer. Returns None if the recording was not closed."""
        at = self._size - _FOOTER.size
        if at < HEADER.size:
            return None
        offset, magic = _FOOTER.unpack(self._read(_FOOTER.size, at).ljust(_FOOTER.size, b"\0"))
        return offset if magic == INDEX_MAGIC else None

    def _index(self) -> tuple[tuple[tuple[int, int], ...], int, int] | None:
        """Return the keyframes, the time of the last frame, and the offset after all frames.

        Returns None if the recording has no valid index.
        """
        at, offset = self._size - _FOOTER.size, self._index_at
        if offset is None or not HEADER.size <= offset <= at - FRAME_HEAD.size:
            return None
        self._end = at
        frame = next(self.frames(offset, (FrameKind.INDEX,)), None)
        if frame is None or len(frame.payload) % _ENTRY.size:
            return None
        if not _ENTRY.size <= len(frame.payload) <= _ENTRY.size * (MAX_KEYFRAMES + 1):
            return None
        *keyframes, (end_ns, end) = _ENTRY.iter_unpack(frame.payload)
        if end != offset or not all(self._is_keyframe(time_ns, where, end) for time_ns, where in keyframes):
            return None
        return tuple(keyframes), end_ns, end

    def _is_keyframe(self, time_ns: int, at: int, end: int) -> bool:
        return HEADER.size <= at <= end - FRAME_HEAD.size and self._head(at)[2:] == (time_ns, FrameKind.KEYFRAME)

    def _scan(self) -> tuple[tuple[tuple[int, int], ...], int, int]:
        """Go through all frames, and return the same as `_index`.

        Skips a last frame that was not written completely.
        """
        # Forget the damaged frames that were found while the index was read. If the index is invalid, they may be
        # intact.
        self._damaged.clear()
        keyframes: list[tuple[int, int]] = []
        at = last = HEADER.size
        end_ns = before_ns = self.origin.monotonic_ns
        is_damaged = False
        while at + FRAME_HEAD.size <= self._size:
            length, _, time_ns, kind = self._head(at)
            if not 0 <= length <= min(MAX_PAYLOAD_BYTES, self._size - at - FRAME_HEAD.size):
                is_damaged = length > MAX_PAYLOAD_BYTES or kind > MAX_KIND
                break
            if kind == FrameKind.KEYFRAME and len(keyframes) < MAX_KEYFRAMES:
                keyframes.append((time_ns, at))
            last, before_ns, end_ns = at, end_ns, time_ns
            at += FRAME_HEAD.size + length
        self._end = stopped = at
        if at > last and next(self.frames(last), None) is None:
            # An incomplete last frame does not count as damage, because the process was killed while it wrote.
            self._damaged.clear()
            keyframes = [entry for entry in keyframes if entry[1] != last]
            at, end_ns = last, before_ns
        if is_damaged if self._index_at is None else self._index_at not in (last, stopped):
            self._damaged.add(stopped)
        return tuple(keyframes), end_ns, at
