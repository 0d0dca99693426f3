"""Write a daemon's messages to a recording.

The messages are either live messages, or the daemon's history of the last minutes.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from cbtop.client.collector import SILENT_AFTER_S
from cbtop.client.own_daemon import NO_ANSWER, DaemonIfNone
from cbtop.client.store import Store
from cbtop.daemon.history import MAX_HISTORY_BYTES
from cbtop.errors import CbtopError
from cbtop.protocol import codec
from cbtop.protocol.ended import ring_of
from cbtop.protocol.endpoint import stopped_holder
from cbtop.protocol.errors import DecodeError, VersionError
from cbtop.protocol.keys import ViewerKeys
from cbtop.protocol.messages import DaemonGoodbye, Heartbeat, HistoryPiece, Message, SourceCatalog
from cbtop.protocol.publisher import HISTORY_PREFIX, JOIN_PREFIX, LIVE, RECORDS
from cbtop.protocol.record_batch import RecordTally, tally
from cbtop.protocol.recording import SUFFIX, FrameKind, RecordingOrigin, RecordingWriter, encode_frame
from cbtop.protocol.subscriber import Subscriber
from cbtop.protocol.vocabulary import SourceStatus

KEYFRAME_S = 5.0
ANSWER_WITHIN_S = 5.0
KINDS = {LIVE: FrameKind.LIVE, RECORDS: FrameKind.RECORDS}


class StreamRecorder:
    """Records the messages of the daemon at `endpoint`, without sources in `left_out`.

    If `endpoint` is None: of this user's daemon, which is started in this process if none runs. Raises RecordingError
    if the file cannot be made, EndpointError for an invalid address, and KeysError if an address on another host
    needs `keys`.
    """

    def __init__(
        self,
        path: Path,
        endpoint: str | None,
        max_bytes: int,
        *,
        keys: ViewerKeys | None = None,
        overwrite: bool = False,
        left_out: Collection[str] = (),
    ) -> None:
        self._left_out = left_out
        self.store = Store()
        self.tallies: dict[str, RecordTally] = {}
        self.damaged = 0  # number of messages that could not be decoded, and so were not recorded
        self.is_full = False
        with ExitStack() as opened:
            self._daemon = DaemonIfNone(endpoint)
            opened.callback(self._daemon.close)
            self._subscriber = Subscriber(self._daemon.endpoint, keys, topics=(RECORDS, LIVE))
            opened.callback(self._subscriber.close)
            # Opening may overwrite a file, so it comes last, after all other errors.
            self._writer = RecordingWriter(path, _origin(), max_bytes, overwrite=overwrite)
            opened.pop_all()
        self._heard_s = self._asked_s = time.monotonic()
        self._began = self._has_left = self._has_seen_running = False

    @property
    def unanswered(self) -> str:
        """The address without an answer, and the reason or a hint for the user, as one text."""
        return f"{self._daemon.endpoint}: {self._daemon.trouble or self.trouble or NO_ANSWER}"

    @property
    def size_bytes(self) -> int:
        """Size of the recording in bytes."""
        return self._writer.size_bytes

    @property
    def has_begun(self) -> bool:
        """Whether the first keyframe has arrived. A recording begins with a keyframe."""
        return self._began

    @property
    def has_only_ended(self) -> bool:
        """Whether every process had ended before the recording began. False once a record arrives."""
        return (
            bool(self.tallies) and not self._has_seen_running and not any(one.taken for one in self.tallies.values())
        )

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of the daemon."""
        return time.monotonic() - self._heard_s

    @property
    def trouble(self) -> str:
        """Why nothing arrives from the daemon, or "" if unknown."""
        return self._subscriber.trouble or stopped_holder(self._daemon.endpoint)

    @property
    def refused(self) -> str:
        """Why the daemon will never accept this recorder (such as a missing key), or ""."""
        return self._subscriber.trouble if self._subscriber.is_refused else ""

    def poll(self, timeout_ms: int) -> None:
        """Record a message, if one arrives in time. Raises VersionError if the daemon has a different major version,
        and RecordingError if the disk is full.
        """
        now_s = time.monotonic()
        if now_s - self._asked_s > KEYFRAME_S:
            self._subscriber.ask(JOIN_PREFIX)
            self._asked_s = now_s
        topic, frames = self._subscriber.receive_frames(timeout_ms)
        if not frames:
            self._daemon.check(is_silent=self._has_left or self.silent_s > SILENT_AFTER_S)
            return
        self._heard_s = time.monotonic()
        kind = KINDS.get(topic, FrameKind.KEYFRAME)
        self._began |= kind is FrameKind.KEYFRAME
        if not self._began:
            return  # The first keyframe repeats what came before it.
        known = set(self.store.sources)
        try:
            heard = list(self._kept(frames))
            messages = [message for _, message in heard if message is not None]
            self._has_left = any(isinstance(message, DaemonGoodbye) for message in messages)
            for message in messages:
                self.store.apply(message)
                tally(self.tallies, message)
            self._has_seen_running = self._has_seen_running or any(
                one.state is not None and one.state.state not in (SourceStatus.ENDED, SourceStatus.GONE)
                for one in self.store.sources.values()
            )
        except VersionError:
            raise
        except DecodeError:
            self.damaged += 1
            return
        if kind is FrameKind.LIVE and any(_heals(message, known) for message in messages):
            return  # We have requested keyframes, which repeat this message.
        kept = [frame for frame, _ in heard]
        self.is_full = bool(kept) and not self._writer.append(encode_frame(kind, time.perf_counter_ns(), kept))

    def _kept(self, frames: Sequence[bytes]) -> Iterator[tuple[bytes, Message | None]]:
        """Yield each frame with its message, without excluded processes. The message is None if its type is
        unknown.
        """
        for frame in frames:
            message = codec.decode(frame)
            if isinstance(message, Heartbeat):
                sources = tuple(state for state in message.sources if not self._is_left_out(state.source))
                if len(sources) < len(message.sources):
                    message = replace(message, sources=sources)
                    frame = codec.encode(message)
            elif self._is_left_out(getattr(message, "source", "")):
                continue
            yield frame, message

    def _is_left_out(self, source: str) -> bool:
        """Whether the recording excludes the source with this key."""
        return bool(self._left_out) and ring_of(source) in self._left_out

    def close(self) -> None:
        """Close the link to the daemon and the recording."""
        self._subscriber.close()
        self._daemon.close()
        self._writer.close()


