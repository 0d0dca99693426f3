"""Detect whether the terminal's background is light, by asking it with the sequence OSC 11.

The app does not wait, because the answer may come at any time or never. The answer is removed from the input.
Otherwise Textual would take it for keys. If the user leaves directly after the question, the app waits for the
answer. Otherwise the shell would receive it.
"""

from __future__ import annotations

import os
import re
import selectors
import sys
import time
from collections.abc import Iterable
from itertools import chain
from types import SimpleNamespace
from typing import TextIO

from textual._xterm_parser import XTermParser
from textual.app import App
from textual.drivers import linux_driver
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message

from cbtop.tui.patience import SlowPollSelector

ASK = "\x1b]11;?\x1b\\"
# A terminal does not answer if it has not done so after this many seconds.
ANSWER_WITHIN_S = 1.0
_ANSWER = re.compile(r"\x1b?\]11;([^\x07\x1b]{0,64})(?:\x07|\x1b\\)")
# Matches the beginning of an answer that is not complete. The rest comes with the next input.
_BEGUN = re.compile(r"\x1b?\]1(?:1(?:;[^\x07\x1b]{0,64}\x1b?)?)?\Z")
_COLOUR = re.compile(r"rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})")
# On a background with a higher relative luminance, black text is more readable than white text (WCAG 2).
_BLACK_ON_IT = 0.179
_NEVER_ANSWER = ("linux", "dumb", "unknown", "")  # terminals that do not answer, by their value of TERM


class BackgroundTold(Message):
    """Sent when the terminal has reported its background colour."""

    def __init__(self, *, is_light: bool) -> None:
        super().__init__()
        self.is_light = is_light


class AnswerParser(XTermParser):
    """Removes the terminal's answer about its background colour from the input. Everything else is parsed as keys."""

    _held = ""

    def feed(self, data: str) -> Iterable[Message]:
        if not data:
            return super().feed(data)
        data, self._held = self._held + data, ""
        told: list[Message] = []
        while answer := _ANSWER.search(data):
            data = data[: answer.start()] + data[answer.end() :]
            if (is_light := _is_light(answer[1])) is not None:
                told.append(BackgroundTold(is_light=is_light))
        if begun := _BEGUN.search(data):
            data, self._held = data[: begun.start()], begun[0]
        return chain(told, super().feed(data)) if data else told


# Replace the parser and the selector of Textual's driver. Textual looks for these names in the module of the driver.
vars(linux_driver)["XTermParser"] = AnswerParser
vars(linux_driver)["selectors"] = SimpleNamespace(**vars(selectors) | {"SelectSelector": SlowPollSelector})


class AskingDriver(LinuxDriver):
    """Textual's driver, which also asks the terminal for its background colour."""

    _asked_s: float | None = None  # time of the question to the terminal, or None if no answer is expected

    def __init__(
        self, app: App[object], *, debug: bool = False, mouse: bool = True, size: tuple[int, int] | None = None
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        # Textual draws on stderr. If a user has redirected it (`2>errors.txt`), draw on stdout.
        if sys.__stdout__ is not None and is_terminal(sys.__stdout__) and not is_terminal(sys.__stderr__):
            self._file = sys.__stdout__

    def ask_background(self) -> None:
        """Ask the terminal for its background colour. Do nothing if this type of terminal does not answer."""
        if self.input_tty and os.environ.get("TERM", "") not in _NEVER_ANSWER:
            self._asked_s = time.monotonic()
            self.write(ASK)
            self.flush()

    def process_message(self, message: Message) -> None:
        if isinstance(message, BackgroundTold):
            self._asked_s = None
        super().process_message(message)

    def disable_input(self) -> None:
        while self._asked_s is not None and time.monotonic() < self._asked_s + ANSWER_WITHIN_S:
            time.sleep(0.01)
        super().disable_input()


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal. None stands for a stream that was closed before Python started."""
    return stream is not None and stream.isatty()


def is_light_by_environment() -> bool:
    """Return whether the variable COLORFGBG describes a light background. For example, `0;15` is black on white."""
    return os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")


def _is_light(colour: str) -> bool | None:
    """Return whether a colour such as `rgb:ffff/ffff/dddd` is light. Return None if it cannot be parsed."""
    if (found := _COLOUR.match(colour)) is None:
        return None
    return luminance(*(int(part, 16) / (16 ** len(part) - 1) for part in found.groups())) > _BLACK_ON_IT


def luminance(red: float, green: float, blue: float) -> float:
    """Return the relative luminance (0 to 1, WCAG 2) of an sRGB colour with components from 0 to 1."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
