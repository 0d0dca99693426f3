"""PTX by its hash: of every module that was compiled on this machine, kept for whoever sees the hash in a tree."""

from __future__ import annotations

import os
from pathlib import Path

from cbtop.protocol.cache import bytes_of, cache_dir, replace_whole

MAX_BYTES = 1 << 24  # of one
MAX_KEPT = 1024


class PtxRegistry:
    """One file each in a folder of the cache, named by the hash; the oldest go when there are more than MAX_KEPT."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = cache_dir() / "ptx" if folder is None else folder

    def add(self, ptx_hash: int, ptx: bytes) -> None:
        """Keep it. Where nothing can be written it is not: a run does not depend on it."""
        path = self._path(ptx_hash)
        try:
            if path.exists():
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_whole(path, ptx)
            self._forget_oldest()
        except OSError:
            return

    def lookup(self, ptx_hash: int) -> str | None:
        """None where it was not compiled on this machine, or is no longer kept."""
        try:
            found = bytes_of(self._path(ptx_hash), MAX_BYTES)
        except (OSError, ValueError):
            return None
        return None if found is None else found.decode("utf-8", "replace")

    def hashes(self) -> list[int]:
        """Those that are kept, newest first."""
        if not self._folder.is_dir():
            return []
        files = sorted(self._files(), key=lambda path: path.stat().st_mtime, reverse=True)
        return [int(path.stem, 16) for path in files]

    def _path(self, ptx_hash: int) -> Path:
        return self._folder / f"{ptx_hash:016x}.ptx"

    def _files(self) -> list[Path]:
        return [path for path in self._folder.glob("*.ptx") if _is_hash(path.stem)]

    def _forget_oldest(self) -> None:
        files = sorted(self._files(), key=lambda path: path.stat().st_mtime)
        for path in files[: max(len(files) - MAX_KEPT, 0)]:
            os.unlink(path)


def _is_hash(text: str) -> bool:
    return len(text) == 16 and all(digit in "0123456789abcdef" for digit in text)
