"""For `doctor` and `overhead`: explain why the profiler's hot path runs in Python and not in C, and how to change
that.
"""

from __future__ import annotations

import importlib
import os


def why_in_python() -> tuple[str, str] | None:
    """Return why the profiler's hot path runs in Python and not in C, and the remedy.

    Returns None if it runs in C.
    """
    if os.environ.get("CBTOP_PURE_PYTHON"):
        return "CBTOP_PURE_PYTHON is set", "unset it for the compiled one"
    try:
        importlib.import_module("cbtop.profiler._hot_path")
    except ImportError as error:
        way_out = (
            "install a C compiler and Python's headers, then cbtop again from its source: pip install --no-binary"
        )
        return str(error), f"{way_out} cbtop, or in a checkout pip install -e ."
    return None
