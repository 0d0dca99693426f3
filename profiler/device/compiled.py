"""Chooses the implementation that launches stamps: profiler/_stamps.c or Python."""

from __future__ import annotations

import os
from typing import TypeVar

Kind = TypeVar("Kind", bound=type)


def chosen(python: Kind) -> Kind:
    """Return the C class with the name of `python` if it was built. With CBTOP_PURE_PYTHON set, return `python`."""
    if os.environ.get("CBTOP_PURE_PYTHON"):
        return python
    try:
        from cbtop.profiler import _stamps
    except ImportError:  # the compiler or the headers were missing at installation
        return python
    compiled: Kind = getattr(_stamps, python.__name__)
    return compiled
