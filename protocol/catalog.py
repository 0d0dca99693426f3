"""The catalog file beside a ring: append-only frames of what a process has to say once.

A frame is its length (u32), the crc32 of its payload (u32) and the payload, one encoded message. A torn tail
is what a killed process or a full disk leaves; it is ignored until the rest follows. Past MAX_CATALOG_BYTES the
writer counts what it drops.

The writer locks the file (flock(2)). The kernel lets go of the lock when the process has ended or become another
program, whoever looks, and from whatever pid namespace. A forked child shares the lock until it closes its copy.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import get_args

from cbtop.protocol import codec
from cbtop.protocol.errors import DecodeError, RingError
from cbtop.protocol.messages import CatalogMessage

MAX_CATALOG_BYTES = 64 << 20
MAX_CATALOG_FRAME_BYTES = 1 << 20
PIECE_BYTES = 1 << 18  # what a reader takes at a time: some thousand nodes, so that a vast catalog holds up nobody
_HEAD = struct.Struct("<II")
_MAX_READ_BYTES = _HEAD.size + MAX_CATALOG_FRAME_BYTES
_KINDS = get_args(CatalogMessage)


class CatalogWriter:
    """Appends messages to a new catalog file at `path` (mode 0600). Raises RingError when it cannot be made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        self.locked = False
        self._size_bytes = 0
        self._waiting = bytearray()  # what the disk had no room for
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o600)
            self._file = os.fstat(self._descriptor)
        except OSError as error:
            raise RingError(f"catalog {path}: {error.strerror}") from error
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.locked = True

    def write(self, message: CatalogMessage) -> None:
        """Append one message; count it as dropped past the bound. What a full disk refuses is tried again later."""
        payload = codec.encode(message)
        frame = _HEAD.pack(len(payload), zlib.crc32(payload)) + payload
        if self._size_bytes + len(frame) > MAX_CATALOG_BYTES:
            self.dropped += 1
            return
        self._size_bytes += len(frame)
        self._waiting += frame
        try:
            if not self._is_open():
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            written = os.write(self._descriptor, self._waiting)
        except OSError:  # a full disk is the host's business, not a reason to disturb it
            return
        del self._waiting[:written]  # the rest of a torn frame follows with the next

    def close(self) -> None:
        """Let go of the file."""
        if self._is_open():
            os.close(self._descriptor)

    def _is_open(self) -> bool:
        """Whether the descriptor is still ours: a process that becomes a daemon closes all it finds."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._file)
        except OSError:
            return False


def is_locked(path: Path) -> bool:
    """Whether the writer of the catalog at `path` still holds its lock. Only a file that is not new may be asked."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)  # and with it our own lock
    return False


class CatalogReader:
    """Reads the catalog at `path` from its beginning, a piece at a time; remembers where it was.

    Raises DecodeError when there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_behind = False  # whether there is more than `read_piece` gave
        self._offset = 0
        try:
            # A pipe of that name must not hold us up.
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise DecodeError(f"catalog {path}: {error.strerror}") from error

    def read(self) -> list[CatalogMessage]:
        """The complete messages since the last read.

        Raises DecodeError when a frame is broken: nothing behind it can be trusted.
        """
        found = self.read_piece()
        while self.is_behind:
            found += self.read_piece()
        return found

    def read_piece(self) -> list[CatalogMessage]:
        """The same, of the next PIECE_BYTES; then `is_behind` where there is more. Raises DecodeError as `read`."""
        self.is_behind = False
        try:
            if os.fstat(self._file).st_size == self._offset:
                return []  # most looks find nothing: that should cost little
            data = os.pread(self._file, _MAX_READ_BYTES, self._offset)
        except OSError as error:
            raise DecodeError(f"catalog {self.path}: {error.strerror}") from error
        found: list[CatalogMessage] = []
        at = 0
        while at < PIECE_BYTES and len(data) - at >= _HEAD.size:
            length, crc = _HEAD.unpack_from(data, at)
            if length > MAX_CATALOG_FRAME_BYTES:
                raise DecodeError(f"catalog {self.path}: a frame of {length} bytes at {self._offset + at}")
            payload = data[at + _HEAD.size : at + _HEAD.size + length]
            if len(payload) < length:
                break  # not all written yet, or more than was read
            if zlib.crc32(payload) != crc:
                raise DecodeError(f"catalog {self.path}: a damaged frame at {self._offset + at}")
            message = codec.decode(payload)
            if message is not None:
                if not isinstance(message, _KINDS):
                    raise DecodeError(f"catalog {self.path}: {type(message).__name__} has no place there")
                found.append(message)
            at += _HEAD.size + length
        self._offset += at
        self.is_behind = 0 < at < len(data) and (at >= PIECE_BYTES or len(data) == _MAX_READ_BYTES)
        return found

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)
