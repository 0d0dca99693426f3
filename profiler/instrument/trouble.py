"""What fails of ours inside a host: it is said in one line, once; what is the host's own goes on to the host."""

from __future__ import annotations

import logging

from cbtop.protocol.signals import let_through, suppressed

MAX_SAID = 100

_log = logging.getLogger("cbtop")
_said: dict[str, None] = {}


def say(what: str) -> None:
    """One line, once. A handler of the host's that fails at it does not reach the host's model."""
    if what not in _said and len(_said) < MAX_SAID:
        _said[what] = None
        with suppressed(Exception):
            _log.warning("cbtop: %s", what)


def first_said() -> str:
    """The first of all that was said; "" where nothing was."""
    return next(iter(_said), "")


def ours(error: Exception, what: str) -> None:
    """Say `what`, and why; raise it again where a signal handler of the host raised it while we were at work.

    At the end of the host's stack nothing is said: the host will find that out by itself.
    """
    let_through(error)
    if not isinstance(error, RecursionError):
        say(f"{what}: {in_words(error)}")


def in_words(error: Exception) -> str:
    """Its type and what it says, where it can say it."""
    with suppressed(Exception):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__
