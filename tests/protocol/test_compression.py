"""Payloads come back as they were, those of older recordings too, and a damaged or huge payload is refused."""

from __future__ import annotations

import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.protocol import compression
from cbtop.protocol.compression import ERRORS, MAX_PIECE_BYTES, compressed, decompressed
from cbtop.protocol.errors import DecodeError

MIB = 1 << 20


def whole(payload: bytes) -> bytes:
    pieces = list(decompressed(payload))
    assert all(pieces)
    return b"".join(pieces)


@given(st.lists(st.binary(max_size=400), max_size=30), st.lists(st.binary(max_size=400), max_size=30))
def test_two_zstd_frames_come_back_joined(first: list[bytes], second: list[bytes]) -> None:
    assert whole(compressed(first) + compressed(second)) == b"".join((*first, *second))


@given(st.binary(max_size=5_000))
def test_a_payload_of_an_older_recording_comes_back(data: bytes) -> None:
    assert whole(zlib.compress(data, 1)) == data


@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 14])
def test_the_size_of_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr(compression, "PIECE_BYTES", piece_bytes)
    data = bytes(range(256)) * 40
    for payload in (compressed([data[:3]]) + compressed([data[3:]]), zlib.compress(data)):
        assert whole(payload) == data


def test_a_payload_that_was_cut_short_anywhere_is_refused() -> None:
    data = bytes(range(256)) * 4
    head = compressed([b"\x93"])
    for payload in (head + compressed([data]), zlib.compress(data)):
        for size in range(1, len(payload)):
            if size != len(head) or payload[0] == 0x78:  # else the first of two frames is whole
                with pytest.raises((DecodeError, *ERRORS)):
                    whole(payload[:size])


@pytest.mark.parametrize("payload", [b"no zstd", compressed([b"a"]) + b"more", compressed([b"a"])[:-1] + b"\xff\xff"])
def test_bytes_that_are_no_zstd_frame_are_refused(payload: bytes) -> None:
    with pytest.raises((DecodeError, *ERRORS)):
        whole(payload)


def test_a_third_zstd_frame_is_refused() -> None:
    with pytest.raises(DecodeError, match="more than 2 zstd frames"):
        whole(3 * compressed([b"a"]))


@pytest.mark.parametrize("of", [lambda data: compressed([data]), zlib.compress], ids=["zstd", "zlib"])
def test_a_payload_that_becomes_too_large_is_refused_a_piece_after_its_limit(of: object) -> None:
    assert callable(of)
    payload = of(bytes(64 * MIB))
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match=r"inflates to more than [\d,]+ bytes"):
            for _ in decompressed(payload):
                pass
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_PIECE_BYTES
    finally:
        tracemalloc.stop()


def test_a_window_larger_than_ours_is_refused() -> None:
    frame = bytearray(compressed([bytes(1000)]))
    huge = bytes(frame[:4]) + b"\x00\xa8" + bytes(frame[6:])  # RFC 8878, 3.1.1.1.2: a window of 2 GiB
    with pytest.raises(ERRORS, match=r"(?i)memory|window"):
        whole(huge)
