"""Store the PTX of every module that is compiled on this machine. A hash in a brick tree can then be looked up."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from cbtop.compute.cuda.compiler import hash_of
from cbtop.protocol.cache import bytes_of, cache_dir, replace_whole

MAX_BYTES = 1 << 24
MAX_KEPT = 1024


class PtxRegistry:
    """Stores modules as files in a folder of the cache. The name of a file is the hash of its module.

    If there are more than MAX_KEPT files, the oldest are removed.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = cache_dir() / "ptx" if folder is None else folder

    def add(self, ptx: bytes) -> None:
        """Store `ptx`. If the folder cannot be written to, do nothing, because a run does not depend on it."""
        ptx_hash = hash_of(ptx)
        path = self._path(ptx_hash)
        try:
            if self.lookup(ptx_hash) is not None:
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_whole(path, ptx)
            self._forget_oldest()
        except OSError:
            return

    def lookup(self, ptx_hash: int) -> str | None:
        """Return the PTX with this hash, or None if it was not compiled here, was removed, or has changed."""
        try:
            found = bytes_of(self._path(ptx_hash), MAX_BYTES)
        except (OSError, ValueError):
            return None
        return None if found is None or hash_of(found) != ptx_hash else found.decode("utf-8", "replace")

    def hashes(self) -> list[int]:
        """Return the hashes of the stored modules, newest first."""
        return [int(path.stem, 16) for path in reversed(self._files())]

    def _path(self, ptx_hash: int) -> Path:
        return self._folder / f"{ptx_hash:016x}.ptx"

    def _files(self) -> list[Path]:
        """Return the stored files, oldest first. Files that another process removes meanwhile are left out."""
        found = []
        with suppress(OSError):
            for entry in os.scandir(self._folder):
                path = Path(entry.path)
                with suppress(OSError):
                    if path.suffix == ".ptx" and _is_hash(path.stem) and entry.is_file(follow_symlinks=False):
                        found.append((entry.stat(follow_symlinks=False).st_mtime_ns, path))
        return [path for _, path in sorted(found)]

    def _forget_oldest(self) -> None:
        files = self._files()
        for path in files[: max(len(files) - MAX_KEPT, 0)]:
            path.unlink(missing_ok=True)


def _is_hash(text: str) -> bool:
    return len(text) == 16 and all(digit in "0123456789abcdef" for digit in text)
