"""The first run on a machine: a fork compiles the kernels, and this process loads them.

LLVM never frees 70 MB that it takes to compile. They end with the fork. Loading the cached kernels takes 0.25 s.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable

POLL_S = 0.05
MOST_S = 600.0  # a fork that takes longer hangs, which can happen if other threads ran when it was made


def compile_in_fork(compile_all: Callable[[], object], meanwhile: Callable[[], object]) -> None:
    """Call `compile_all` in a fork, and `meanwhile` again and again until the fork has ended. Linux only.

    The fork may fail: kernels that are not in the cache are compiled when they are called. If `meanwhile` raises, the
    fork is ended; after `MOST_S` as well.
    """
    if sys.platform != "linux":
        return
    try:
        pid = os.fork()
    except OSError:  # no memory, no process
        return
    if not pid:
        try:
            gc.disable()  # it takes a fifteenth of the time; what it would free ends with the fork
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
