"""Tests of the screen in a real terminal.

The screen shows what runs, and restores the terminal however cbtop ends.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyte
import pytest

from cbtop.compute.demo_model import TINY, write_model
from tests.integration.hosts import CBTOP, DEADLINE_S, eventually, host

COLUMNS, ROWS = 120, 34


class Terminal:
    """A pseudo-terminal in which a process runs, with the screen as a person would see it."""

    def __init__(self, command: list[str], **environment: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        known = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8"}
        environment = os.environ | known | environment
        # pytest sets these variables for its workers, and the app would use them as the size of the terminal.
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environment,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip

    def read(self, timeout_s: float = 0.1) -> str:
        """Return the screen after processing all output that arrives within `timeout_s`."""
        os.set_blocking(self.master, False)
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                data = os.read(self.master, 65536)
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    break
                time.sleep(0.02)
                continue
            self.raw += data
            self._stream.feed(data)
        return "\n".join(self._screen.display)

    def wait_for(self, *words: str) -> str:
        deadline_s = time.monotonic() + DEADLINE_S
        while not all(word in (shown := self.read()) for word in words):
            assert time.monotonic() < deadline_s, f"no {words} on:\n{shown}"
            assert self.process.poll() is None, f"ended with {self.process.returncode} on:\n{shown}"
        return shown

    def send(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def exit_code(self) -> int:
        deadline_s = time.monotonic() + DEADLINE_S
        while self.process.poll() is None and time.monotonic() < deadline_s:
            self.read()
        self.read()
        return self.process.wait(0.1)

    @property
    def is_clean(self) -> bool:
        """Return whether the terminal modes are restored, the main screen is shown and the cursor is visible."""
        last = [self.raw.rfind(code) for code in (b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25l", b"\x1b[?25h")]
        return termios.tcgetattr(self._slave) == self.before and last[1] > last[0] and last[3] > last[2]

    def close(self) -> None:
        for descriptor in (self.master, self._slave):
            os.close(descriptor)


@contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    opened = Terminal([*CBTOP, *arguments], **environment)
    try:
        yield opened
    finally:
        for process in family(opened.process):
            process.kill()
        opened.process.wait()
        opened.close()


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_model(path, TINY, lambda *_: None)
    return str(path)


def quit_leaves_a_clean_terminal_and_no_process(screen: Terminal, key: str) -> None:
    started = family(screen.process)[1:]
    screen.send(key)
    assert screen.exit_code() == 0
    assert screen.is_clean
    eventually(lambda: not any(process.is_running() for process in started))


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGHUP))],
)
def test_a_signal_leaves_a_clean_terminal_and_its_own_exit_code(model: str, number: signal.Signals) -> None:
    with terminal("demo", "--model", model) as screen:
        screen.wait_for("costliest bricks")
        workload = family(screen.process)[1:]
        screen.process.send_signal(number)
        assert screen.exit_code() == 128 + number
        assert screen.is_clean
        eventually(lambda: not any(process.is_running() for process in workload))


SIGNALLED_WHERE_EXCEPTIONS_ARE_IGNORED = """
import os, signal, sys
from cbtop import cli
from cbtop.feeds.feed import Feed

class Signals:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

