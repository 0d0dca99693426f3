"""PTX is found again by its hash, by another process, until it is one of too many."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cbtop.compute import ptx_registry
from cbtop.compute.ptx_registry import PtxRegistry


def test_what_was_added_is_found_by_its_hash_and_by_no_other(tmp_path: Path) -> None:
    PtxRegistry(tmp_path / "ptx").add(0xDC4A, b".entry f()")
    other = PtxRegistry(tmp_path / "ptx")
    assert other.lookup(0xDC4A) == ".entry f()"
    assert other.lookup(0xDC4B) is None
    assert other.hashes() == [0xDC4A]


def test_of_too_many_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_registry, "MAX_KEPT", 3)
    registry = PtxRegistry(tmp_path)
    for number in range(5):
        registry.add(number, b"")
        os.utime(tmp_path / f"{number:016x}.ptx", (number, number))
    assert registry.hashes() == [4, 3, 2]


def test_files_of_others_are_neither_listed_nor_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_registry, "MAX_KEPT", 1)
    (tmp_path / "notes.ptx").write_text("mine")
    registry = PtxRegistry(tmp_path)
    registry.add(1, b"")
    registry.add(2, b"")
    assert (tmp_path / "notes.ptx").exists()
    assert len(registry.hashes()) == 1


def test_where_nothing_can_be_written_nothing_is_kept_and_nothing_raised(tmp_path: Path) -> None:
    (tmp_path / "ptx").write_text("a file where the folder would be")
    registry = PtxRegistry(tmp_path / "ptx")
    registry.add(1, b"")
    assert registry.lookup(1) is None
    assert registry.hashes() == []
