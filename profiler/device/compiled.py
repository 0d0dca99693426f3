"""Chooses what launches stamps (kernels that store the device's time): profiler/_stamps.c, or Python."""

from __future__ import annotations

import os
from typing import TypeVar

Kind = TypeVar("Kind", bound=type)


def chosen(python: Kind) -> Kind:
    """Return the compiled class of the same name as `python`, if it was built. With CBTOP_PURE_PYTHON set, return
    `python`.
    """
    if os.environ.get("CBTOP_PURE_PYTHON"):
        return python
    try:
        from cbtop.profiler import _stamps
    except ImportError:  # at installation, the compiler or the headers of Python were missing
        return python
    compiled: Kind = getattr(_stamps, python.__name__)
    return compiled
