"""Where files that can be made again are kept: the demo model and compiled kernels."""

from __future__ import annotations

from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/cbtop`, else `~/.cache/cbtop`; on other systems what is usual there. It may not exist yet."""
    return platformdirs.user_cache_path("cbtop", appauthor=False)
