"""Compile the kernels in a fork on the first run on a machine, so that this process only loads them.

LLVM never frees the 70 MB that it needs to compile. The system frees them when the fork ends. Loading the cached
kernels takes 0.25 s.
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

    The fork may fail: kernels that are not in the cache are compiled when they are called. If `meanwhile` raises, or
    after `MOST_S` seconds, the fork is ended.
    """
    if sys.platform != "linux":
        return
    try:
        pid = os.fork()
    except OSError:  # there is no memory, or no process left
        return
    if not pid:
        try:
            # Garbage collection takes a fifteenth of the time. The memory that it would free is freed when the fork
            # ends.
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
