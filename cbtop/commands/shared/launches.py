"""Parse `--launch`: the number of threads in a block, for one kernel entry or for all entries of a module."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Mapping, Sequence

from cbtop.errors import UsageError
from cbtop.profiler.analysis.ptx.lane_values import MAX_THREADS
from cbtop.profiler.analysis.ptx.model import Module

MAX_NAMES = 8  # in an error
Block = tuple[int, ...]


def launch(text: str) -> tuple[str, Block]:
    """Parse `NAME=X,Y,Z` or `NAME=XxYxZ`. Returns the name of a kernel entry, and the threads of its block. Without a
    name, they are for all entries.
    """
    name, _, block = text.rpartition("=")
    parts = block.replace("x", ",").split(",")
    numbers = tuple(int(one) for one in parts if one.isascii() and one.isdigit())
    if len(numbers) < len(parts) or len(parts) > 3 or not 1 <= math.prod(numbers) <= MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{block!r} is no block of 1 to {MAX_THREADS} threads, such as 256 or 32x8")
    return name, numbers


def launches_of(module: Module, given: Sequence[tuple[str, Block]]) -> Mapping[str, Block]:
    """Return the thread block of each function of a module: its own, or the one for all entries. Functions without
    either are left out.
    """
    by_name = dict(given)
    named = {one.name: by_name.get(one.name, by_name.get("")) for one in module.functions}
    return {name: block for name, block in named.items() if block is not None}


def require_entries(given: Sequence[tuple[str, Block]], entries: Collection[str]) -> None:
    """Raise UsageError if `--launch` names an entry that does not exist."""
    for name, _ in given:
        if name and name not in entries:
            more = f" and {len(entries) - MAX_NAMES} more" if len(entries) > MAX_NAMES else ""
            known = ", ".join(list(entries)[:MAX_NAMES]) or "none"
            raise UsageError(f"--launch names {name}, which is no entry; the entries are {known}{more}")
