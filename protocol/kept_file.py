"""Measurements of this machine, stored as a list in a JSON file in the user's cache directory.

Rules
- The content of the file is not trusted. Its size, its list and every field are checked as in a message.
- Check that the file exists before opening it. Otherwise an exception would have to be caught inside a host. It could
  keep the host's frames, and the model in these frames, alive until the next garbage collection.
- The file is replaced completely or not at all, and has mode 0600.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from cbtop.protocol.cache import bytes_of, file_beside, replace_whole
from cbtop.protocol.errors import DecodeError, RoofsError

T = TypeVar("T")

MAX_FILE_BYTES = 1 << 20


def read_list(
    path: Path, schema: str, name: str, most: int, read: Callable[[dict[str, Any]], T]
) -> tuple[T, ...] | None:
    """Read the file at `path` and return `read(map)` for each map of its list `name`, or None if there is no file.

    The list may have at most `most` maps. `read` may raise ValueError and DecodeError. Raises RoofsError if the file
    cannot be read.
    """
    try:
        text = bytes_of(path, MAX_FILE_BYTES)
        return None if text is None else _decoded(text, schema, name, most, read)
    except OSError as error:
        raise RoofsError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError, DecodeError) as error:  # json and the UTF-8 decoder raise ValueError
        raise RoofsError(f"{path} holds no {path.stem}: {error}") from error


def write_list(path: Path, schema: str, name: str, maps: Sequence[dict[str, object]]) -> None:
    """Write a file that contains `maps` as the list `name`. The new file replaces the old one. Raises RoofsError."""
    document = {"schema": schema, name: maps}
    with _writing(path):
        replace_whole(path, json.dumps(document, indent=1).encode())


def try_to_write(path: Path) -> None:
    """Raise RoofsError if `write_list` could not write the file. Tests this with a temporary file."""
    with _writing(path):
        descriptor, beside = file_beside(path)
        os.close(descriptor)
        os.unlink(beside)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Make the directory of `path`. An OSError in the `with` block becomes a RoofsError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise RoofsError(f"{error.filename or path}: {error.strerror or error}") from error


def _decoded(text: bytes, schema: str, name: str, most: int, read: Callable[[dict[str, Any]], T]) -> tuple[T, ...]:
    document = json.loads(text)
    if not isinstance(document, dict) or document.get("schema") != schema:
        raise ValueError(f"its schema is not {schema}")
    found = document.get(name)
    if not isinstance(found, list) or len(found) > most:
        raise ValueError(f"a list of at most {most} {name} was wanted")
    if not all(isinstance(one, dict) for one in found):
        raise ValueError(f"one of its {name} is no map")
    return tuple(map(read, found))
