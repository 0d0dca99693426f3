"""Where files that can be made again are kept: the demo model, compiled kernels, measured roofs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/cbtop`, else `~/.cache/cbtop`. It may not exist yet."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named if os.path.isabs(named) else os.path.expanduser("~/.cache")) / "cbtop"
