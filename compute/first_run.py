"""Compile the kernels in a forked process on the first run on a machine.

The original process then only loads the compiled kernels, in 0.25 s.

LLVM needs 70 MB of memory to compile, and never frees it. When the forked process ends, the system frees this memory.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable

POLL_S = 0.05
# the forked process is ended after this many seconds; it may hang if other threads ran during the fork
MOST_S = 600.0


def compile_in_fork(compile_all: Callable[[], object], meanwhile: Callable[[], object]) -> None:
    """Call `compile_all` in a forked process, and call `meanwhile` repeatedly until that process has ended.

    Linux only.

    The forked process is killed after `MOST_S` seconds, or if `meanwhile` raises. If the forked process fails, this
    process compiles missing kernels at their first call.
    """
    if sys.platform != "linux":
        return
    try:
        pid = os.fork()
    except OSError:  # the system has not enough memory, or its limit of processes is reached
        return
    if not pid:
        try:
            # Do not collect garbage: this would take a fifteenth of the compile time, and the forked process ends
            # soon.
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
