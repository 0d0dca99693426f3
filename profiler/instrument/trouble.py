"""Errors of ours inside a host: each is logged in one line, once. Exceptions of the host's own go on to the host."""

from __future__ import annotations

import logging

from cbtop.protocol.signals import reraise_host_error, suppressed

MAX_SAID = 100

_log = logging.getLogger("cbtop")
_said: dict[str, None] = {}


def log_once(what: str) -> None:
    """Log one line, once. A logging handler of the host's that fails does not reach the host's model."""
    if what not in _said and len(_said) < MAX_SAID:
        _said[what] = None
        with suppressed(Exception):
            _log.warning("cbtop: %s", what)


def first_said() -> str:
    """Return the first logged line; "" if there is none."""
    return next(iter(_said), "")


def log_own_error(error: Exception, what: str) -> None:
    """Log `what` and the error; raise it again if a signal handler of the host raised it in our code.

    At the end of the host's stack nothing is logged: the host will find that out by itself.
    """
    reraise_host_error(error)
    if not isinstance(error, RecursionError):
        log_once(f"{what}: {in_words(error)}")


def in_words(error: Exception) -> str:
    """Return its type and its message, if it has a usable one."""
    with suppressed(Exception):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__
