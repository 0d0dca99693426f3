"""Terminal output of a program is split into lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cbtop.commands.shared.program import KEPT_LINES, MAX_LINE_CHARS, Written


def written(*pieces: bytes) -> tuple[str, ...]:
    found = Written()
    for piece in pieces:
        found.add(piece)
    return found.lines()


def test_a_line_is_what_is_left_to_see_of_it() -> None:
    assert written(b"one\r\ntwo\r\n\r\nthr", b"ee") == ("one", "two", "", "three")
    assert written(b" 10%|#\r 20%|##\r", b" 30%|###\r") == (" 30%|###",)
    assert written(b" 10%\r 20%\r\nnext\r\n") == (" 20%", "next")
    assert written(b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07and\ta tab") == ("red and a tab",)
    assert written("é".encode()[:1], "é".encode()[1:], b"\xff") == ("é�",)


def test_the_same_lines_are_the_same_object_until_something_comes() -> None:
    found = Written()
    found.add(b"one\n")
    assert found.lines() is found.lines()


def test_what_is_kept_is_bounded() -> None:
    found = Written()
    for number in range(KEPT_LINES + 5):
        found.add(b"line %d\n" % number)
    assert (found.lines()[0], len(found.lines()), found.left_out) == ("line 5", KEPT_LINES, 5)
    assert max(map(len, written(b"x" * 3 * MAX_LINE_CHARS, b"x" * 10, b"\n"))) == MAX_LINE_CHARS
    progress = Written()
    for number in range(MAX_LINE_CHARS):
        progress.add(b"\rstep %d" % number)
    assert progress.lines() == (f"step {MAX_LINE_CHARS - 1}",)


@given(st.lists(st.binary(max_size=40)))
def test_whatever_it_writes_becomes_lines_without_an_end_inside(pieces: list[bytes]) -> None:
    assert not any("\n" in line or "\r" in line for line in written(*pieces))
