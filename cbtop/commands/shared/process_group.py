"""End a process and its descendants. The process must have been started in a session of its own."""

from __future__ import annotations

import os
import signal
import subprocess

GRACE_S = 5.0


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End `process` and its descendants, unless the process has already ended."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
