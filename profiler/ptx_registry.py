"""PtxRegistry: the PTX of a kernel by the hash that the execution graph keeps of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# http://www.isthe.com/chongo/tech/comp/fnv/ (RFC 9923), 64 bits
FNV_OFFSET_BASIS = 0xCBF29CE484222325
FNV_PRIME = 0x100000001B3
U64_MASK = (1 << 64) - 1


class PtxCollisionError(ValueError):
    """Two PTX texts with one hash: the graph could not tell their kernels apart."""


def hash_ptx(ptx: str) -> int:
    """The FNV-1a hash of the text's UTF-8 bytes, an unsigned 64-bit integer."""
    found = FNV_OFFSET_BASIS
    for byte in ptx.encode():
        found = ((found ^ byte) * FNV_PRIME) & U64_MASK
    return found


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    ptx: str
    path: Path | None


class PtxRegistry:
    """PTX texts with their names and where they were read from, by hash."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, name: str, ptx: str, path: Path | None = None) -> int:
        """Keep `ptx` and give its hash; the same text again takes the new name and path.

        Raises PtxCollisionError when another text has this hash; that one stays.
        """
        found = hash_ptx(ptx)
        known = self._entries.get(found)
        if known is not None and known.ptx != ptx:
            raise PtxCollisionError(
                f"PTX {found:#018x} is {known.name!r} already; the other text, {name!r}, was not registered"
            )
        self._entries[found] = _Entry(name, ptx, path)
        return found

    def lookup(self, ptx_hash: int) -> str | None:
        """The PTX text; None when it was never registered."""
        entry = self._entries.get(ptx_hash)
        return entry.ptx if entry else None

    def lookup_name(self, ptx_hash: int) -> str | None:
        """The name it was registered under."""
        entry = self._entries.get(ptx_hash)
        return entry.name if entry else None

    def lookup_path(self, ptx_hash: int) -> Path | None:
        """The file it was read from; None too where there was none."""
        entry = self._entries.get(ptx_hash)
        return entry.path if entry else None

    def hashes(self) -> list[int]:
        """Every hash, in the order they were first registered."""
        return list(self._entries)
