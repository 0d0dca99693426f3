"""The first run on a machine: kernels are compiled in a fork, and loaded by this process.

LLVM keeps 70 MB of what it took to compile, whatever is freed: they end with the fork. To load what that has kept
takes 0.25 s.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable

POLL_S = 0.05
MOST_S = 600.0  # a fork that takes longer hangs, as one may that was made beside other threads


def compile_in_fork(compile_all: Callable[[], object], meanwhile: Callable[[], object]) -> None:
    """Call `compile_all` in a fork, and `meanwhile` again and again until it has ended; Linux, elsewhere nothing.

    Whatever comes of it: what is not in the cache then is compiled where it is called. Where `meanwhile` raises, the
    fork ends with it; so it does after `MOST_S`.
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