poll = Feed.poll
Feed.poll = lambda feed: (Signals(), poll(feed))
sys.exit(cli.main([]))
"""


@pytest.mark.slow
def test_a_signal_ends_the_screen_also_where_python_ignores_exceptions() -> None:
    screen = Terminal([sys.executable, "-c", SIGNALLED_WHERE_EXCEPTIONS_ARE_IGNORED])
    try:
        assert screen.exit_code() == 128 + signal.SIGTERM
        assert screen.is_clean
    finally:
        screen.process.kill()
        screen.process.wait()
        screen.close()


@pytest.mark.slow  # tests/cbtop/tui/test_app.py tests it without processes
def test_every_view_opens_by_its_key_and_is_redrawn_after_a_suspension() -> None:
    with host(), terminal() as screen:
        screen.wait_for("costliest bricks", "LIVE")
        for key, words in (
            ("2", "DownProjection"),
            ("3", "whole layer"),
            ("4", "follows the newest step"),
            ("5", "no plot without roofs"),
            ("6", "Layer 0"),
            ("1", "costliest bricks"),
        ):
            screen.send(key)
            screen.wait_for(words)
        screen.send("\x1a")
        watched = psutil.Process(screen.process.pid)
        deadline_s = time.monotonic() + DEADLINE_S
        while watched.status() != psutil.STATUS_STOPPED:
            screen.read()
            assert time.monotonic() < deadline_s, "it did not stop"
        shown_before = len(screen.raw)
        screen.process.send_signal(signal.SIGCONT)
        # Nothing changes on the screen by itself, so this output can only be the tabs that are drawn again.
        while b"1 Overview" not in screen.raw[shown_before:]:
            screen.read()
            assert time.monotonic() < deadline_s, "the tabs are not drawn again"
        quit_leaves_a_clean_terminal_and_no_process(screen, "\x03")


# The default run skips this test, because test_app.py tests a lost terminal, also with an ignored hang-up.
@pytest.mark.slow
def test_a_lost_terminal_ends_it() -> None:
    with host():
        screen = Terminal(CBTOP)
        screen.wait_for("costliest bricks")
        screen.close()
        assert screen.process.wait(DEADLINE_S) != 0


# The default run skips this test, because test_demo.py tests the error without a screen, and test_app.py tests a
# failed workload.
@pytest.mark.slow
def test_a_model_that_cannot_be_run_ends_the_screen_with_one_line_and_code_2(tmp_path: Path) -> None:
    with terminal("demo", "--model", str(tmp_path / "none.gguf")) as screen:
        assert screen.exit_code() == 2
        assert screen.is_clean
        assert "none.gguf does not exist" in screen.read()


# The default run skips this test, because test_app.py tests the first process that appears, and test_watching.py one
# that is gone.
@pytest.mark.slow
def test_the_screen_says_how_to_start_a_program_if_nothing_runs() -> None:
    with terminal() as screen:
        screen.wait_for("cbtop demo")
        with host() as process:
            screen.wait_for("costliest bricks", f"{process.pid}@")
        screen.wait_for("GONE")
        quit_leaves_a_clean_terminal_and_no_process(screen, "\x11")


IDLE = """
import sys
from cbtop import BrickProfiler
from cbtop.protocol.requests import Answer, State
profiler = BrickProfiler()
with profiler.step("decode", 1), profiler.brick("Sampling"): pass
profiler._recorder.answer(Answer(0, State.LISTENING).word())
sys.stdin.read()
print(profiler._recorder.asked)
"""


# The default run skips this test, because test_app.py quits during a request, and a test above checks the terminal.
@pytest.mark.slow
def test_quitting_during_a_request_for_kernels_leaves_a_clean_terminal() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", IDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        # Show data of all time, because the only step of the process may be older than the window of the last
        # seconds.
        terminal("--window", "all") as screen,
    ):
        screen.wait_for("Sampling")
        screen.send("K")
        screen.wait_for(f"waiting for a step of pid {process.pid}, at most 60 s")
        screen.send("6")  # The screen accepts keys while it waits for the step.
        screen.wait_for("layer → brick → kernel", f"waiting for a step of pid {process.pid}")
        quit_leaves_a_clean_terminal_and_no_process(screen, "q")
        assert process.communicate(timeout=DEADLINE_S)[0] == b"0\n"


RECORDING = str(Path(__file__).parents[1] / "cbtop" / "imperfect.cbtop")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "locale"), [(["--ascii"], "C.UTF-8"), pytest.param([], "C", marks=pytest.mark.slow)]
)
def test_in_ascii_not_one_byte_of_the_screen_is_anything_else(options: list[str], locale: str) -> None:
    with terminal("replay", RECORDING, *options, "--view", "bricks", "--filter", "att", LC_ALL=locale) as screen:
        shown = screen.wait_for("AttentionScore", "3 of 9")
        assert "#" in shown
        for key, words in (("1", "one step"), ("3", "whole layer"), ("4", "bricks"), ("5", "GFLOP/s"), ("6", "+-- ")):
            screen.send(key)
            screen.wait_for(words)
        assert not [byte for byte in screen.raw if byte > 0x7F]
        quit_leaves_a_clean_terminal_and_no_process(screen, "q")


# The default run skips this test, because test_settings.py tests the order of settings, and test_themes.py screens
# without colour.
@pytest.mark.slow
@pytest.mark.parametrize("option", ["NO_COLOR", pytest.param("--no-color", marks=pytest.mark.slow)])
def test_without_colour_nothing_is_drawn_in_one(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if option == "NO_COLOR":
        monkeypatch.setenv(option, "1")
    with terminal("replay", RECORDING, *([option] if option.startswith("--") else [])) as screen:
        screen.wait_for("costliest bricks")
        colours = [list(map(int, found)) for found in re.findall(rb"[34]8;2;(\d+);(\d+);(\d+)[;m]", screen.raw)]
        # Every colour is grey: its parts differ only by rounding.
        assert all(max(colour) - min(colour) <= 1 for colour in colours), colours
        quit_leaves_a_clean_terminal_and_no_process(screen, "q")


@pytest.mark.slow  # The default run skips this test, because test_sort_memory.py tests the order without a terminal.
def test_the_order_that_was_chosen_in_two_runs_is_that_of_the_third() -> None:
    for _ in range(2):
        with terminal("replay", RECORDING, "--view", "bricks") as screen:
            screen.wait_for("wall %▼")
            screen.send("s")
            screen.wait_for("µs/tok▼")
            screen.send("S")
            screen.wait_for("µs/tok▲")
            quit_leaves_a_clean_terminal_and_no_process(screen, "q")
    with terminal("replay", RECORDING, "--view", "bricks") as screen:
        screen.wait_for("µs/tok▲")
        screen.process.send_signal(signal.SIGTERM)
        assert screen.exit_code() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_sigterm_ends_the_screen_if_nobody_reads_it_and_leaves_it_clean() -> None:
    with terminal("replay", RECORDING) as screen:
        screen.wait_for("costliest bricks")
        deadline_s = time.monotonic() + DEADLINE_S
        room = select.poll()  # poll, unlike select, also accepts descriptors above 1023.
        room.register(screen._slave, select.POLLOUT)
        while room.poll(0):
            assert time.monotonic() < deadline_s
            screen.send("234516")  # Each of these keys draws a whole screen, and nothing reads this output.
            time.sleep(0.1)
        screen.process.send_signal(signal.SIGTERM)
        assert screen.process.wait(DEADLINE_S) == 128 + signal.SIGTERM
        screen.read()
        assert screen.is_clean
