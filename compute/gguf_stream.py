"""The bytes of an open GGUF file, with a check that the file has not changed since it was opened."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from cbtop.compute.errors import ModelError
from cbtop.compute.gguf_header import GgufHeader, read_header
from cbtop.protocol.limits import reason

READ_BYTES = 64 << 20  # number of bytes that are read at a time; Ctrl-C takes effect between two reads


class ModelStream(Protocol):
    """The bytes of an open model. The methods raise ModelError if a file cannot be read."""

    @property
    def path(self) -> Path:
        """The path that was given."""

    def close(self) -> None:
        """Close the files."""

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into` with the bytes from `offset` on."""

    def check_unchanged(self) -> None:
        """Raise ModelError if a file has changed since it was opened."""

    def written_to(self) -> ModelError:
        """Return the error for a file that has changed since it was opened."""


@dataclass(frozen=True, slots=True)
class GgufStream:
    """An open file. Its methods raise ModelError if the file cannot be read."""

    path: Path
    _stream: BinaryIO
    _opened: os.stat_result

    @classmethod
    def open(cls, path: Path) -> tuple[GgufStream, GgufHeader]:
        """Open the file at `path` and read its header, with all checks."""
        try:
            if path.is_dir():
                raise ModelError(f"{path} is a directory without config.json; give the path of a .gguf model in it")
            # Refuse a pipe, because opening it would wait until another process writes to it.
            if path.exists() and not path.is_file():
                raise ModelError(f"{path} is not a regular file; give the path of a .gguf model")
            stream = path.open("rb")
        except FileNotFoundError as error:
            raise ModelError(f"{path} does not exist; give the path of a .gguf model") from error
        except (OSError, ValueError) as error:  # open raises ValueError if the path contains a null byte
            raise unreadable(path, error) from error
        try:
            opened = os.fstat(stream.fileno())
            header = read_header(stream, path)
        except OSError as error:
            stream.close()
            raise unreadable(path, error) from error
        except BaseException:
            stream.close()
            raise
        return cls(path, stream, opened), header

    def close(self) -> None:
        self._stream.close()

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into` with the file's bytes from `offset` on."""
        read_exactly(self.path, self._stream, into, offset)

    def check_unchanged(self) -> None:
        """Raise ModelError if the file has changed since it was opened."""
        now = os.fstat(self._stream.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            raise self.written_to()

    def written_to(self) -> ModelError:
        """Return the error for a file that has changed since it was opened."""
        return ModelError(f"{self.path} was written to while it was read; run it again once it is whole")


def read_exactly(path: Path, file: BinaryIO, into: memoryview, offset: int) -> None:
    """Fill `into` with the bytes of an open file from `offset` on. Raises ModelError if it cannot be read."""
    done = 0
    while done < len(into):
        try:
            got = os.preadv(file.fileno(), [into[done : done + READ_BYTES]], offset + done)
        except OSError as error:
            raise unreadable(path, error) from error
        if not got:
            raise ModelError(f"{path} was cut short while it was read; run it again once it is whole")
        done += got


def unreadable(path: Path, error: OSError | ValueError) -> ModelError:
    """Return the error for a file that cannot be read."""
    why = reason(error) if isinstance(error, OSError) else error
    return ModelError(f"{path} cannot be read ({why}); give a readable .gguf model")
