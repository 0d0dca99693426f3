"""Finds the files that this process has open."""

from __future__ import annotations

import os
from pathlib import Path


def descriptors_of(path: Path) -> set[int]:
    """Return the descriptors of this process for the file at `path`."""
    return {each for each in map(int, os.listdir("/proc/self/fd")) if _is_open(each, path)}


def descriptor_of(path: Path) -> int:
    """Return the only descriptor of this process for the file at `path`."""
    (descriptor,) = descriptors_of(path)
    return descriptor


def _is_open(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:  # This descriptor was open only to list the folder. It is closed already.
        return False
