"""Find out whether the packages of the extra `compute` are installed. Without them, the demo cannot run."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = ("numba", "yaml")
INSTALL = "pip install 'cbtop[compute]'"


def is_installed() -> bool:
    """Return whether every package of the engine is installed.

    Packages are not imported, because importing Numba is slow.
    """
    return all([find_spec(name) is not None for name in PACKAGES])
