"""Tests of a file that is opened for reading: the file is closed exactly once.

A later file with the same descriptor stays open.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cbtop.protocol.open_file import OpenFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "some"
    path.write_bytes(b"some bytes")
    return path


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_it_reads_from_anywhere_and_less_at_the_end(path: Path) -> None:
    file = OpenFile(path)
    assert (file.read_at(5, 3), file.read_at(5, 100), file.read_at(100, 1)) == (b"byt", b"bytes", b"")


def test_what_nobody_holds_any_more_is_closed(path: Path) -> None:
    file = OpenFile(path)
    descriptor = file.descriptor
    assert is_open(descriptor)
    del file
    assert not is_open(descriptor)


def test_what_is_closed_is_read_no_more_and_may_be_closed_again(path: Path) -> None:
    file = OpenFile(path)
    descriptor = file.descriptor
    file.close()
    file.close()
    assert not is_open(descriptor)
    for look in (file.status_now, lambda: file.read_at(0, 1)):
        with pytest.raises(OSError, match="Bad file descriptor"):
            look()


@pytest.mark.parametrize("by", ["closing", "going"])
def test_another_file_that_has_its_number_by_then_stays_open(path: Path, tmp_path: Path, by: str) -> None:
    file = OpenFile(path)
    descriptor = file.descriptor
    another = os.open(tmp_path, os.O_RDONLY)
    os.dup2(another, descriptor)
    os.close(another)
    if by == "closing":
        file.close()
    del file
    assert is_open(descriptor)
    os.close(descriptor)


def test_one_that_was_closed_by_others_is_no_trouble(path: Path) -> None:
    file = OpenFile(path)
    os.close(file.descriptor)
    file.close()


def test_a_pipe_holds_nobody_up_and_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    OpenFile(tmp_path / "pipe").close()
    with pytest.raises(FileNotFoundError):
        OpenFile(tmp_path / "nothing")
