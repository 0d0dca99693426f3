"""The engine of the demo: whether the packages of the extra `compute` are installed."""

from __future__ import annotations

from importlib.util import find_spec

from cbtop.errors import UsageError

PACKAGES = ("numba", "yaml")


def require_engine(what: str) -> None:
    """Raise UsageError, with the command that installs the engine, if one of its packages is missing.

    `what` needs the engine, such as `cbtop demo`. The packages are looked up, not loaded, because Numba is slow.
    """
    if any(find_spec(name) is None for name in PACKAGES):
        raise UsageError(f"{what} needs the engine; pip install 'cbtop[compute]'")
