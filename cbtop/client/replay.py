"""The replay feed: a recording shown as if it happened now, with a position that can be moved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Self

from cbtop.client import DEFAULT_WINDOW_S
from cbtop.client.feed import FeedEnd, StoreViews
from cbtop.client.store import Store
from cbtop.protocol import codec
from cbtop.protocol.errors import DecodeError, LimitError
from cbtop.protocol.messages import DaemonHello, Message
from cbtop.protocol.recording import MAX_REALTIME_NS, Frame, FrameKind, RecordingReader
from cbtop.viewmodels.model import ReplayView

SHOWN = (FrameKind.LIVE, FrameKind.KEYFRAME)  # records are for exporters and a timeline
# A jump begins so long before its target, at a keyframe: what is shown of the last seconds has something to show.
WARM_UP_NS = 1_000_000_000
WALK_NS = 10_000_000_000  # so far it goes forward frame by frame
RECENT_NS = 10_000_000_000  # a timeline is made of the newest records of so long
MAX_KEPT_BYTES = 1 << 20  # of a message that is kept decoded


class ReplayFeed(StoreViews):
    """Plays the recording at `path`, `speed` times as fast: all of it, or the `selected` sources.

    Raises RecordingError or VersionError.
    """

    def __init__(
        self,
        path: Path,
        window_s: float = DEFAULT_WINDOW_S,
        speed: float = 1.0,
        selected: Sequence[str] = (),
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(window_s, selected)
        self.is_playing = True
        self.touched = 0  # frames decoded so far
        self._speed = speed
        self._clock_s = clock_s
        self._polled_s = clock_s()
        self._reader = RecordingReader(path)
        # One keyframe says much that the last one said: to decode a catalog anew is a third of a jump.
        self._kept = lru_cache(maxsize=16)(codec.decode)
        self._follows_records = False
        self._frames: Iterator[Frame] = iter(())
        self._next: Frame | None = None
        self._refused: set[int] = set()  # where the frames lie whose messages were none
        self._reason = ""  # why the last of them was refused
        self._at_ns = self._reader.begin_ns
        self._jump(self._at_ns)

    @property
    def duration_s(self) -> float:
        return max(0, self._reader.end_ns - self._reader.begin_ns) / 1e9

    @property
    def at_s(self) -> float:
        """Where it is, in seconds from the beginning."""
        return (self._at_ns - self._reader.begin_ns) / 1e9

    @property
    def damage(self) -> int:
        """How many frames were met that could not be shown."""
        return len(self._refused) + self._reader.damaged

    def poll(self, timeout_ms: int = 0) -> None:
        """Go on by the time that has passed, while it plays."""
        now_s = self._clock_s()
        passed_s, self._polled_s = now_s - self._polled_s, now_s
        if self.is_playing:
            self.seek(self.at_s + passed_s * self._speed)

    def seek(self, to_s: float) -> None:
        """Show the moment `to_s`, or the end of the recording that is nearer."""
        target_ns = self._moment_ns(to_s)
        if self._at_ns <= target_ns <= self._at_ns + WALK_NS:
            self._walk(target_ns)
        else:
            self._jump(target_ns)

    def seek_from(self, begin_s: float, to_s: float) -> None:
        """The same, with all that was said since `begin_s`: the window is as long as it was for who watched then."""
        self._jump(self._moment_ns(begin_s))
        self._walk(self._moment_ns(to_s))

    def follow_records(self, on: bool) -> None:
        """Show every record too, as a timeline needs them, or no more. What else is shown stays as it is."""
        if on == self._follows_records:
            return
        self._follows_records = on
        self._store.keep_records(on)
        go_on = None if self._next is None else self._next.offset
        if on:
            go_on = self._catch_up(go_on)
        if go_on is not None:
            self._frames = self._reader.frames(go_on, self._wanted)
            self._next = next(self._frames, None)

    def replay(self) -> ReplayView:
        """Where it is in what."""
        origin = self._reader.origin
        begin_ns = origin.realtime_ns + self._reader.begin_ns - origin.monotonic_ns
        return ReplayView(
            file=self._reader.path.name,
            host=origin.host,
            recorded_s=min(max(begin_ns, 0), MAX_REALTIME_NS) / 1e9,
            at_s=self.at_s,
            duration_s=self.duration_s,
            is_complete=self._reader.is_closed,
        )

    @property
    def is_complete(self) -> bool:
        """A recording has told what ran at its moment."""
        return True

    @property
    def left_out(self) -> str:
        """How many sources there was no room for, which and why; empty where there is none."""
        return self._store.complaint()

    @property
    def refused(self) -> str:
        """A recording refuses nobody."""
        return ""

    def status(self) -> str:
        """One line about the recording."""
        damaged = f" · damaged messages: {self.damage}" if self.damage else ""
        damaged += f" ({self._reason})" if self._reason else ""
        left_out = f" · {self.left_out}" if self.left_out else ""
        return f"{self._reader.path.name}{'' if self._speed == 1 else f' · {self._speed:g}×'}{damaged}{left_out}"

    def finished(self) -> FeedEnd | None:
        """At its end a recording stays where it is."""
        return None

    def close(self) -> None:
        """Let go of the file."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _moment_ns(self, at_s: float) -> int:
        return self._reader.begin_ns + round(min(max(at_s, 0), self.duration_s) * 1e9)

    @property
    def _wanted(self) -> tuple[FrameKind, ...]:
        return (*SHOWN, FrameKind.RECORDS) if self._follows_records else SHOWN

    def _catch_up(self, until: int | None) -> int | None:
        """Show the records until now, of the frames before `until`; gives where the first later one lies."""
        for frame in self._reader.frames(self._reader.keyframe_before(self._at_ns - RECENT_NS), (FrameKind.RECORDS,)):
            if until is not None and frame.offset > until:
                break
            if min(frame.time_ns, self._reader.end_ns) > self._at_ns:
                return frame.offset
            self._apply(frame)
        return until

    def _jump(self, target_ns: int) -> None:
        self._store = Store(self._store.window_s)
        self._store.keep_records(self._follows_records)
        back_ns = max(WARM_UP_NS, RECENT_NS * self._follows_records)
        self._frames = self._reader.frames(self._reader.keyframe_before(target_ns - back_ns), self._wanted)
        self._next = next(self._frames, None)
        self._walk(target_ns)

    def _walk(self, target_ns: int) -> None:
        # A frame that is said to be later than the end would keep back all that follows it: it comes at the end.
        while self._next is not None and min(self._next.time_ns, self._reader.end_ns) <= target_ns:
            self._apply(self._next)
            self._next = next(self._frames, None)
        self._at_ns = target_ns

    def _apply(self, frame: Frame) -> None:
        self.touched += 1
        try:
            decode = self._decode if frame.kind == FrameKind.KEYFRAME else codec.decode
            for message in frame.messages(decode):
                # A keyframe of the daemon we know takes nothing from us: what is shown of the past stays.
                if not (isinstance(message, DaemonHello) and self._knows(message)):
                    self._store.apply(message)
        except DecodeError as error:
            self._refused.add(frame.offset)
            self._reason = str(error)
            if isinstance(error, LimitError):
                self._frames = iter(())  # until a jump, which begins anew

    def _decode(self, part: bytes) -> Message | None:
        return self._kept(part) if len(part) <= MAX_KEPT_BYTES else codec.decode(part)

    def _knows(self, hello: DaemonHello) -> bool:
        known = self._store.daemon
        return known is not None and (known.host, known.boot_id, known.pid) == (hello.host, hello.boot_id, hello.pid)
