"""Leave the app after a signal or if the terminal is gone, even if nothing reads the terminal's output."""

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
LEAVE_WITHIN_S = 8.0  # maximum seconds to leave, including up to five seconds to stop the workload of a demo
MAKE_WAY_EVERY_S = 0.05
ROOM_FOR_GOOD = 3  # number of consecutive checks with room in the output buffer, after which no writer is blocked
HANG_UP_EXIT = 129
# Sequences that restore the modes of a terminal. They turn off synchronised drawing, and the reports of pastes,
# sizes, mouse and focus. They turn on line wrap, normal keys, the main screen and the cursor.
_MODES = "?2026l ?2004l ?2048l ?1000l ?1003l ?1015l ?1006l ?1004l ?7h <u ?1049l ?25h"
AS_BEFORE = "".join(f"\x1b[{mode}" for mode in _MODES.split()).encode()
_KEYS, _DRAWN_ON = 0, 2  # file descriptors that Textual reads keys from and draws on


class TerminalWatch:
    """Calls `leave` with an exit code in the current event loop.

    If the app does not leave in time, ends the process.
    """

    def __init__(self, leave: Callable[[int], object]) -> None:
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._exit_code: int | None = None

    def begin(self) -> None:
        # asyncio's signal handlers are not used, because an event loop that is blocked by terminal output does not
        # call them. A handler must not raise an exception, because Python drops exceptions in some places, such as
        # `__del__`.
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._watch, name="cbtop-terminal", daemon=True).start()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._exit_code = 128 + number
        try:
            self._loop.call_soon_threadsafe(self._leave, self._exit_code)
        except RuntimeError:  # the event loop is closed, so the app has already left
            raise SystemExit(self._exit_code) from None

    def _watch(self) -> None:
        """Wait for a signal or the end of the terminal, then exit. Runs in a daemon thread."""
        while os.isatty(_KEYS) and self._exit_code is None:
            time.sleep(TERMINAL_CHECK_S)
        if self._exit_code is None:
            self._leave_a_dead_terminal()
        else:
            self._make_way(self._exit_code)

    def _make_way(self, exit_code: int) -> None:
        """Wait until the app has left. If the terminal's output is blocked, discard the output meanwhile."""
        deadline_s, is_unread = time.monotonic() + LEAVE_WITHIN_S, False
        while time.monotonic() < deadline_s:
            if self._loop.is_closed():  # the app has left the screen, and the command continues
                return
            if not is_unread and not _has_room(_DRAWN_ON):
                is_unread = True
                _leave_unread(deadline_s)
            time.sleep(MAKE_WAY_EVERY_S)
        os._exit(exit_code)

    def _leave_a_dead_terminal(self) -> None:
        """Leave because the terminal is gone. Textual's input would loop without a pause, and its output would block
        for ever.

        The terminal's modes are not restored, because no terminal is left.
        """
        _write_nowhere()  # without this, Python cannot flush its output at exit and ends with exit code 120
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._leave, HANG_UP_EXIT)
        time.sleep(LEAVE_WITHIN_S)
        os._exit(HANG_UP_EXIT)


def _leave_unread(deadline_s: float) -> None:
    """Discard output that nothing reads. Then restore the terminal's modes for a later reader.

    Discarding output unblocks a writer. Later writes are redirected, because they would block again.
    """
    done = threading.Event()
    atexit.register(done.wait, LEAVE_WITHIN_S)  # Python must not exit before this thread has finished
    terminal = os.dup(_DRAWN_ON)
    _write_nowhere()
    had_room = 0
    with suppress(OSError, termios.error):  # the terminal may disappear at any time
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
