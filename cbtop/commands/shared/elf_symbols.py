"""Finds the addresses of exported functions in a running process, from its maps and the ELF files in them."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from cbtop.errors import CbtopError

# The ELF-64 format (elf.h)
X86_64 = 62
HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
LOADED, SYMBOLS = 1, 11  # PT_LOAD, SHT_DYNSYM
CHOSEN_AT_START = 10  # STT_GNU_IFUNC: a function that chooses the real one


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A file that a process has mapped, and the address of its beginning."""

    path: str
    inode: int
    start: int

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def is_replaced(self) -> bool:
        """Whether the file on the disk is not the mapped file any longer."""
        try:
            return os.stat(self.path).st_ino != self.inode
        except OSError:
            return True


def mapped_files(pid: int) -> list[MappedFile]:
    """Return the files that a process has mapped from their beginning. Raises OSError if its maps cannot be read."""
    found: dict[str, MappedFile] = {}
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        span, _, offset, _, inode, *rest = line.split(maxsplit=5)
        if rest and rest[0].startswith("/") and int(offset, 16) == 0:
            path = rest[0]
            found.setdefault(path, MappedFile(path, int(inode), int(span.partition("-")[0], 16)))
    return list(found.values())


@dataclass(frozen=True, slots=True)
class ExportedSymbols:
    """The exported symbols of a mapped ELF file, with their addresses in the process."""

    file: MappedFile
    addresses: dict[str, int]
    bias: int  # an address in the process minus the address in the file
    segments: tuple[tuple[int, int, int], ...]  # (address in the file, offset, size in bytes) of each loaded part

    def number(self, name: str) -> int | None:
        """Return the constant `name` of type unsigned long. None if the file does not export it."""
        address = self.addresses.get(name, 0) - self.bias
        for begin, offset, size_bytes in self.segments:
            if begin <= address < begin + size_bytes:
                with open(self.file.path, "rb") as file:
                    file.seek(offset + address - begin)
                    return int.from_bytes(file.read(8), "little")
        return None


def exported_symbols(file: MappedFile) -> ExportedSymbols:
    """Return the exported symbols of a mapped file. Raises CbtopError if it is not an ELF file for x86-64."""
    content = Path(file.path).read_bytes()
    try:
        return _exported(file, content)
    except (struct.error, IndexError, ValueError, StopIteration) as error:
        raise CbtopError(f"{file.path} is not an ELF file for x86-64") from error


def _exported(file: MappedFile, content: bytes) -> ExportedSymbols:
    ident, _, machine, _, _, program_at, section_at, _, _, _, programs, _, sections, _ = HEADER.unpack_from(content)
    if ident[:6] != b"\x7fELF\x02\x01" or machine != X86_64:
        raise ValueError(file.path)
    loaded = [
        header
        for number in range(programs)
        if (header := PROGRAM_HEADER.unpack_from(content, program_at + number * PROGRAM_HEADER.size))[0] == LOADED
    ]
    # A position-independent file is loaded anywhere. The first loaded part begins with the file's first byte.
    bias = file.start - (loaded[0][3] - loaded[0][2])
    headers = [
        SECTION_HEADER.unpack_from(content, section_at + number * SECTION_HEADER.size) for number in range(sections)
    ]
    table = next(header for header in headers if header[1] == SYMBOLS)
    names_at = headers[table[6]][4]
    found = {}
    for at in range(table[4], table[4] + table[5], SYMBOL.size):
        name_at, info, _, section, value, _ = SYMBOL.unpack_from(content, at)
        if section and info & 0xF != CHOSEN_AT_START:  # section 0: the symbol is imported
            begin = names_at + name_at
            found[content[begin : content.index(b"\0", begin)].decode("ascii", "replace")] = value + bias
    segments = tuple((header[3], header[2], header[5]) for header in loaded)
    return ExportedSymbols(file, found, bias, segments)
