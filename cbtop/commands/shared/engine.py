"""Report missing packages of the extra `compute`, which the demo's model needs."""

from __future__ import annotations

from cbtop.compute import engine
from cbtop.errors import UsageError


def require_engine(what: str) -> None:
    """Raise UsageError if a package of the extra `compute` is missing. The error contains the command that installs
    the package.

    `what` is the feature that needs the packages, such as `cbtop demo`.
    """
    if not engine.is_installed():
        raise UsageError(f"{what} needs the engine; {engine.INSTALL}")


def how_to_demo() -> str:
    """Return a help text: commands that start a process for cbtop to watch."""
    demo = "`cbtop demo --serve-only`"
    return demo if engine.is_installed() else f"`{engine.INSTALL}`, then {demo}"
