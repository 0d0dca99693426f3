"""Handle Ctrl-C between two polls. As an exception inside a poll, it could be lost or interrupt the poll half way."""

# Python prints and then drops any exception in a destructor or weak reference callback, also KeyboardInterrupt.

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
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
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
