"""Where files that can be made again are kept: the demo model and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/cbtop`, or `~/.cache/cbtop`. It may not exist yet."""
    # The XDG base directory specification: a relative or empty value is to be ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "cbtop"
