"""Store PTX modules of this machine, so that a hash in a brick tree can be looked up."""

# A stored file is PTX: its first line is a comment with the name and the path, and the registered text follows.

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cbtop.protocol.cache import bytes_of, cache_dir, replace_whole

MAX_BYTES = 1 << 24
MAX_KEPT = 1024
HASH_BYTES = 8  # number of bytes of `ptx_hash`, which are the first bytes of a PTX's digest
HEAD = b"// cbtop "


@dataclass(frozen=True, slots=True)
class _Module:
    name: str | None
    path: Path | None
    ptx: bytes


class PtxRegistry:
    """Stores modules as files in a folder of the cache. The name of a file is the hash of its module.

    If there are more than MAX_KEPT files, the oldest are removed.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = cache_dir() / "ptx" if folder is None else folder

    @staticmethod
    def hash_ptx(ptx: bytes) -> int:
        """Return the hash that identifies a PTX in a catalog and for `cbtop ptx show`: the first 64 bits of SHA-256.

        A lookup checks the hash of a stored file, so the hash should detect any change of the file. The standard
        library has SHA-256 in C: 1 MB takes 0.6 ms, and FNV-1a in Python 390 ms (Zen 4).
        """
        return int.from_bytes(hashlib.sha256(ptx).digest()[:HASH_BYTES], "big")

    def register(self, name: str, ptx: bytes, path: Path | None = None) -> int:
        """Store `ptx` under its hash, with a name and the path of its file or source. Returns the hash.

        A module that is stored already keeps its first name and path. If the folder cannot be written to, nothing is
        stored, and no error is raised, because a run does not depend on it.
        """
        ptx_hash = self.hash_ptx(ptx)
        head = json.dumps({"name": name, "path": None if path is None else str(path)}).encode()
        with suppress(OSError):
            if self.lookup_name(ptx_hash) is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                replace_whole(self._path(ptx_hash), HEAD + head + b"\n" + ptx)
                self._forget_oldest()
        return ptx_hash

    def lookup(self, ptx_hash: int) -> str | None:
        """Return the PTX with this hash, or None if it was not registered here, was removed, or has changed."""
        module = self._module(ptx_hash)
        return None if module is None else module.ptx.decode("utf-8", "replace")

    def lookup_name(self, ptx_hash: int) -> str | None:
        """Return the registered name of the PTX with this hash, or None if it is not known."""
        module = self._module(ptx_hash)
        return None if module is None else module.name

    def lookup_path(self, ptx_hash: int) -> Path | None:
        """Return the registered path of the PTX with this hash, or None if it is not known."""
        module = self._module(ptx_hash)
        return None if module is None else module.path

    def hashes(self) -> list[int]:
        """Return the hashes of the stored modules, newest first."""
        return [int(path.stem, 16) for path in reversed(self._files())]

    def _path(self, ptx_hash: int) -> Path:
        return self._folder / f"{ptx_hash:016x}.ptx"

    def _module(self, ptx_hash: int) -> _Module | None:
        try:
            text = bytes_of(self._path(ptx_hash), MAX_BYTES)
        except (OSError, ValueError):
            return None
        module = None if text is None else _decoded(text)
        return module if module and self.hash_ptx(module.ptx) == ptx_hash else None

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


def _decoded(text: bytes) -> _Module:
    """Return the module in a stored file. Version 0.1.0 stored PTX without a first line of its own."""
    head, _, ptx = text.partition(b"\n")
    if not head.startswith(HEAD):
        return _Module(None, None, text)
    try:
        found = json.loads(head[len(HEAD) :])
    except (ValueError, RecursionError):
        found = None
    known = found if isinstance(found, dict) else {}
    name, path = known.get("name"), known.get("path")
    return _Module(name if isinstance(name, str) else None, Path(path) if isinstance(path, str) else None, ptx)
