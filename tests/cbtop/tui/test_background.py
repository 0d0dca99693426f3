"""Tests of the app's colours with a pseudo-terminal that tells its background at once, late, in pieces or never."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.events import Key

from cbtop.tui.app import CbtopApp
from cbtop.tui.background import ASK, AnswerParser, BackgroundTold, is_light_by_environment
from cbtop.tui.widgets.themes import DARK, DARK_16, LIGHT, LIGHT_16
from tests.cbtop import samples
from tests.cbtop.conftest import ScriptedFeed
from tests.integration.hosts import DEADLINE_S

LIGHT_ANSWER, DARK_ANSWER = b"\x1b]11;rgb:ffff/ffff/dddd\x1b\\", b"\x1b]11;rgb:0e/12/17\x07"
SCRIPT = """
import os, sys
from cbtop.tui import background
from cbtop.tui.app import CbtopApp
from tests.cbtop import samples
from tests.cbtop.conftest import ScriptedFeed
background.ANSWER_WITHIN_S = float(os.environ.get("ANSWER_WITHIN_S", background.ANSWER_WITHIN_S))
app = CbtopApp(ScriptedFeed(samples.LIVE), interval_s=0.25)
app.choose_theme(sys.argv[1] if sys.argv[1:] else None)
code = app.run()
print("ended", code, app.theme, app._tabs.active)
"""


class Screen:
    """The app in a pseudo-terminal. The test plays the terminal."""

    def __init__(self, *arguments: str, stderr: int | None = None, **environment: str) -> None:
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, 120))
        known = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"} | environment
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *arguments], stdin=theirs, stdout=theirs,
            stderr=theirs if stderr is None else stderr, env=known, start_new_session=True,
        )  # fmt: skip
        self.theirs = theirs
        self.said = b""

    def wait_for(self, what: bytes) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        more = select.poll()  # poll also accepts descriptors above 1023. select does not.
        more.register(self.ours, select.POLLIN)
        while what not in self.said:
            assert time.monotonic() < deadline_s, self.said[-2000:]
            if more.poll(100):
                self.said += os.read(self.ours, 65536)

    def end(self) -> str:
        """Quit the app. Returns one line: its exit code, the theme and the view."""
        os.write(self.ours, b"q")
        return self.ended()

    def ended(self) -> str:
        self.wait_for(b"ended ")
        self.wait_for(b"\n")
        assert self.process.wait(DEADLINE_S) == 0
        return self.said.rpartition(b"ended ")[2].decode().strip()

    def left_for_the_shell(self) -> bytes:
        """Return the bytes that remain in the terminal's input after the app has ended."""
        os.set_blocking(self.theirs, False)
        mode = termios.tcgetattr(self.theirs)
        mode[3] &= ~termios.ICANON
        termios.tcsetattr(self.theirs, termios.TCSANOW, mode)
        try:
            return os.read(self.theirs, 4096)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def screens() -> Iterator[list[Screen]]:
    opened: list[Screen] = []
    yield opened
    for screen in opened:
        screen.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "theme"), [(LIGHT_ANSWER, LIGHT), pytest.param(DARK_ANSWER, DARK, marks=pytest.mark.slow)]
)
def test_the_theme_is_that_of_the_background_and_the_answer_presses_no_key(
    screens: list[Screen], answer: bytes, theme: object
) -> None:
    screens.append(screen := Screen())
    screen.wait_for(ASK.encode())
    os.write(screen.ours, answer)
    screen.wait_for(b"Overview")
    assert screen.end() == f"0 {theme.name} 0"  # type: ignore[attr-defined]


@pytest.mark.slow
def test_an_answer_in_pieces_among_keys_is_one_and_the_keys_are_pressed(
    screens: list[Screen],
) -> None:
    screens.append(screen := Screen())
    screen.wait_for(ASK.encode())
    screen.wait_for(b"Overview")
    for piece in (b"2\x1b]11;rgb:ff", b"ff/ffff/", b"dddd\x1b", b"\\3"):
        os.write(screen.ours, piece)
        time.sleep(0.05)  # The pause makes the app read each piece separately.
    assert screen.end() == f"0 {LIGHT.name} 2"


