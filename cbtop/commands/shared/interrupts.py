"""Handle Ctrl-C between two polls of a loop.

An exception from Ctrl-C inside a poll could be lost, or interrupt the poll half way.
"""

# An exception in a destructor or a weak reference callback is lost, because Python only prints it. This may happen to
# KeyboardInterrupt, too.

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed. A second Ctrl-C raises KeyboardInterrupt as usual."""
    pressed: list[int] = []
    # Only the main thread may handle signals, so another thread never sees Ctrl-C.
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(number: int, frame: FrameType | None) -> None:
        if pressed:
            signal.default_int_handler(number, frame)
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
