"""The directory for files that can be made again: the demo model, compiled kernels, measured roofs, tuned
settings.
"""

from __future__ import annotations

import io
import os
import stat
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """Return `$XDG_CACHE_HOME/cbtop`, or `~/.cache/cbtop` if that is not set. The directory may not exist yet."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named if os.path.isabs(named) else os.path.expanduser("~/.cache")) / "cbtop"


def bytes_of(path: Path, max_bytes: int) -> bytes | None:
    """Return the content of a file, or None if the file does not exist. Does not wait for a pipe or a device.

    Raises OSError if the file cannot be read, and ValueError if the file is not regular or is larger than
    `max_bytes`.
    """
    if not os.access(path, os.F_OK):
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with io.open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no file")
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes} bytes")
    return text


def replace_whole(path: Path, text: bytes) -> None:
    """Replace a file by renaming a temporary file. A reader gets either the old or the new content.

    Raises OSError.
    """
    descriptor, beside = file_beside(path)
    try:
        with io.open(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def file_beside(path: Path) -> tuple[int, str]:
    """Make a new, empty file of mode 0600 in the directory of `path`. Returns its descriptor and its path."""
    return tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
