"""Handles errors of cbtop's code inside a host. Logs each once, in one line, and raises the host's own exceptions
again.
"""

from __future__ import annotations

import logging

from cbtop.protocol.signals import reraise_host_error, suppressed

MAX_SAID = 100

_log = logging.getLogger("cbtop")
_said: dict[str, None] = {}


def log_once(what: str) -> None:
    """Log a line, unless it was logged before. An error in the host's logging handler is suppressed."""
    if what not in _said and len(_said) < MAX_SAID:
        _said[what] = None
        with suppressed(Exception):
            _log.warning("cbtop: %s", what)


def first_said() -> str:
    """Return the first error that was logged, or ""."""
    return next(iter(_said), "")


def log_own_error(error: Exception, what: str) -> None:
    """Log the error, and that `what` failed. An error that a signal handler of the host raised is raised again
    instead.

    A RecursionError is not logged, because the host will soon notice itself that its stack is full.
    """
    reraise_host_error(error)
    if not isinstance(error, RecursionError):
        log_once(f"{what}: {in_words(error)}")


def in_words(error: Exception) -> str:
    """Return the type of `error` and its message, or only the type if reading the message raises an exception."""
    with suppressed(Exception):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__
