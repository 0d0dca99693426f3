"""A daemon for viewers elsewhere, started by the profiled process: a process of its own, never a thread."""

from __future__ import annotations

import logging
import os
import sys

_log = logging.getLogger("cbtop")
_started: list[object] = []  # held, so that nothing reports at exit how they ended


def start_sidecar(endpoint: str) -> None:
    """Start `cbtop daemon` at `endpoint`; it ends when this process does. If it cannot start, that is logged.

    Its messages (an address is in use, or not allowed without keys) appear on this process's stderr.
    """
    import subprocess  # not needed by a process that starts none

    command = [sys.executable, "-m", "cbtop", "daemon", "--bind", endpoint, "--parent", str(os.getpid())]
    try:
        _started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
    except OSError as error:
        _log.warning("cbtop serves nothing at %s: %s", endpoint, error)
