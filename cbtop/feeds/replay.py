"""A feed that plays a recording as if it were live. The user can move to any moment."""

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
    """Return a baseline for each process of the recording at `path`.

    A baseline covers the whole recording, or the last `last_s` seconds. Raises RecordingError or VersionError.
    """
    with ReplayFeed(path) as feed:
        duration_s = feed.duration_s
    length_s = min(last_s or duration_s, duration_s)
    with ReplayFeed(path, length_s) as feed:
        feed.seek(duration_s)
        return feed.snapshots()


class ReplayFeed(StoreViews):
    """Plays the recording at `path` with the given `speed`. The feed shows the `selected` sources, or all sources if
    none are selected.

    A file that was written by `save_range` opens with its range selected. Raises RecordingError or VersionError.
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
        """Open the recording. Set `is_history` if the file is a daemon's history.

        After a jump, curves cover at least the last `curves_s` seconds.
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
        """Return the view of a source. If a range is shown, the view covers the range."""
        view = super().view(key, phase, window=window or self.range_s is not None)
        if view is not None and self.range_s is None and self.on_its_way is None:
            self.playback.marks.judge(self.now_ns, view)
        return view

    def merged(
        self, mode: MergeMode, key: str | None = None, phase: str | None = None, *, window: bool = False
    ) -> SourceView | None:
        """Return one view that merges all related sources, such as the ranks of a job.

        If a range is shown, the view covers the range.
        """
        return super().merged(mode, key, phase, window=window or self.range_s is not None)

    def sources(self) -> tuple[SourceSummary, ...]:
        """Return every visible source: the main one, then the others, the newest live one first.

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

        Do nothing while paused, while moving to a target, or if a range is shown.
        """
        super().poll()
        now_s = self._clock_s()
        passed_s, self._polled_s = now_s - self._polled_s, now_s
        if self.is_playing and self.range_s is None and self.on_its_way is None:
            self.seek(self.at_s + passed_s * self._speed)

    def seek(self, to_s: float) -> None:
        """Show the moment `to_s` of the recording. A moment outside of the recording is replaced by its begin or
        end.
        """
        self.aim(to_s)
        self.advance()

    def aim(self, to_s: float) -> None:
        """Set the target of the replay to the moment `to_s` of the recording, and stop showing a range.

        `advance` moves to the target.
        """
        self.playback.aim(to_s)

    def advance(self, limit_s: float = math.inf) -> bool:
        """Read the recording for at most `limit_s` seconds. Return whether the target is reached. The view is not
        valid before that.
        """
        return self.playback.advance(limit_s)

    def select(self, one_s: float, other_s: float) -> None:
        """Set the target of the replay to a range between two moments. Only steps in the range are shown until `aim`
        is called.

        A step belongs to the range if the daemon reported the end of the step within the range.
        """
        self.playback.select(one_s, other_s)

    @property
    def range_s(self) -> tuple[float, float] | None:
        """Begin and end of the shown range in seconds from the beginning of the recording, or None if no range is
        shown.
        """
        return self.playback.range_s

    @property
    def on_its_way(self) -> float | None:
        """The completed share (0 to 1) of the move to the target moment. None if the target is reached."""
        return self.playback.on_its_way

    @property
    def marks(self) -> Mapping[int, Mark]:
        """The notable events by second, in the part of the recording that was read until now."""
        return self.playback.marks.found

    def watched(self) -> TimeView:
        """Return the time bar of the whole recording.

        The time bar has the notable events of the part that was read until now.
        """
        return TimeView(self.at_s, self.duration_s, self.marks, self.range_s)

    def follow_records(self, on: bool) -> None:
        """Start or stop storing every single record, which only a timeline needs. All other data stays the same."""
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
        """Always True, because a recording does not wait for answers of a daemon."""
        return True

    @property
    def left_out(self) -> str:
        """One text with the number, names and reasons of the sources that were dropped for lack of memory. "" if no
        source was dropped.
        """
        return self.store.complaint()

    @property
    def refused(self) -> str:
        """Always "", because a recording cannot refuse a viewer."""
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
