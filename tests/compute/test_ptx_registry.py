"""PTX is found by its hash, also by another process, until there are too many entries."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cbtop.compute import ptx_registry
from cbtop.compute.cuda.compiler import hash_of
from cbtop.compute.ptx_registry import PtxRegistry


def test_what_was_added_is_found_by_its_hash_and_by_no_other(tmp_path: Path) -> None:
    PtxRegistry(tmp_path / "ptx").add(b".entry f()")
    other, known = PtxRegistry(tmp_path / "ptx"), hash_of(b".entry f()")
    assert other.lookup(known) == ".entry f()"
    assert other.lookup(known + 1) is None
    assert other.hashes() == [known]


def test_of_too_many_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_registry, "MAX_KEPT", 3)
    registry = PtxRegistry(tmp_path)
    hashes = [hash_of(b"%d" % number) for number in range(5)]
    for number, one in enumerate(hashes):
        registry.add(b"%d" % number)
        os.utime(tmp_path / f"{one:016x}.ptx", (number, number))
    assert registry.hashes() == hashes[:1:-1]


def test_files_of_others_are_neither_listed_nor_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_registry, "MAX_KEPT", 1)
    (tmp_path / "notes.ptx").write_text("mine")
    (tmp_path / f"{0:016x}.ptx").mkdir()
    (tmp_path / f"{1:016x}.ptx").symlink_to(tmp_path / "gone")
    registry = PtxRegistry(tmp_path)
    registry.add(b"1")
    registry.add(b"2")
    assert (tmp_path / "notes.ptx").exists()
    assert len(registry.hashes()) == 1


def test_what_is_not_what_its_name_says_is_not_found_and_written_anew(tmp_path: Path) -> None:
    registry, known = PtxRegistry(tmp_path), hash_of(b".entry f()")
    (tmp_path / f"{known:016x}.ptx").write_bytes(b".entry g()")
    assert registry.lookup(known) is None
    registry.add(b".entry f()")
    assert registry.lookup(known) == ".entry f()"


def test_where_nothing_can_be_written_nothing_is_kept_and_nothing_raised(tmp_path: Path) -> None:
    (tmp_path / "ptx").write_text("a file where the folder would be")
    registry = PtxRegistry(tmp_path / "ptx")
    registry.add(b"")
    assert registry.lookup(hash_of(b"")) is None
    assert registry.hashes() == []
