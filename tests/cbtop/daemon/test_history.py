"""Tests of the daemon's history, which has the last minutes within a limit.

The history always begins with a keyframe.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cbtop.daemon.history import PIECE_BYTES, History

MAX_BYTES = 1_000


def pieces(history: History) -> list[bytes]:
    found, number = list[bytes](), 0
    while number < history.end:
        first, frames = history.piece(number)
        if not frames:
            break
        assert first >= number
        found += frames
        number = first + len(frames)
    return found


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 400)), max_size=60))
def test_it_stays_within_its_bound_and_begins_with_a_keyframe(turns: list[tuple[bool, int]]) -> None:
    history, began = History(max_s=10, max_bytes=MAX_BYTES), False
    for now_s, (is_keyframe, size) in enumerate(turns):
        if is_keyframe:
            history.begin(b"K" * size, now_s)
            began = True
        else:
            history.add(b"f" * size)
        found = pieces(history)
        assert sum(map(len, found)) == history.size_bytes <= MAX_BYTES
        assert bool(found) == began
        assert not found or found[0].startswith(b"K")


def test_what_is_too_old_is_forgotten() -> None:
    history = History(max_s=10, max_bytes=MAX_BYTES)
    for now_s in range(0, 40, 5):
        history.begin(b"K%d" % now_s, now_s)
        history.add(b"f%d" % now_s)
    assert pieces(history) == [b"K25", b"f25", b"K30", b"f30", b"K35", b"f35"]


def test_a_large_one_comes_in_pieces() -> None:
    history = History()
    history.begin(b"K", 0)
    for _ in range(10):
        history.add(bytes(PIECE_BYTES // 3))
    first, frames = history.piece(0)
    assert (first, sum(map(len, frames)) <= PIECE_BYTES) == (0, True)
    assert len(pieces(history)) == 11
