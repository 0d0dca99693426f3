"""Report that the packages of the extra `compute` are not installed. The demo's model needs them."""

from __future__ import annotations

from cbtop.compute import engine
from cbtop.errors import UsageError


def require_engine(what: str) -> None:
    """Raise UsageError with the command that installs the engine if one of its packages is missing.

    `what` is what needs the engine, such as `cbtop demo`.
    """
    if not engine.is_installed():
        raise UsageError(f"{what} needs the engine; {engine.INSTALL}")


def how_to_demo() -> str:
    """Return a text with commands that start a process to watch."""
    demo = "`cbtop demo --serve-only`"
    return demo if engine.is_installed() else f"`{engine.INSTALL}`, then {demo}"
