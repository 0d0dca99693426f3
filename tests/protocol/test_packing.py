"""Tests of where msgpack comes from: this environment or, under another name, the environment of `cbtop run`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgpack
import pytest

from cbtop.protocol.packing import LENT_MSGPACK, load_msgpack, msgpack_directory

DIRECTORY = str(Path(msgpack.__file__).parent)


@pytest.fixture
def without_msgpack(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "msgpack"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "msgpack", None)


def test_its_directory_is_found_without_loading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class FinderOfOldTimes:  # A finder of modules without find_spec, as in old versions of Python.
        pass

    monkeypatch.setattr(sys, "meta_path", [FinderOfOldTimes(), *sys.meta_path])
    assert msgpack_directory() == DIRECTORY
    monkeypatch.setattr(sys, "meta_path", [])
    assert msgpack_directory() is None


def test_that_of_this_environment_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(LENT_MSGPACK, str(tmp_path))
    assert load_msgpack() is msgpack


def test_a_lent_one_works_and_is_not_found_by_its_usual_name(
    without_msgpack: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Use the Python version of msgpack, because its compiled version is already loaded under the usual name.
    monkeypatch.setenv("MSGPACK_PUREPYTHON", "1")
    monkeypatch.setenv(LENT_MSGPACK, DIRECTORY)
    lent = load_msgpack()
    assert lent.unpackb(lent.packb({"a": [1, 2.5, b"x", None]})) == {"a": [1, 2.5, b"x", None]}
    with pytest.raises(lent.UnpackException):
        lent.unpackb(b"\xc1")
    assert [name for name, module in sys.modules.items() if name.startswith("msgpack") and module] == []


def test_without_any_the_error_names_it(without_msgpack: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LENT_MSGPACK, raising=False)
    with pytest.raises(ImportError, match="msgpack"):
        load_msgpack()


def test_one_that_cannot_be_loaded_leaves_nothing_behind(
    without_msgpack: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(LENT_MSGPACK, str(tmp_path))
    with pytest.raises(FileNotFoundError):
        load_msgpack()
    assert "cbtop.protocol.packing.msgpack" not in sys.modules
