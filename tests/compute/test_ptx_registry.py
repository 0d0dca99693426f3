"""Tests of stored PTX: any process can find it by its hash. If there are too many entries, the oldest are removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cbtop.compute import ptx_registry
from cbtop.compute.ptx_registry import PtxRegistry

hash_ptx = PtxRegistry.hash_ptx


def test_what_was_added_is_found_by_its_hash_and_by_no_other(tmp_path: Path) -> None:
    PtxRegistry(tmp_path / "ptx").register("f", b".entry f()")
    other, known = PtxRegistry(tmp_path / "ptx"), hash_ptx(b".entry f()")
    assert other.lookup(known) == ".entry f()"
    assert other.lookup(known + 1) is None
    assert other.hashes() == [known]


def test_of_too_many_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_registry, "MAX_KEPT", 3)
    registry = PtxRegistry(tmp_path)
    hashes = [hash_ptx(b"%d" % number) for number in range(5)]
    for number, one in enumerate(hashes):
        registry.register("f", b"%d" % number)
        os.utime(tmp_path / f"{one:016x}.ptx", (number, number))
    assert registry.hashes() == hashes[:1:-1]


def test_files_of_others_are_neither_listed_nor_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_registry, "MAX_KEPT", 1)
    (tmp_path / "notes.ptx").write_text("mine")
    (tmp_path / f"{0:016x}.ptx").mkdir()
    (tmp_path / f"{1:016x}.ptx").symlink_to(tmp_path / "gone")
    registry = PtxRegistry(tmp_path)
    registry.register("f", b"1")
    registry.register("f", b"2")
    assert (tmp_path / "notes.ptx").exists()
    assert len(registry.hashes()) == 1


def test_what_is_not_what_its_name_says_is_not_found_and_written_anew(tmp_path: Path) -> None:
    registry, known = PtxRegistry(tmp_path), hash_ptx(b".entry f()")
    (tmp_path / f"{known:016x}.ptx").write_bytes(b".entry g()")
    assert registry.lookup(known) is None
    registry.register("f", b".entry f()")
    assert registry.lookup(known) == ".entry f()"


def test_where_nothing_can_be_written_nothing_is_kept_and_nothing_raised(tmp_path: Path) -> None:
    (tmp_path / "ptx").write_text("a file where the folder would be")
    registry = PtxRegistry(tmp_path / "ptx")
    registry.register("f", b"")
    assert registry.lookup(hash_ptx(b"")) is None
    assert registry.hashes() == []


def test_name_and_path_are_found_by_the_hash_that_register_returns(tmp_path: Path) -> None:
    odd = "gemv<\u03b2>\n// .entry g()"
    known = PtxRegistry(tmp_path).register(odd, b"// cbtop\n.entry f()", Path("a b/gemv.cu"))
    other = PtxRegistry(tmp_path)
    assert known == hash_ptx(b"// cbtop\n.entry f()")
    assert (other.lookup_name(known), other.lookup_path(known)) == (odd, Path("a b/gemv.cu"))
    assert other.lookup(known) == "// cbtop\n.entry f()"
    assert (other.lookup_name(known + 1), other.lookup_path(known + 1)) == (None, None)


def test_a_module_without_a_path_has_none(tmp_path: Path) -> None:
    known = PtxRegistry(tmp_path).register("f", b".entry f()")
    assert PtxRegistry(tmp_path).lookup_path(known) is None


@pytest.mark.parametrize(
    "head", [b"", b"// cbtop \n", b"// cbtop {}\n", b"// cbtop [1]\n", b'// cbtop {"name": 1, "path": []}\n',
             b"// cbtop " + b"[" * 100_000 + b"\n"],
    ids=["none", "empty", "no name", "list", "wrong types", "deep"],
)  # fmt: skip
def test_ptx_with_another_first_line_has_no_name_until_it_is_registered(tmp_path: Path, head: bytes) -> None:
    registry, known = PtxRegistry(tmp_path), hash_ptx(b".entry f()")
    (tmp_path / f"{known:016x}.ptx").write_bytes(head + b".entry f()")
    assert registry.lookup(known) == ".entry f()"
    assert (registry.lookup_name(known), registry.lookup_path(known)) == (None, None)
    registry.register("f", b".entry f()")
    assert registry.lookup_name(known) == "f"


def test_the_hash_of_a_ptx_is_the_first_64_bits_of_its_sha256() -> None:
    assert hash_ptx(b"abc") == 0xBA7816BF8F01CFEA  # an example of the standard: FIPS 180-2, appendix B.1
