"""The catalog file next to a ring. It contains the messages that a process sends once.

Each message is appended in a frame: the length of the payload (u32), its crc32 (u32) and the payload (the encoded
message). If the process is killed or the disk is full, the last frame may be incomplete. Readers ignore it until the
rest is written. Beyond MAX_CATALOG_BYTES the writer accepts only the goodbye.

A lock (flock(2)) on the file tells whether the writer still runs. A process in any pid namespace can test it. The
kernel releases the lock when the process ends or executes another program. A forked child shares the lock until it
closes its copy of the descriptor. Some systems have no locks, so the field `locked` of the hello says whether there
is one.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from pathlib import Path
from typing import get_args

from cbtop.protocol import codec
from cbtop.protocol.errors import DecodeError, RingError
from cbtop.protocol.filesystem import in_words
from cbtop.protocol.messages import CatalogMessage, Goodbye
from cbtop.protocol.open_file import OpenFile
from cbtop.protocol.signals import reraise_host_error, suppressed

try:
    import fcntl
except ImportError:
    HAS_LOCKS = False
else:
    HAS_LOCKS = True

MAX_CATALOG_BYTES = 64 << 20
_GOODBYE_BYTES = 4096  # bytes reserved for the goodbye; the longest goodbye takes a quarter of them
MAX_CATALOG_FRAME_BYTES = 1 << 20
# Bytes read at a time. This is about a thousand nodes, so a large catalog does not delay the reader.
PIECE_BYTES = 1 << 18
_HEAD = struct.Struct("<II")
_MAX_READ_BYTES = _HEAD.size + MAX_CATALOG_FRAME_BYTES
_KINDS = get_args(CatalogMessage)


class CatalogWriter:
    """Appends messages to a new catalog file at `path` (mode 0600).

    Raises RingError if the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.locked = False
        self.size_bytes = 0  # bytes of all accepted messages, including the messages that are not in the file yet
        self.trouble: OSError | None = None  # why the last write failed; None after a success
        self._waiting = bytearray()  # accepted frames that are not written yet
        self._written_bytes = 0
        self.is_behind = False  # whether `_waiting` contains frames
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise RingError(f"catalog {path}: {in_words(error)}") from error
        try:
            self._file = os.fstat(self._descriptor)
        except OSError as error:
            os.close(self._descriptor)
            raise RingError(f"catalog {path}: {in_words(error)}") from error
        with suppressed(OSError):  # flock fails if the file system does not support locks.
            if HAS_LOCKS:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.locked = True

    def write(self, message: CatalogMessage) -> bool:
        """Append one message. Returns whether the file had room for it."""
        room_bytes = MAX_CATALOG_BYTES if isinstance(message, Goodbye) else MAX_CATALOG_BYTES - _GOODBYE_BYTES
        return self._append(codec.encode(message), room_bytes)

    def write_encoded(self, payload: bytes) -> bool:
        """Append a message that is encoded already and is not a goodbye. Returns whether the file had room for it."""
        return self._append(payload, MAX_CATALOG_BYTES - _GOODBYE_BYTES)

    def _append(self, payload: bytes, room_bytes: int) -> bool:
        """Write `payload` as a frame, unless the file would then exceed `room_bytes`.

        If the disk is full, the frame is written later.
        """
        size_bytes = _HEAD.size + len(payload)
        if len(payload) > MAX_CATALOG_FRAME_BYTES or self.size_bytes + size_bytes > room_bytes:
            return False
        frame = _HEAD.pack(len(payload), zlib.crc32(payload)) + payload
        # The next lines call no function, so no signal handler can run between them. Either all lines are executed,
        # or none.
        self.size_bytes += size_bytes
        self.is_behind = True
        self._waiting += frame
        self.flush()
        return True

    def flush(self) -> bool:
        """Write the frames that wait because the disk was full. Returns True if no frame waits afterwards.

        A signal handler of the host may interrupt the write, and write the same frames or raise an exception. Neither
        does harm: the same bytes are then written again to the same offset.
        """
        self.trouble = None
        if self._waiting:
            try:
                self._reopen()
                begin, frames = self._written_bytes, bytes(self._waiting)
                end = begin + os.pwrite(self._descriptor, frames, begin)
            except OSError as error:  # The disk is full. That must not raise an exception in the host.
                reraise_host_error(error)
                self.trouble = error
            else:
                if end > self._written_bytes:
                    # If a write was incomplete, the rest of the messages still waits.
                    del self._waiting[: end - self._written_bytes]
                    self._written_bytes = end
        self.is_behind = bool(self._waiting)
        return not self.is_behind

    def close(self) -> None:
        """Close the file."""
        if self._is_open():
            # Closing a file on a network file system may write, and so may fail. The descriptor is closed in any
            # case.
            with suppressed(OSError):
                os.close(self._descriptor)

    def _reopen(self) -> None:
        """Open the file again if the descriptor is lost. Raises OSError."""
        if self._is_open():
            return
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            if not os.path.samestat(os.fstat(descriptor), self._file):
                raise FileNotFoundError(errno.ENOENT, "another file has its name", str(self.path))
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _is_open(self) -> bool:
        """Whether the descriptor still refers to our catalog file. If the host becomes a daemon, it closes all
        descriptors.
        """
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._file)
        except OSError as error:
            reraise_host_error(error)
            return False


