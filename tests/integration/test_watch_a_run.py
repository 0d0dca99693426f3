"""Tests of `cbtop run --watch` on a real terminal: the screen, the program, and which of the two gets a key."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.integration.hosts import CBTOP, DEADLINE_S, FOR_EVER, HOST, eventually
from tests.integration.test_terminal import Terminal, family

RUN = [*CBTOP, "run", "--watch", "--"]
PROGRAM = (
    """
import os, signal, sys
caught = []
def catch(number, frame):
    caught.append(number)
    print("caught", len(caught), flush=True)
    if len(caught) == 2: sys.exit(7)
signal.signal(signal.SIGINT, catch)
print("read", repr(sys.stdin.read()), sys.stdout.isatty(), *os.get_terminal_size(), flush=True)
print("\\33[31mred\\33[0m", flush=True)
"""
    + HOST
)


@contextmanager
def watching(*command: str) -> Iterator[Terminal]:
    screen = Terminal([*RUN, *command])
    try:
        yield screen
    finally:
        for process in family(screen.process):
            process.kill()
        screen.process.wait()
        screen.close()


def test_the_screen_shows_a_run_and_its_output_and_passes_ctrl_c_to_it() -> None:
    with watching(sys.executable, "-c", PROGRAM, str(FOR_EVER)) as screen:
        screen.wait_for("costliest bricks", "9 Output")
        screen.send("9")
        screen.wait_for("read '' True 120 34", "red")
        screen.send("\x03")
        screen.wait_for("caught 1", "9 Output")
        screen.send("q")
        eventually(lambda: screen.read() and b"caught 1\r\n" in screen.raw.rpartition(b"\x1b[?1049l")[2])
        assert b"red\r\n" in screen.raw.rpartition(b"\x1b[?1049l")[2]
        screen.send("\x03")
        assert screen.exit_code() == 7
        assert "caught 2" in screen.read()
        assert screen.is_clean


# The default run skips this test, because the program of a test above also runs until the user leaves.
@pytest.mark.slow
def test_when_it_has_ended_the_screen_stays_until_somebody_leaves_it() -> None:
    with watching(sys.executable, "-c", "print('only words'); raise SystemExit(3)") as screen:
        screen.wait_for("only words", "has ended with exit code 3")  # the program records nothing
        screen.send("\x03")
        assert screen.exit_code() == 3
        assert screen.is_clean
        assert "only words" in screen.read()


# The default run skips this test, because a test above tests Ctrl-C, and test_terminal.py tests signals.
@pytest.mark.slow
def test_a_signal_leaves_the_screen_and_reaches_the_program() -> None:
    with watching(sys.executable, "-c", HOST, str(FOR_EVER)) as screen:
        screen.wait_for("costliest bricks")
        screen.process.send_signal(signal.SIGTERM)
        assert screen.exit_code() == 128 + signal.SIGTERM
        assert screen.is_clean


@pytest.mark.slow  # The default run skips this test, because test_run.py tests both errors without a screen.
def test_a_failed_start_is_reported_and_a_screen_needs_a_terminal() -> None:
    with watching("gone-1") as screen:
        screen.wait_for("there is no command 'gone-1'", "has ended with exit code 127")
        screen.send("q")
        assert screen.exit_code() == 127
    done = subprocess.run([*RUN, "true"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 2
    assert "the screen wants a terminal" in done.stderr
