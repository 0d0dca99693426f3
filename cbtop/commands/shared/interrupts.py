"""Ctrl-C that is noted, and acted on between two polls: raised inside one it could be lost, or leave half of one."""

# Python prints and drops what is raised in a destructor or a weak reference's callback: KeyboardInterrupt, too.

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted_interrupt() -> Iterator[Callable[[], bool]]:
    """Gives what tells whether Ctrl-C was pressed meanwhile. Pressed again, it raises KeyboardInterrupt as ever."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
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
