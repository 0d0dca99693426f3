"""A feed that plays a recording as if it were live. The user can go to any moment."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cbtop.client import DEFAULT_WINDOW_S
from cbtop.client.source_record import HISTORY_S
from cbtop.client.store import Store
from cbtop.comparison.baseline import Snapshot
from cbtop.feeds.feed import StoreViews
from cbtop.feeds.frame_decoder import FrameDecoder
from cbtop.feeds.playback import Playback
from cbtop.feeds.recording_search import RecordingSearch
from cbtop.protocol.recording import MAX_REALTIME_NS, RecordingReader
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import SourceSummary, SourceView
from cbtop.viewmodels.time_travel import Mark, ReplayView, TimeView


def baselines_in(path: Path, last_s: float | None = None) -> tuple[Snapshot, ...]:
    """Return a baseline of each process in the recording at `path`, over the whole recording or its last `last_s`
    seconds.

    Raises RecordingError or VersionError.
    """
    with ReplayFeed(path) as feed:
        duration_s = feed.duration_s
    length_s = min(last_s or duration_s, duration_s)
    with ReplayFeed(path, length_s) as feed:
        feed.seek(duration_s)
        return feed.snapshots()


class ReplayFeed(StoreViews):
    """Plays the recording at `path` at the given `speed`, with the `selected` sources (none: all).

    A file of `save_range` opens with its range selected. Raises RecordingError or VersionError.
    """

    is_recording = True

    def __init__(
        self,
        path: Path,
        window_s: float = DEFAULT_WINDOW_S,
        speed: float = 1.0,
        selected: Sequence[str] = (),
        clock_s: Callable[[], float] = time.monotonic,
        *,
        is_history: bool = False,
        curves_s: float = HISTORY_S,
    ) -> None:
        """Open the recording. `is_history` marks a daemon's history.

        After a jump, curves have at least the last `curves_s` seconds.
        """
        super().__init__(selected)
        self._is_history = is_history
        self.is_playing = True
        self._speed = speed
        self._clock_s = clock_s
        self._polled_s = clock_s()
        self._reader = RecordingReader(path)
        decoder = FrameDecoder()
        self.search = RecordingSearch(self._reader, selected, decoder)
        self.playback = Playback(self._reader, window_s, selected, decoder, clock_s, curves_s)

    @property
    def store(self) -> Store:
        return self.playback.store

    def view(self, key: str | None = None, phase: str | None = None, *, window: bool = False) -> SourceView | None:
        """Return the view of a source, over the shown range if there is one."""
        view = super().view(key, phase, window=window or self.range_s is not None)
        if view is not None and self.range_s is None and self.on_its_way is None:
            self.playback.marks.judge(self.now_ns, view)
        return view

    def merged(
        self, mode: MergeMode, key: str | None = None, phase: str | None = None, *, window: bool = False
    ) -> SourceView | None:
        """Return one view of all related sources, such as the ranks of a job, over the shown range if there is
        one.
        """
        return super().merged(mode, key, phase, window=window or self.range_s is not None)

    def sources(self) -> tuple[SourceSummary, ...]:
        """Return every visible source: the main one, then the others with the newest live one first.

        A daemon's history has no main source.
        """
        main = None if self._is_history else self.search.main_source
        return tuple(sorted(super().sources(), key=lambda one: one.key != main))

    @property
    def duration_s(self) -> float:
        return max(0, self._reader.end_ns - self._reader.begin_ns) / 1e9

    @property
    def at_s(self) -> float:
        """Position of the shown moment, in seconds from the beginning of the recording."""
        return (self.playback.target_ns - self._reader.begin_ns) / 1e9

    @property
    def now_ns(self) -> int:
        return self.playback.at_ns

    @property
    def damage(self) -> int:
        """Number of frames of the recording that could not be shown."""
        return len(self.playback.refused) + self._reader.damaged

    def poll(self, timeout_ms: int = 0) -> None:
        """Advance the shown moment by the time since the last poll.

        Does nothing while paused, on the way to a target, or with a range.
        """
        super().poll()
        now_s = self._clock_s()
        passed_s, self._polled_s = now_s - self._polled_s, now_s
        if self.is_playing and self.range_s is None and self.on_its_way is None:
            self.seek(self.at_s + passed_s * self._speed)

    def seek(self, to_s: float) -> None:
        """Show the moment `to_s`, or the nearest one in the recording."""
        self.aim(to_s)
        self.advance()

    def aim(self, to_s: float) -> None:
        """Make the moment `to_s` the target, instead of a range. `advance` moves there."""
        self.playback.aim(to_s)

    def advance(self, limit_s: float = math.inf) -> bool:
        """Read the recording for at most `limit_s` seconds. Return whether the target is reached. Until then, the
        view is not valid.
        """
        return self.playback.advance(limit_s)

    def select(self, one_s: float, other_s: float) -> None:
        """Make the time between two moments the target. Until `aim` is called, only its steps are shown.

        A step is in the range if the daemon reported its end within the range.
        """
        self.playback.select(one_s, other_s)

    @property
    def range_s(self) -> tuple[float, float] | None:
        """Begin and end of the shown range in seconds of the recording. None without a range."""
        return self.playback.range_s

    @property
    def on_its_way(self) -> float | None:
        """Completed part of the move to the target (0 to 1). None at the target."""
        return self.playback.on_its_way

    @property
    def marks(self) -> Mapping[int, Mark]:
        """The notable events by second, in the part of the recording that was read."""
        return self.playback.marks.found

    def watched(self) -> TimeView:
        """Return the time bar of the whole recording, with notable events in the part that was read."""
        return TimeView(self.at_s, self.duration_s, self.marks, self.range_s)

    def follow_records(self, on: bool) -> None:
        """Start or stop storing single records, which only a timeline needs. All else stays."""
        self.playback.follow_records(on)

    def replay(self) -> ReplayView:
        """Return the position in the recording, with a description of the recording."""
        origin = self._reader.origin
        begin_ns = origin.realtime_ns + self._reader.begin_ns - origin.monotonic_ns
        return ReplayView(
            file=self._reader.path.name,
            host=origin.host,
            recorded_s=min(max(begin_ns, 0), MAX_REALTIME_NS) / 1e9,
            at_s=self.at_s,
            duration_s=self.duration_s,
            is_complete=self._reader.is_closed,
            is_history=self._is_history,
            range_s=self.range_s,
        )

    @property
    def is_complete(self) -> bool:
        """Always True: a recording waits for no daemon."""
        return True

    @property
    def left_out(self) -> str:
        """Number, names and reasons of the sources that were dropped for lack of memory, as one text. "" without
        any.
        """
        return self.store.complaint()

    @property
    def refused(self) -> str:
        """Always "": a recording refuses no viewer."""
        return ""

    def status(self) -> str:
        """Return one line about the state of the recording."""
        damaged = f" · damaged messages: {self.damage}" if self.damage else ""
        damaged += f" ({self.playback.reason})" if self.playback.reason else ""
        left_out = f" · {self.left_out}" if self.left_out else ""
        name = "what its daemon remembers" if self._is_history else self._reader.path.name
        return f"{name}{'' if self._speed == 1 else f' · {self._speed:g}×'}{damaged}{left_out}"

    def close(self) -> None:
        """Close the file."""
        self._reader.close()
