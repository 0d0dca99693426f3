"""The catalog file beside a ring: append-only frames of what a process has to say once.

A frame is its length (u32), the crc32 of its payload (u32) and the payload, one encoded message. A torn tail
is what a killed process leaves; it is ignored. Past MAX_CATALOG_BYTES the writer counts what it drops.

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
_HEAD = struct.Struct("<II")
_KINDS = get_args(CatalogMessage)


class CatalogWriter:
    """Appends messages to a new catalog file at `path` (mode 0600). Raises RingError when it cannot be made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        self.locked = False
        self._size_bytes = 0
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise RingError(f"catalog {path}: {error.strerror}") from error
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.locked = True

    def write(self, message: CatalogMessage) -> None:
        """Append one message; count it as dropped where the disk or the bound is full."""
        payload = codec.encode(message)
        frame = _HEAD.pack(len(payload), zlib.crc32(payload)) + payload
        if self._size_bytes + len(frame) > MAX_CATALOG_BYTES:
            self.dropped += 1
            return
        try:
            written = os.write(self._descriptor, frame)
        except OSError:  # a full disk is the host's business, not a reason to disturb it
            self.dropped += 1
            return
        self._size_bytes += written
        if written < len(frame):
            os.ftruncate(self._descriptor, self._size_bytes - written)
            self._size_bytes -= written
            self.dropped += 1

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)


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
    """Reads the catalog at `path` from its beginning; remembers where it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read(self) -> list[CatalogMessage]:
        """The complete messages since the last read.

        Raises DecodeError when a frame is broken: nothing behind it can be trusted.
        """
        try:
            # A pipe of that name must not hold us up.
            with open(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                file.seek(self._offset)
                data = file.read(MAX_CATALOG_BYTES + 1 - self._offset)
        except OSError as error:
            raise DecodeError(f"catalog {self.path}: {error.strerror}") from error
        found: list[CatalogMessage] = []
        at = 0
        while len(data) - at >= _HEAD.size:
            length, crc = _HEAD.unpack_from(data, at)
            if length > MAX_CATALOG_FRAME_BYTES:
                raise DecodeError(f"catalog {self.path}: a frame of {length} bytes at {self._offset + at}")
            payload = data[at + _HEAD.size : at + _HEAD.size + length]
            if len(payload) < length:
                break  # not all written yet
            if zlib.crc32(payload) != crc:
                raise DecodeError(f"catalog {self.path}: a damaged frame at {self._offset + at}")
            message = codec.decode(payload)
            if message is not None:
                if not isinstance(message, _KINDS):
                    raise DecodeError(f"catalog {self.path}: {type(message).__name__} has no place there")
                found.append(message)
            at += _HEAD.size + length
        self._offset += at
        return found
