"""Leaves on a signal or when the terminal is gone, even if the terminal's output is not read."""

from __future__ import annotations

import asyncio
import atexit
import os
import select
import signal
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

TERMINAL_CHECK_S = 1.0
LEAVE_WITHIN_S = 8.0  # stopping a demo's workload takes up to five seconds
MAKE_WAY_EVERY_S = 0.05
ROOM_FOR_GOOD = 3  # consecutive checks with room: whoever waited has written everything
HANG_UP_EXIT = 129
# How Textual ends: no synchronised drawing, paste, sizes, mouse and focus; lines wrap; keys, main screen and cursor.
_MODES = "?2026l ?2004l ?2048l ?1000l ?1003l ?1015l ?1006l ?1004l ?7h <u ?1049l ?25h"
AS_BEFORE = "".join(f"\x1b[{mode}" for mode in _MODES.split()).encode()
_KEYS, _DRAWN_ON = 0, 2  # file descriptors: Textual reads from one and draws on the other


class TerminalWatch:
    """Calls `leave` with an exit code in the current event loop, and ends the process if that fails."""

    def __init__(self, leave: Callable[[int], object]) -> None:
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._exit_code: int | None = None

    def begin(self) -> None:
        # Not the loop's own handlers, because a loop blocked on terminal output calls none. A handler must not raise
        # either, because Python ignores exceptions in some places, such as `__del__`.
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._watch, name="cbtop-terminal", daemon=True).start()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._exit_code = 128 + number
        try:
            self._loop.call_soon_threadsafe(self._leave, self._exit_code)
        except RuntimeError:  # the loop is closed, so the app has left already
            raise SystemExit(self._exit_code) from None

    def _watch(self) -> None:
        """Run in a thread that ends with the process."""
        while os.isatty(_KEYS) and self._exit_code is None:
            time.sleep(TERMINAL_CHECK_S)
        if self._exit_code is None:
            self._leave_a_dead_terminal()
        else:
            self._make_way(self._exit_code)

    def _make_way(self, exit_code: int) -> None:
        """Let the app leave by itself. If the terminal is blocked, discard the output meanwhile."""
        deadline_s, is_unread = time.monotonic() + LEAVE_WITHIN_S, False
        while time.monotonic() < deadline_s:
            if self._loop.is_closed():  # the screen has left; the command decides what follows
                return
            if not is_unread and not _has_room(_DRAWN_ON):
                is_unread = True
                _leave_unread(deadline_s)
            time.sleep(MAKE_WAY_EVERY_S)
        os._exit(exit_code)

    def _leave_a_dead_terminal(self) -> None:
        """Leave when the terminal is gone: Textual's input would spin and its output block for ever.

        Nothing on the terminal has to be restored.
        """
        _write_nowhere()  # otherwise flushing at exit fails, and Python's exit code is 120
        with suppress(RuntimeError):  # the loop is closed, so the app has left already
            self._loop.call_soon_threadsafe(self._leave, HANG_UP_EXIT)
        time.sleep(LEAVE_WITHIN_S)
        os._exit(HANG_UP_EXIT)


def _leave_unread(deadline_s: float) -> None:
    """Discard output that is not read, then restore the terminal's modes for a later reader.

    This unblocks a writer that waits for room, and redirects later writes, which would block, too.
    """
    done = threading.Event()
    atexit.register(done.wait, LEAVE_WITHIN_S)  # so that the process does not end before this thread
    terminal = os.dup(_DRAWN_ON)
    _write_nowhere()
    had_room = 0
    with suppress(OSError, termios.error):  # the terminal is gone meanwhile
        while had_room < ROOM_FOR_GOOD and time.monotonic() < deadline_s:
            had_room += 1
            if not _has_room(terminal):
                termios.tcflush(terminal, termios.TCOFLUSH)
                had_room = 0
            time.sleep(MAKE_WAY_EVERY_S)
        if had_room:
            os.write(terminal, AS_BEFORE)
    done.set()


def _has_room(descriptor: int) -> bool:
    return bool(select.select([], [descriptor], [], 0)[1])


def _write_nowhere() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
