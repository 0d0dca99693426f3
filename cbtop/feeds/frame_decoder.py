"""Decode the messages in the frames of a recording."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from cbtop.protocol import codec
from cbtop.protocol.messages import Message
from cbtop.protocol.recording import Frame, FrameKind

MAX_KEPT_BYTES = 1 << 20  # Messages of more bytes than this are not cached.


class FrameDecoder:
    """Decodes frames of a recording, and caches the last 16 messages of keyframes.

    Keyframes mostly repeat their messages. Decoding the same catalog again would take a third of a jump's time.
    """

    def __init__(self) -> None:
        self._kept = lru_cache(maxsize=16)(codec.decode)

    def messages(self, frame: Frame) -> Iterator[Message]:
        """Yield the messages in `frame`. Raises DecodeError if a message cannot be decoded."""
        return frame.messages(self._decode if frame.kind == FrameKind.KEYFRAME else codec.decode)

    def _decode(self, part: bytes) -> Message | None:
        return self._kept(part) if len(part) <= MAX_KEPT_BYTES else codec.decode(part)
