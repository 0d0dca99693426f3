"""Tests of the conditions that a process runs under, such as its processors and versions.

The conditions contain only known facts. Lists of processors are written as Linux writes them.
"""

from __future__ import annotations

import os
import platform
import sys
from types import ModuleType

import pytest

from cbtop.profiler.conditions import conditions, processors


@pytest.mark.parametrize(
    ("numbers", "text"), [({0}, "0"), ({3, 1, 2, 8}, "1-3, 8"), ({0, 2, 4}, "0, 2, 4"), (set(range(64)), "0-63")]
)
def test_processors_are_listed_in_ranges(monkeypatch: pytest.MonkeyPatch, numbers: set[int], text: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: numbers, raising=False)
    assert processors() == text


def test_where_the_system_does_not_tell_processors_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert processors() == ""
    assert "processors" not in {one.name for one in conditions({}, {}).conditions}


def test_only_imported_libraries_have_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("made_library")
    library.__version__ = "3.7.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_library", library)
    found = {
        one.name: one.value for one in conditions({"CUDA": "12.8"}, {"made_library": "Made", "none": "N"}).conditions
    }
    assert (found["Made"], found["CUDA"], found["Python"]) == ("3.7.0", "12.8", platform.python_version())
    assert "N" not in found