@pytest.mark.slow
def test_leaving_before_the_answer_comes_leaves_nothing_of_it_to_the_shell(screens: list[Screen]) -> None:
    # With this setting, the app would wait for the terminal's answer longer than the whole test takes.
    screens.append(screen := Screen(ANSWER_WITHIN_S=str(2 * DEADLINE_S)))
    screen.wait_for(ASK.encode())
    os.write(screen.ours, b"q")
    time.sleep(2.0)  # The answer of the terminal comes late, as over a slow line. The app has already quit.
    os.write(screen.ours, LIGHT_ANSWER)
    assert screen.ended().startswith("0 ")
    assert screen.left_for_the_shell() == b""


def test_a_terminal_that_never_answers_holds_nobody_up(screens: list[Screen]) -> None:
    screens.append(screen := Screen())
    screen.wait_for(ASK.encode())
    screen.wait_for(b"Overview")
    assert screen.end() == f"0 {DARK.name} 0"


def test_with_its_errors_in_a_file_the_screen_is_drawn_on_stdout(screens: list[Screen], tmp_path: Path) -> None:
    with (tmp_path / "errors.txt").open("wb") as errors:
        screens.append(screen := Screen(stderr=errors.fileno()))
        screen.wait_for(b"Overview")
        assert screen.end() == f"0 {DARK.name} 0"
    assert (tmp_path / "errors.txt").read_bytes() == b""


@pytest.mark.slow
def test_who_names_a_theme_gets_it_and_the_terminal_is_not_asked(screens: list[Screen]) -> None:
    screens.append(screen := Screen("dark"))
    screen.wait_for(b"Overview")
    os.write(screen.ours, LIGHT_ANSWER)
    assert screen.end() == f"0 {DARK.name} 0"
    assert ASK.encode() not in screen.said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "theme"), [pytest.param({}, DARK_16, marks=pytest.mark.slow), ({"COLORFGBG": "0;15"}, LIGHT_16)]
)
def test_the_linux_console_is_not_asked_and_is_sent_16_colours(
    screens: list[Screen], environment: dict[str, str], theme: object
) -> None:
    screens.append(screen := Screen(TERM="linux", COLORTERM="", **environment))
    screen.wait_for(b"Overview")
    assert screen.end() == f"0 {theme.name} 0"  # type: ignore[attr-defined]
    assert ASK.encode() not in screen.said
    assert b"8;2;" not in screen.said
    assert b"8;5;" not in screen.said


async def test_16_colours_are_for_a_screen_on_a_terminal_and_not_for_a_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    app = CbtopApp(ScriptedFeed(samples.LIVE), interval_s=60)
    async with app.run_test(size=(80, 24)) as pilot:
        themes = [app.theme]
        for key in "TT":
            await pilot.press(key)
            themes.append(app.theme)
    assert themes == [DARK.name, LIGHT.name, DARK.name]
    app.choose_theme("light")
    assert app.theme == LIGHT_16.name


@pytest.mark.parametrize(
    ("said", "is_light"), [("0;15", True), ("0;default;7", True), ("15;0", False), ("", False), ("x", False)]
)
def test_a_terminal_may_say_it_in_the_environment(said: str, is_light: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLORFGBG", said)
    assert is_light_by_environment() is is_light


@pytest.mark.parametrize("nonsense", ["\x1b]11;what\x07", "\x1b]11;rgb:zz/zz/zz\x1b\\", "\x1b]11;\x07"])
def test_an_answer_that_is_no_colour_is_no_answer_and_no_key(nonsense: str) -> None:
    parser = AnswerParser()
    assert list(parser.feed(nonsense)) == []
    assert [event.key for event in parser.feed("a") if isinstance(event, Key)] == ["a"]


@pytest.mark.parametrize(("colour", "is_light"), [("8080/8080/8080", True), ("00/2b/36", False), ("f/f/f", True)])
def test_light_is_what_black_can_be_read_on_best(colour: str, is_light: bool) -> None:
    (told,) = AnswerParser().feed(f"\x1b]11;rgb:{colour}\x07")
    assert isinstance(told, BackgroundTold)
    assert told.is_light is is_light
