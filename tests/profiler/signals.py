"""Sends a signal to each function of cbtop, one after another, to test that signals do no harm."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable
from typing import Any


def nothing_is_lost(use: Callable[[], object], raised: type[Exception], at: int) -> str:
    """Send a signal in the `at`-th function of cbtop that `use` enters. Returns the name of this function.

    Garbage collection is off while `use` runs. A collection could run code of cbtop for objects of earlier tests, and
    Python discards exceptions in such code.
    """
    left = at
    arrived: list[int] = []
    where = [""]

    def handler(number: int, frame: object) -> None:
        arrived.append(number)
        raise raised("the host's own")

    def trace(frame: Any, event: str, argument: object) -> None:
        nonlocal left
        if event == "call" and frame.f_globals["__name__"].startswith("cbtop.") and not arrived:
            left -= 1
            if left < 0:
                where.append(f"{frame.f_code.co_qualname} at {at}")
                signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    reached = False
    gc.disable()
    sys.setprofile(trace)
    try:
        use()
    except raised:
        reached = True
    finally:
        sys.setprofile(None)
        gc.enable()
        signal.signal(signal.SIGUSR1, before)
    assert reached == bool(arrived), where[-1]
    return where[-1]