def _heals(message: Message, known: set[str]) -> bool:
    """Whether `message` repeats the whole catalog of a source, and the source is already known."""
    return isinstance(message, SourceCatalog) and message.complete and message.source in known


@dataclass(frozen=True, slots=True)
class SavedHistory:
    """A new recording of the history that a daemon remembers."""

    path: Path
    size_bytes: int


def new_path(directory: Path, what: str = "") -> Path:
    """Return the path in `directory` for a new recording."""
    return directory / f"cbtop-{what}{'-' * bool(what)}{datetime.now():%Y%m%d-%H%M%S}{SUFFIX}"


def save_history(endpoint: str, keys: ViewerKeys | None, directory: Path) -> SavedHistory:
    """Write the history of the daemon at `endpoint` to a new file in `directory`. Blocks until all of it has arrived.

    Raises CbtopError or ProtocolError with the reason.
    """
    path = new_path(directory)
    subscriber = Subscriber(endpoint, keys, topics=())
    try:
        head, frames = _ask_history(subscriber, 0)
        if not frames:
            raise CbtopError(f"the daemon at {subscriber.endpoint} keeps no history")
        origin = RecordingOrigin(head.host, head.monotonic_ns, head.realtime_ns)
        writer = RecordingWriter(path, origin, 2 * MAX_HISTORY_BYTES)
        try:
            # The history grows during this loop. Stop at the message that was last at our first request.
            end = head.end
            while frames and all(writer.append(frame) for frame in frames):
                number = head.first + len(frames)
                if number >= end:
                    break
                head, frames = _ask_history(subscriber, number)
        finally:
            writer.close()
    finally:
        subscriber.close()
    return SavedHistory(path, writer.size_bytes)


def _ask_history(subscriber: Subscriber, number: int) -> tuple[HistoryPiece, list[bytes]]:
    """Request a piece of the daemon's history and return it. One at a time, because a full queue would drop
    pieces.
    """
    topic = subscriber.ask(HISTORY_PREFIX, b"/%d" % number)
    deadline_s = time.monotonic() + ANSWER_WITHIN_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        answered, frames = subscriber.receive_frames(int(1000 * left_s) + 1)
        if answered == topic:
            head = codec.decode(frames[0])
            if not isinstance(head, HistoryPiece):
                raise CbtopError(f"the daemon at {subscriber.endpoint} answered with something else than its history")
            return head, frames[1:]
    why = subscriber.trouble or "it is gone, or older than this cbtop"
    raise CbtopError(f"the daemon at {subscriber.endpoint} did not answer: {why}")


def _origin() -> RecordingOrigin:
    return RecordingOrigin(socket.gethostname(), time.perf_counter_ns(), time.time_ns())
