"""Tests of the cache directory: its path follows the XDG base directory specification."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cbtop.protocol.cache import cache_dir


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other places")
@pytest.mark.parametrize(
    ("set_to", "found"),
    [("/somewhere", "/somewhere/cbtop"), ("", "/home/me/.cache/cbtop"), ("relative", "/home/me/.cache/cbtop")],
)
def test_a_relative_or_empty_value_is_ignored(set_to: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", set_to)
    assert cache_dir() == Path(found)
