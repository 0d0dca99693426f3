"""Read the kernels of a cubin (an ELF file of machine code for NVIDIA GPUs) without a tool.

A cubin can come from anywhere: each offset and length is checked before it is used. The tags of the section
`.nv.info` are the ones that `cuobjdump -elf` prints.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
MACHINE_CUDA = 190
MAX_SECTIONS = 1 << 16
MAX_KERNELS = 1 << 12
MAX_NAME_BYTES = 1 << 14  # longest name of a kernel; names of C++ templates are long
SYMBOL = struct.Struct("<IBBHQQ")
SECTION = struct.Struct("<IIQQQQIIQQ")
FUNCTION = 2  # symbol kind of a function
STO_CUDA_ENTRY = 0x10  # flag in a symbol's `other`: the function is a kernel
NOBITS = 8
VALUE_IN_BYTES = 4  # form of a `.nv.info` attribute with the value directly after it
ALLOCATED_BARRIERS = 0x4C
REGCOUNT, FRAME_SIZE, MAX_THREADS, REQNTID = 0x2F, 0x11, 0x05, 0x10
# From compute capability 9.0, the driver reserves this much shared memory per block. The cubin counts it as the
# kernel's.
RESERVED_SHARED_BYTES = 1024


class CubinError(ValueError):
    """The bytes are not a cubin, or the cubin is damaged."""


@dataclass(frozen=True, slots=True)
class KernelCode:
    """A kernel in a cubin and its resources. None: the cubin does not tell."""

    name: str
    registers: int | None  # registers per thread
    frame_bytes: int | None  # local memory per thread
    shared_bytes: int  # static shared memory per block, without the driver's part
    constant_bytes: int  # bytes in constant bank 0: the kernel's parameters, and what the driver adds
    barriers: int | None
    max_threads: int | None  # at most this many threads per block, by .maxntid or .reqntid
    required_threads: int | None  # threads per block that .reqntid requires
    code_bytes: int  # bytes of the kernel itself, without functions after it in the same section


@dataclass(frozen=True, slots=True)
class _Symbol:
    name: str  # name of the kernel; "" for any other function
    is_entry: bool
    section: int
    address: int  # address of the function in its section


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


def kernels_of(cubin: bytes) -> tuple[KernelCode, ...]:
    """Return the kernels in a cubin, in the order of its symbols. Raises CubinError."""
    try:
        return _kernels(cubin)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise CubinError(f"damaged cubin: {error}") from error


def is_cubin(content: bytes) -> bool:
    """Return whether the bytes begin like an ELF file of machine code for NVIDIA GPUs."""
    return content[:6] == MAGIC and content[18:20] == MACHINE_CUDA.to_bytes(2, "little")


def _kernels(cubin: bytes) -> tuple[KernelCode, ...]:
    if not is_cubin(cubin):
        raise CubinError("no cubin: expected a 64-bit ELF file for the machine 190 (NVIDIA CUDA)")
    sections = _sections(cubin)
    symbols = _symbols(cubin, sections)
    of_module = dict(_per_symbol(cubin, sections))
    by_name = {section.name: section for section in sections}
    # section -> lowest address of a function in it that is not a kernel
    callees: dict[int, int] = {}
    for symbol in symbols.values():
        if not symbol.is_entry:
            callees[symbol.section] = min(symbol.address, callees.get(symbol.section, symbol.address))
    return tuple(
        _kernel(
            cubin,
            by_name,
            symbol.name,
            {tag: of_module.get((tag, number)) for tag in (REGCOUNT, FRAME_SIZE)},
            callees.get(symbol.section),
        )
        for number, symbol in symbols.items()
        if symbol.is_entry
    )


def _kernel(
    cubin: bytes, sections: dict[str, _Section], name: str, of_module: dict[int, int | None], callee: int | None
) -> KernelCode:
    barriers = None
    threads: dict[int, int] = {}
    info = sections.get(f".nv.info.{name}")
    for tag, value in _entries(cubin, info) if info is not None else ():
        if tag in (MAX_THREADS, REQNTID) and len(value) == 12:
            x, y, z = struct.unpack("<III", value)
            threads[tag] = x * y * z
        elif tag == ALLOCATED_BARRIERS:
            barriers = value[0]
    shared, text = sections.get(f".nv.shared.{name}"), sections.get(f".text.{name}")
    code_bytes = text.size if text is not None else 0
    constant = sections.get(f".nv.constant0.{name}")
    reserved = RESERVED_SHARED_BYTES if ".nv.shared.reserved.0" in sections else 0
    return KernelCode(
        name=name,
        registers=of_module[REGCOUNT],
        frame_bytes=of_module[FRAME_SIZE],
        shared_bytes=max(shared.size - reserved, 0) if shared is not None else 0,
        constant_bytes=constant.size if constant is not None else 0,
        barriers=barriers,
        max_threads=threads.get(REQNTID, threads.get(MAX_THREADS)),
        required_threads=threads.get(REQNTID),
        code_bytes=min(callee, code_bytes) if callee else code_bytes,
    )


def _sections(cubin: bytes) -> list[_Section]:
    (offset,) = struct.unpack_from("<Q", cubin, 40)
    size, number, names = struct.unpack_from("<HHH", cubin, 58)
    if size != SECTION.size or number > MAX_SECTIONS or offset + size * number > len(cubin):
        raise CubinError("damaged cubin: the table of sections is outside of the file")
    headers = [SECTION.unpack_from(cubin, offset + size * place) for place in range(number)]
    for _, kind, _, _, start, length, *_ in headers:
        if kind != NOBITS and start + length > len(cubin):
            raise CubinError("damaged cubin: a section is outside of the file")
    table = headers[names]
    return [
        _Section(_text(cubin, table[4], table[5], name), kind, start, length, link)
        for name, kind, _, _, start, length, link, *_ in headers
    ]


def _symbols(cubin: bytes, sections: list[_Section]) -> dict[int, _Symbol]:
    """Return the functions by their number in the symbol table."""
    table = next((section for section in sections if section.name == ".symtab"), None)
    if table is None or table.kind == NOBITS:
        raise CubinError("damaged cubin: no table of symbols")
    names = sections[table.link]
    if names.kind == NOBITS:
        raise CubinError("damaged cubin: no names of symbols")
    found: dict[int, _Symbol] = {}
    kernels = 0
    for number in range(table.size // SYMBOL.size):
        name, info, other, section, address, _ = SYMBOL.unpack_from(cubin, table.offset + number * SYMBOL.size)
        if info & 15 == FUNCTION:
            is_entry = bool(other & STO_CUDA_ENTRY)
            kernels += is_entry
            if kernels > MAX_KERNELS:
                raise CubinError(f"more than {MAX_KERNELS} kernels")
            text = _text(cubin, names.offset, names.size, name) if is_entry else ""
            found[number] = _Symbol(text, is_entry, section, address)
    return found


def _per_symbol(cubin: bytes, sections: list[_Section]) -> Iterator[tuple[tuple[int, int], int]]:
    """Return the numbers in `.nv.info`, by tag and symbol."""
    for section in sections:
        if section.name == ".nv.info":
            for tag, value in _entries(cubin, section):
                if len(value) == 8:
                    symbol, number = struct.unpack("<II", value)
                    yield (tag, symbol), number


def _entries(cubin: bytes, section: _Section) -> Iterator[tuple[int, bytes]]:
    """Return the tags and values in a section of attributes, such as `.nv.info`."""
    place, end = section.offset, section.offset + (section.size if section.kind != NOBITS else 0)
    while place + 4 <= end:
        form, tag, length = struct.unpack_from("<BBH", cubin, place)
        value = cubin[place + 2 : place + 4]
        place += 4
        if form == VALUE_IN_BYTES:
            value = cubin[place : min(place + length, end)]
            place += length
        yield tag, value


def _text(cubin: bytes, offset: int, size: int, place: int) -> str:
    end = cubin.find(b"\0", offset + place, offset + min(place + MAX_NAME_BYTES, size))
    if end < 0:
        raise CubinError(f"damaged cubin: a name is outside of its table, or longer than {MAX_NAME_BYTES} bytes")
    return cubin[offset + place : end].decode("utf-8")
