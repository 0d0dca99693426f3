"""Compile the kernels in a fork on the first run on a machine. This process then only loads them, in 0.25 s.

LLVM needs 70 MB to compile and never frees them. In a fork, the system frees them when the fork ends.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable

POLL_S = 0.05
MOST_S = 600.0  # Seconds after which the fork is ended. A fork may hang if other threads ran when it was made.


def compile_in_fork(compile_all: Callable[[], object], meanwhile: Callable[[], object]) -> None:
    """Call `compile_all` in a fork, and call `meanwhile` repeatedly until the fork has ended. Linux only.

    The fork is killed after `MOST_S` seconds, or if `meanwhile` raises. If the fork fails, missing kernels are
    compiled when they are first called.
    """
    if sys.platform != "linux":
        return
    try:
        pid = os.fork()
    except OSError:  # no memory, or no process, is left
        return
    if not pid:
        try:
            # Garbage collection would take a fifteenth of the time. It is not needed, because the fork soon ends.
            gc.disable()
            compile_all()
        finally:
            os._exit(0)
    until_s, has_ended = time.monotonic() + MOST_S, False
    try:
        while not has_ended and time.monotonic() < until_s:
            meanwhile()
            time.sleep(POLL_S)
            has_ended = os.waitpid(pid, os.WNOHANG) != (0, 0)
    finally:
        if not has_ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
