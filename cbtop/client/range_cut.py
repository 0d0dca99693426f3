"""Write a time range of a recording to a new recording.

It begins at the last keyframe before the range, which has the complete state.
"""

from __future__ import annotations

from pathlib import Path

from cbtop.client.stream_recorder import SavedHistory, new_path
from cbtop.protocol.errors import RecordingError
from cbtop.protocol.recording import FrameKind, RecordingReader, RecordingWriter, encode_frame, frame_bytes

# The copy also has the records of the second before the range. Viewers need them to count the range's missing
# records.
LEAD_NS = 1_000_000_000
MAX_RANGE_BYTES = 1 << 30  # the new recording has at most this many bytes, like every recording


class RangeCut:
    """The time from `begin_ns` to `end_ns` of the recording in `reader`. `close` also closes the reader."""

    def __init__(self, reader: RecordingReader, begin_ns: int, end_ns: int) -> None:
        self._reader = reader
        self._begin_ns, self._end_ns = begin_ns, end_ns

    def save(self, directory: Path) -> SavedHistory:
        """Write the range to a new recording in `directory`. Raises RecordingError with the reason."""
        writer = RecordingWriter(new_path(directory, "range"), self._reader.origin, MAX_RANGE_BYTES)
        try:
            writer.append(encode_frame(FrameKind.RANGE, self._begin_ns, ()))
            offset = self._reader.keyframe_before(self._begin_ns - LEAD_NS)
            for frame in self._reader.frames(offset, (FrameKind.LIVE, FrameKind.KEYFRAME, FrameKind.RECORDS)):
                if min(frame.time_ns, self._reader.end_ns) > self._end_ns:
                    break
                if not writer.append(frame_bytes(frame.kind, frame.time_ns, frame.payload)):
                    raise RecordingError(
                        f"{writer.path}: a range is at most {MAX_RANGE_BYTES >> 20} MiB; it is cut short"
                    )
            writer.append(encode_frame(FrameKind.RANGE, self._end_ns, ()))
        finally:
            writer.close()
        return SavedHistory(writer.path, writer.size_bytes)

    def close(self) -> None:
        """Close the file."""
        self._reader.close()
