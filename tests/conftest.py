"""What every test gets: a runtime directory of its own, so that no test meets another or the user's own rings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh runtime directory; short, because a socket's path may have only 107 bytes."""
    with TemporaryDirectory(prefix="cbtop-test-") as directory:
        monkeypatch.setenv("CBTOP_RUNTIME_DIR", directory)
        yield Path(directory)
