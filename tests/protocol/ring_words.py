"""Writes single words into the file of a ring, to simulate damage."""

from __future__ import annotations

import struct
from pathlib import Path

from cbtop.protocol.ring import FIRST_SLOT_WORD, SLOT_WORDS


def write_slot(path: Path, slot: int, *words: int) -> None:
    for index, word in enumerate(words):
        overwrite(path, 8 * (FIRST_SLOT_WORD + slot * SLOT_WORDS + index), word)


def overwrite(path: Path, at: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<q", value))
