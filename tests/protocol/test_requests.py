"""Tests of the requests that a command sends to a process: both sides accept exactly the same requests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbtop.protocol.errors import RequestError
from cbtop.protocol.requests import KERNELS, MAX_STEPS, Answer, Request, RequestSlot, State, answer_of, request_of
from cbtop.protocol.ring import ANSWER_WORD, ASKED_WORD, CURSOR_WORD, HEADER_BYTES, RingWriter
from cbtop.protocol.ring_reader import RingReader


@pytest.fixture
def ring(tmp_path: Path) -> RingWriter:
    return RingWriter(tmp_path / "1-2-0.ring", 1 << 12)


@pytest.fixture
def asker(ring: RingWriter) -> Iterator[RequestSlot]:
    asker = RequestSlot(ring.path)
    yield asker
    asker.close()


def test_a_request_is_read_as_it_was_asked(ring: RingWriter, asker: RequestSlot) -> None:
    asked = asker.ask(7)
    assert request_of(ring.asked) == asked == Request(asked.number, 7)


def test_an_answer_is_read_under_its_number_alone(ring: RingWriter, asker: RequestSlot) -> None:
    asked = asker.ask(3)
    assert asker.answer() is None
    ring.answer(Answer(asked.number + 1, State.DONE, 3).word())
    assert asker.answer() is None
    ring.answer(Answer(asked.number, State.RUNNING, 2).word())
    assert asker.answer() == (asked.number, State.RUNNING, 2)


def test_who_looks_at_requests_says_so(ring: RingWriter, asker: RequestSlot) -> None:
    assert not asker.listens
    ring.answer(Answer(0, State.LISTENING).word())
    assert asker.listens


@pytest.mark.parametrize(
    "word",
    [
        -1,
        0,
        KERNELS | 1 << 24,  # This request has no number of steps.
        KERNELS | (MAX_STEPS + 1) << 8 | 1 << 24,
        KERNELS | 3 << 8,  # no request number
        2 | 3 << 8 | 1 << 24,  # another request
        -(1 << 63),
    ],
)
def test_what_makes_no_sense_is_no_request(word: int) -> None:
    assert request_of(word) is None


@pytest.mark.parametrize("word", [-1, 9, 0xFF, State.DONE | 0xFFFF << 8, -(1 << 63)])
def test_what_makes_no_sense_is_no_answer(word: int) -> None:
    with pytest.raises(RequestError):
        answer_of(word)


def test_the_largest_words_fit_the_ring(ring: RingWriter) -> None:
    word = Request((1 << 39) - 1, MAX_STEPS).word()
    with ring.path.open("r+b") as file:
        file.seek(8 * ASKED_WORD)
        file.write(word.to_bytes(8, "little", signed=True))
    assert request_of(ring.asked) == ((1 << 39) - 1, MAX_STEPS)
    ring.answer(Answer((1 << 39) - 1, State.LEFT_ON, MAX_STEPS).word())
    answered = ring.path.read_bytes()[8 * ANSWER_WORD :][:8]
    assert answer_of(int.from_bytes(answered, "little", signed=True)) == ((1 << 39) - 1, State.LEFT_ON, MAX_STEPS)


def test_asking_changes_one_word_of_the_ring_and_closing_takes_it_back(ring: RingWriter) -> None:
    ring.record(1, 10, 20, 3)
    before = ring.path.read_bytes()
    asker = RequestSlot(ring.path)
    asker.ask(3)
    after = ring.path.read_bytes()
    at = 8 * ASKED_WORD
    assert before[:at] + before[at + 8 :] == after[:at] + after[at + 8 :]
    assert before != after
    asker.close()
    assert ring.path.read_bytes() == before
    reader = RingReader(ring.path)
    assert list(reader.read().end_ns) == [20]
    reader.close()


def test_one_command_asks_at_a_time(ring: RingWriter) -> None:
    first = RequestSlot(ring.path)
    with pytest.raises(RequestError, match="another command"):
        RequestSlot(ring.path)
    first.close()
    RequestSlot(ring.path).close()


def test_what_is_no_ring_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "1-2-0.ring"
    with pytest.raises(RequestError):
        RequestSlot(path)
    path.write_bytes(b"x" * HEADER_BYTES)
    with pytest.raises(RequestError, match="not a ring"):
        RequestSlot(path)
    assert path.read_bytes() == b"x" * HEADER_BYTES
    path.unlink()
    path.symlink_to("/etc/hostname")
    with pytest.raises(RequestError):
        RequestSlot(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RequestError):
        RequestSlot(path)


def test_a_ring_that_is_cut_short_is_not_made_longer(ring: RingWriter) -> None:
    asker = RequestSlot(ring.path)
    asker.ask(3)
    os.truncate(ring.path, 8)
    with pytest.raises(RequestError):
        asker.ask(3)
    with pytest.raises(RequestError):
        asker.close()  # clears the request
    assert ring.path.stat().st_size == 8


def test_the_words_lie_before_the_cursor() -> None:
    assert max(ASKED_WORD, ANSWER_WORD) < CURSOR_WORD
