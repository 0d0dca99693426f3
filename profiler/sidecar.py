"""A daemon beside the profiled process, for viewers elsewhere: a process of its own, never a thread."""

from __future__ import annotations

import logging
import os
import sys

_log = logging.getLogger("cbtop")
_started: list[object] = []  # held, so that nobody asks at exit what became of them


def start_sidecar(endpoint: str) -> None:
    """Start `cbtop daemon` at `endpoint`; it ends when this process does. Where it cannot start, that is logged.

    What it has to say (that an address is taken, or not allowed without keys) it says on this process's stderr.
    """
    import subprocess  # a process that starts none need not load it

    command = [sys.executable, "-m", "cbtop", "daemon", "--bind", endpoint, "--parent", str(os.getpid())]
    try:
        _started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
    except OSError as error:
        _log.warning("cbtop serves nothing at %s: %s", endpoint, error)
