"""Keep the daemon's messages of the last minutes, as frames, like a recording."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_HISTORY_S = 300.0
MAX_HISTORY_BYTES = 24 << 20
PIECE_BYTES = 1 << 20


@dataclass(slots=True)
class _Segment:
    """A segment of the history: a keyframe and the frames after it."""

    number: int  # number in the history of the segment's first frame
    begun_s: float
    frames: list[bytes]
    size_bytes: int = 0


class History:
    """The newest frames that the daemon has published.

    The first one is a keyframe. The oldest ones are dropped in whole segments.
    """

    def __init__(self, max_s: float = MAX_HISTORY_S, max_bytes: int = MAX_HISTORY_BYTES) -> None:
        self.end = 0  # number of the history's next frame
        self.size_bytes = 0
        self._max_s = max_s
        self._max_bytes = max_bytes
        self._segments: deque[_Segment] = deque()

    def begin(self, keyframe: bytes, now_s: float) -> None:
        """Begin a segment with a keyframe, and drop segments that are too old."""
        self._segments.append(_Segment(self.end, now_s, []))
        while len(self._segments) > 1 and now_s - self._segments[1].begun_s >= self._max_s:
            self._forget()
        self.add(keyframe)

    def add(self, frame: bytes) -> None:
        """Add a frame, unless its segment would exceed the memory limit."""
        while len(self._segments) > 1 and self.size_bytes + len(frame) > self._max_bytes:
            self._forget()
        if not self._segments or self.size_bytes + len(frame) > self._max_bytes:
            return
        self._segments[-1].frames.append(frame)
        self._segments[-1].size_bytes += len(frame)
        self.size_bytes += len(frame)
        self.end += 1

    def piece(self, number: int) -> tuple[int, list[bytes]]:
        """Return a piece of the history (frames of about PIECE_BYTES), and the number of its first frame.

        It begins with frame `number`, or with the oldest stored frame if that was dropped.
        """
        first, found, size = self.end, list[bytes](), 0
        for segment in self._segments:
            skip = max(0, number - segment.number)
            for at, frame in enumerate(segment.frames[skip:], segment.number + skip):
                if found and size + len(frame) > PIECE_BYTES:
                    return first, found
                first = first if found else at
                found.append(frame)
                size += len(frame)
        return first, found

    def _forget(self) -> None:
        self.size_bytes -= self._segments.popleft().size_bytes
