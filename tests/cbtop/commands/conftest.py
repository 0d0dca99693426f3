"""Fixtures: the pace of the machine (how fast it computes) is fixed, and each recording is read only once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.commands.shared import machine_pace
from cbtop.comparison.runs import Pace, Run
from cbtop.feeds import run_reader


@pytest.fixture(autouse=True)
def steady_pace(monkeypatch: pytest.MonkeyPatch) -> list[Pace]:
    """Return the list of paces that the tests use as the machine's pace, in this order. The last one is repeated."""
    paces = [Pace(1_000.0, 5_000.0)]
    monkeypatch.setattr(machine_pace, "machine_pace", lambda: paces.pop(0) if len(paces) > 1 else paces[0])
    return paces


@pytest.fixture(autouse=True, scope="session")
def _the_same_recording_is_read_once() -> Iterator[None]:
    """Read each recording only once, because most tests compare with the same recording.

    The cache compares the bytes and the names of files.
    """
    read, known = run_reader.runs_in, dict[tuple[object, ...], tuple[Run, ...]]()

    def runs_in(path: Path, selected: Sequence[str] = ()) -> list[Run]:
        if not path.is_file():
            return read(path, selected)
        key = path.read_bytes(), path.name, *selected
        if key not in known:
            known[key] = (*read(path, selected),)
        # Return new objects, as if they were read from a file. So no test changes the objects of the next test.
        return [replace(run) for run in known[key]]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_reader, "runs_in", runs_in)
        yield
