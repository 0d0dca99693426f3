from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from cbtop.commands.shared.elf_symbols import MappedFile, exported_symbols, mapped_files
from cbtop.errors import CbtopError

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs the maps of Linux")


def address_of(name: str) -> int:
    """Return the address that the dynamic linker has found."""
    address = ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
    assert address is not None
    return address


@pytest.mark.parametrize("name", ["Py_AddPendingCall", "PyRun_SimpleString", "mmap"])
def test_a_function_is_found_at_the_address_the_linker_gives(name: str) -> None:
    found = set()
    for file in mapped_files(os.getpid()):
        if file.name.startswith(("python", "libpython", "libc.so", "ld-musl")):
            found.add(exported_symbols(file).addresses.get(name))
    assert address_of(name) in found


def test_a_constant_has_the_value_it_has_in_memory() -> None:
    numbers = [
        exported_symbols(file).number("Py_Version")
        for file in mapped_files(os.getpid())
        if file.name.startswith(("python", "libpython")) and file.path.count(".so") + ("/bin/" in file.path)
    ]
    assert sys.hexversion in numbers


def test_a_constant_that_is_not_exported_is_none() -> None:
    file = next(file for file in mapped_files(os.getpid()) if file.name.startswith("libc."))
    assert exported_symbols(file).number("Py_Version") is None


@pytest.mark.parametrize(
    "content", [b"", b"#!/bin/sh\n", b"\x7fELF\x02\x01" + bytes(10), b"\x7fELF\x02\x01" + b"\xff" * 90]
)
def test_a_file_of_another_format_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_bytes(content)
    with pytest.raises(CbtopError, match=f"{path} is not an ELF file"):
        exported_symbols(MappedFile(str(path), path.stat().st_ino, 0))


def test_a_mapped_file_that_was_replaced_on_disk_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_bytes(b"old")
    mapped = MappedFile(str(path), path.stat().st_ino, 0)
    assert not mapped.is_replaced
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "new").rename(path)
    assert mapped.is_replaced
    path.unlink()
    assert mapped.is_replaced
