"""Draws the screen for `cbtop --web`: packets on stdout, which the server sends to the browser."""

from __future__ import annotations

import os
import sys
from functools import partial

from textual.app import App
from textual.drivers.web_driver import WebDriver
from textual.events import AppFocus

from cbtop.text import ascii_signs


class BrowserDriver(WebDriver):
    """Textual's driver for browsers. It obeys `--ascii`, and ignores that the server is gone."""

    def __init__(
        self, app: App[object], *, debug: bool = False, mouse: bool = True, size: tuple[int, int] | None = None
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        self._write = partial(self._write_all)

    def start_application_mode(self) -> None:
        super().start_application_mode()
        # Textual's driver removes the focus, maybe after the page has set it. So set it after that.
        self._app.call_later(self._app.post_message, AppFocus())

    def write(self, data: str) -> None:
        if sys.__stdout__ is not None and sys.__stdout__.encoding == "ascii":  # by `--ascii`
            data = data.encode("ascii", ascii_signs.ERRORS).decode("ascii")
        super().write(data)

    def _write_all(self, data: bytes) -> int:
        """Write all bytes, also if a signal interrupts the write. Returns their number."""
        written = 0
        while written < len(data):
            try:
                written += os.write(self.fileno, data[written:])
            except BrokenPipeError:  # The server is gone. `TerminalWatch` notices this, and ends the app.
                break
        return len(data)
