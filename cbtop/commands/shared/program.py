"""Run a program in a pseudo-terminal of its own, and store its output."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

KEPT_LINES = 5000
MAX_LINE_CHARS = 4096
# Seconds to wait for output after the program has ended. Another process may still write a summary.
LAST_WORDS_S = 5.0
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")


class Written:
    """The newest lines of a text that arrives in pieces. A line that a program overwrites on the terminal keeps its
    last content.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._begun = ""  # text of the line that is not finished yet
        self._snapshot: tuple[str, ...] | None = ()

    def add(self, data: bytes) -> None:
        """Add the next piece of the program's output."""
        *ended, self._begun = (self._begun + self._decoder.decode(data)).split("\n")
        for line in ended:
            self._end(line)
        self._begun = self._begun[self._begun.rfind("\r", 0, -1) + 1 :]
        while len(self._begun) > MAX_LINE_CHARS:
            self._end(self._begun[:MAX_LINE_CHARS])
            self._begun = self._begun[MAX_LINE_CHARS:]
        self._snapshot = None

    def lines(self) -> tuple[str, ...]:
        """Return the stored lines. The tuple is the same object until new text is added."""
        if self._snapshot is None:
            begun = _plain(self._begun)
            self._snapshot = (*self._lines, begun) if begun else tuple(self._lines)
        return self._snapshot

    def _end(self, line: str) -> None:
        self.left_out += len(self._lines) == KEPT_LINES
        self._lines.append(_plain(line)[:MAX_LINE_CHARS])


def _plain(line: str) -> str:
    """Return the visible text of a terminal line, without colours. Text before the last carriage return was
    overwritten.
    """
    parts = [part for part in _ESCAPE.sub("", line).split("\r") if part]
    return parts[-1].expandtabs() if parts else ""


class Program:
    """A program in a forked child process. In the child, `is_child` is true, and the caller must start the program
    there.

    The program's stdout and stderr are a pseudo-terminal without colours. The program's stdin is empty.
    """

    def __init__(self) -> None:
        self.began_ns = time.time_ns()
        self._pid, self._terminal = pty.fork()
        self.is_child = self._pid == 0
        if self.is_child:
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), 0)
            os.environ["TERM"] = "dumb"
            return
        self._code: int | None = None
        self._written = Written()
        self._passes_on = False
        self._writing = threading.Lock()
        size = os.get_terminal_size(1)
        self.resize(size.columns, size.lines)
        self._reader = threading.Thread(target=self._read, name="cbtop-program", daemon=True)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code is None

    @property
    def exit_code(self) -> int | None:
        """The program's exit code, or None while the program runs. If a signal ended the program, the code is 128
        plus the signal number, as in a shell.
        """
        return None if self.is_running or self._code is None else self._code if self._code >= 0 else 128 - self._code

    def written(self) -> Sequence[str]:
        with self._writing:
            return self._written.lines()

    def interrupt(self) -> None:
        os.write(self._terminal, b"\x03")

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def send_signal(self, number: int) -> None:
        if self.is_running:
            os.kill(self._pid, number)

    def pass_on(self) -> int:
        """Print the program's stored lines, and all further output until the program has ended. Return the program's
        exit code.

        Signals to this process are forwarded to the program.
        """
        signal.signal(signal.SIGINT, lambda *_: self.interrupt())
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: self.send_signal(number))
        with self._writing:
            if self._written.left_out:
                sys.stderr.write(f"cbtop: {self._written.left_out:,} lines before these are not kept\n")
                sys.stderr.flush()
            _print("".join(f"{line}\n" for line in self._written.lines()).encode())
            self._passes_on = True
        if self.is_running:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._reader.join(LAST_WORDS_S)
        code = self.exit_code
        assert code is not None
        return code

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._terminal, 1 << 16)
            except OSError:
                # No process has the pseudo-terminal open any longer, so the program's output is complete.
                return
            if not data:
                return
            with self._writing:
                if self._passes_on:
                    _print(data)
                else:
                    self._written.add(data)


def _print(data: bytes) -> None:
    with suppress(OSError):  # The terminal of cbtop was closed. The program continues without it.
        while data:
            data = data[os.write(1, data) :]