def is_locked(path: Path) -> bool:
    """Whether the writer of the catalog at `path` still holds the lock. False if the system has no locks.

    Do not call this while the file is new, because the writer may be about to take the lock.
    """
    if not HAS_LOCKS:
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)  # this also releases the lock, if this function has taken it
    return False


class CatalogReader:
    """Reads the catalog at `path` from its beginning, one piece at a time, and remembers its position.

    Raises DecodeError if the catalog does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_behind = False  # whether the file contains messages that `read_piece` has not returned yet
        self._offset = 0
        try:
            self._file = OpenFile(path)
        except OSError as error:
            raise DecodeError(f"catalog {path}: {error.strerror}") from error

    def read(self) -> list[CatalogMessage]:
        """Return the complete messages that were written since the last read.

        Raises DecodeError if a frame is damaged, because nothing after it can be trusted.
        """
        found = self.read_piece()
        while self.is_behind:
            found += self.read_piece()
        return found

    def read_piece(self) -> list[CatalogMessage]:
        """Return the complete messages of the next PIECE_BYTES. Sets `is_behind` to whether there are more.

        Raises DecodeError if a frame is damaged.
        """
        return self._read(PIECE_BYTES)

    def read_first(self) -> list[CatalogMessage]:
        """Return a list with only the message of the next frame. The first frame contains the hello."""
        return self._read(1)

    def _read(self, size_bytes: int) -> list[CatalogMessage]:
        """Return the messages of the frames that begin within the next `size_bytes`."""
        self.is_behind = False
        try:
            if self._file.status_now().st_size == self._offset:
                return []  # Return early, because most reads find nothing new.
            data = self._file.read_at(self._offset, _MAX_READ_BYTES)
        except OSError as error:
            raise DecodeError(f"catalog {self.path}: {error.strerror}") from error
        found: list[CatalogMessage] = []
        at = 0
        while at < size_bytes and len(data) - at >= _HEAD.size:
            length, crc = _HEAD.unpack_from(data, at)
            if length > MAX_CATALOG_FRAME_BYTES:
                raise DecodeError(f"catalog {self.path}: a frame of {length} bytes at {self._offset + at}")
            payload = data[at + _HEAD.size : at + _HEAD.size + length]
            if len(payload) < length:
                # Either the writer has not finished this frame, or the frame continues beyond the bytes that were
                # read.
                break
            if zlib.crc32(payload) != crc:
                raise DecodeError(f"catalog {self.path}: a damaged frame at {self._offset + at}")
            message = codec.decode(payload)
            if message is not None:
                if not isinstance(message, _KINDS):
                    raise DecodeError(f"catalog {self.path}: {type(message).__name__} has no place there")
                found.append(message)
            at += _HEAD.size + length
        self._offset += at
        self.is_behind = 0 < at < len(data) and (at >= size_bytes or len(data) == _MAX_READ_BYTES)
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()
