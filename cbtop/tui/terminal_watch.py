"""Leave the app after a signal, or if the terminal or the browser is gone. This must work even if nothing reads the
app's output.
"""

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

from cbtop.tui.in_browser import is_in_browser

TERMINAL_CHECK_S = 1.0
# The app must have left within this many seconds. This includes up to five seconds to stop the workload of a demo.
LEAVE_WITHIN_S = 8.0
MAKE_WAY_EVERY_S = 0.05
ROOM_FOR_GOOD = 3  # No writer is blocked if the output buffer has room at this many checks in a row.
HANG_UP_EXIT = 129
# Sequences that restore the modes of a terminal: synchronised drawing and reports of pastes, sizes, mouse and focus
# off; line wrap, normal keys, main screen and cursor on.
_MODES = "?2026l ?2004l ?2048l ?1000l ?1003l ?1015l ?1006l ?1004l ?7h <u ?1049l ?25h"
AS_BEFORE = "".join(f"\x1b[{mode}" for mode in _MODES.split()).encode()
# Textual reads keys from the first of these two file descriptors, and draws on the second one.
_KEYS, _DRAWN_ON = 0, 2


class TerminalWatch:
    """Calls `leave` with an exit code when a signal arrives or the terminal is gone.

    `leave` runs in the current event loop. If the app does not leave in time, the process is ended.
    """

    def __init__(self, leave: Callable[[int], object]) -> None:
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._exit_code: int | None = None

    def begin(self) -> None:
        # asyncio's signal handlers are not called while the event loop is blocked by terminal output. This handler
        # must not raise, because Python drops exceptions in places such as `__del__`.
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._watch, name="cbtop-terminal", daemon=True).start()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._exit_code = 128 + number
        try:
            self._loop.call_soon_threadsafe(self._leave, self._exit_code)
        except RuntimeError:  # The event loop is closed, so the app has already left.
            raise SystemExit(self._exit_code) from None

    def _watch(self) -> None:
        """Wait for a signal, or until the terminal is gone. Then leave the app. Runs in a daemon thread."""
        while _is_there() and self._exit_code is None:
            time.sleep(TERMINAL_CHECK_S)
        if self._exit_code is None:
            self._leave_a_dead_terminal()
        else:
            self._make_way(self._exit_code)

    def _make_way(self, exit_code: int) -> None:
        """Wait until the app has left. If the terminal's output is blocked, discard this output meanwhile."""
        deadline_s, is_unread = time.monotonic() + LEAVE_WITHIN_S, False
        while time.monotonic() < deadline_s:
            if self._loop.is_closed():  # The app has left the screen, and the command continues without the app.
                return
            if not is_unread and not _has_room(_DRAWN_ON):
                is_unread = True
                _leave_unread(deadline_s)
            time.sleep(MAKE_WAY_EVERY_S)
        os._exit(exit_code)

    def _leave_a_dead_terminal(self) -> None:
        """Leave because the terminal is gone. Textual's input would loop without a pause, and its output would block
        for ever.

        Nothing can restore its modes.
        """
        # Without a terminal, Python could not flush its output at exit and would end with exit code 120. So discard
        # it.
        _write_nowhere()
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._leave, HANG_UP_EXIT)
        time.sleep(LEAVE_WITHIN_S)
        os._exit(HANG_UP_EXIT)


def _is_there() -> bool:
    """Return whether the terminal is there, or the server that sends the keys of a browser."""
    if not is_in_browser():
        return os.isatty(_KEYS)
    poll = select.poll()
    poll.register(_KEYS, 0)  # An event of 0 asks only whether the other end is closed.
    return not poll.poll(0)


def _leave_unread(deadline_s: float) -> None:
    """Discard output that nothing reads, and restore the terminal's modes for a later reader.

    This unblocks a writer. Later writes would block again, so they are redirected.
    """
    done = threading.Event()
    # Let Python wait for this thread at exit, because the thread must finish its work.
    atexit.register(done.wait, LEAVE_WITHIN_S)
    terminal = os.dup(_DRAWN_ON)
    _write_nowhere()
    had_room = 0
    with suppress(OSError, termios.error):  # The terminal may disappear at any time while its modes are restored.
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
