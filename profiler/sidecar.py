"""Starts a daemon for remote viewers from the profiled process. It is a separate process, not a thread."""

from __future__ import annotations

import logging
import os
import sys

_log = logging.getLogger("cbtop")
_started: list[object] = []  # without this reference, Python would warn about a running subprocess at exit


def start_sidecar(endpoint: str) -> None:
    """Start `cbtop daemon` at `endpoint`. It ends with this process.

    If it cannot start, a warning is logged. Its messages (address in use, or not allowed without keys) appear on this
    process's stderr.
    """
    import subprocess  # imported here, because most processes start no daemon

    command = [sys.executable, "-m", "cbtop", "daemon", "--bind", endpoint, "--parent", str(os.getpid())]
    try:
        _started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
    except OSError as error:
        _log.warning("cbtop serves nothing at %s: %s", endpoint, error)
