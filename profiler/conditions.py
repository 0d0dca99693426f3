"""What may change the times of this process: the versions of libraries, and its processors."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping

from cbtop.protocol.structure_messages import Conditions, RunCondition


def conditions(known: Mapping[str, str], libraries: Mapping[str, str]) -> Conditions:
    """Return `known` with the version of Python, the processors, and the versions of libraries.

    `libraries` maps names of modules to names of libraries. Only imported modules count.
    """
    found = {"Python": platform.python_version(), "processors": processors()}
    for module, name in libraries.items():
        found[name] = str(getattr(sys.modules.get(module), "__version__", ""))
    found |= known
    return Conditions(tuple(RunCondition(name, value) for name, value in found.items() if value))


def processors() -> str:
    """Return the processors that this thread may run on, such as `0-3, 8`, or "" if unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return ""
    ranges: list[list[int]] = []
    for number in sorted(os.sched_getaffinity(0)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)
