"""The replay feed: plays a recording as if it were live, with a position that can be moved."""

from __future__ import annotations

import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Self

from cbtop.client import DEFAULT_WINDOW_S
from cbtop.client.range_cut import LEAD_NS, RangeCut
from cbtop.client.source_record import HISTORY_S
from cbtop.client.store import Store
from cbtop.client.window import reaches_back_s
from cbtop.comparison.baseline import Snapshot
from cbtop.feeds.feed import FeedEnd, StoreViews
from cbtop.feeds.marks import Marks
from cbtop.protocol import codec
from cbtop.protocol.errors import DecodeError, LimitError
from cbtop.protocol.messages import DaemonHello, Heartbeat, Message, RecordBatch, SourceCatalog, StatsUpdate
from cbtop.protocol.recording import MAX_REALTIME_NS, Frame, FrameKind, RecordingReader
from cbtop.viewmodels.merge import KEYS_JOINED_BY
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.selection import has_data, is_selected
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.time_travel import Mark, ReplayView, TimeView

SHOWN = (FrameKind.LIVE, FrameKind.KEYFRAME)  # record frames are only read for exporters and the timeline
SLACK = 1.1  # extra reach for a curve: its samples are one a second, and some come late
# A jump begins this much earlier, and the states at the last keyframes are kept, so that small steps back are fast.
STEPS_BACK_NS = 15_000_000_000
MAX_STATES, MAX_STATES_BYTES = 4, 64 << 20
RECENT_NS = 10_000_000_000  # a timeline shows the last 10 s, or those before the end of a process
RANGE_RECENT_NS = 60_000_000_000  # the same for a chosen range
MAX_KEPT_BYTES = 1 << 20  # largest message kept decoded
STEPS_WITHIN_NS = 300_000_000_000  # how far from the current moment steps are searched
FEW_STEPS_NS = 10_000_000_000  # first attempt when searching backwards


@dataclass(frozen=True, slots=True)
class _State:
    """The state before the frame at `offset`, at time `at_ns`."""

    at_ns: int
    offset: int
    store: bytes  # pickled: takes half the time of a deep copy, and is one object


@dataclass(slots=True)
class _Range:
    """The chosen range of a recording, shown instead of one moment."""

    begin_ns: int
    end_ns: int
    from_ns: int | None = None  # time of the last frame before the range; None until the range begins
    until_ns: int = 0  # time of the last frame in the range


def baselines_in(path: Path, last_s: float | None = None) -> tuple[Snapshot, ...]:
    """Return a baseline per process of the recording at `path`, over all of it or its last `last_s` seconds.

    Raises RecordingError or VersionError.
    """
    with ReplayFeed(path) as feed:
        duration_s = feed.duration_s
    length_s = min(last_s or duration_s, duration_s)
    with ReplayFeed(path, length_s) as feed:
        feed.seek(duration_s)
        return feed.snapshots()


class ReplayFeed(StoreViews):
    """Plays the recording at `path` at `speed`, with all sources or the `selected` ones.

    A file written by `save_range` shows that range at first.

    Raises RecordingError or VersionError.
    """

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
        """`is_history`: the file is a daemon's history. After a jump, curves cover at least `curves_s` seconds."""
        super().__init__(window_s, selected)
        self._is_history = is_history
        self.is_playing = True
        self.touched = 0  # frames decoded so far
        self._window_s = window_s
        self._speed = speed
        self._clock_s = clock_s
        self._polled_s = clock_s()
        self._reader = RecordingReader(path)
        # Consecutive keyframes repeat many messages; decoding a catalog again would take a third of a jump.
        self._kept = lru_cache(maxsize=16)(codec.decode)
        self._follows_records = False
        self._frames: Iterator[Frame] = iter(())
        self._next: Frame | None = None
        self._refused: set[int] = set()  # offsets of frames with undecodable messages
        self._reason = ""  # why the last of them was rejected
        # A jump begins at a keyframe this long before its target: as far back as the longest curve and the window
        # reach. The view is then the same as after playing everything before.
        self._reach_ns = round(max(curves_s * SLACK, reaches_back_s(window_s)) * 1e9)
        self._marks = Marks(self._reader.begin_ns)
        self._states: deque[_State] = deque(maxlen=MAX_STATES)
        self._range: _Range | None = None
        self._at_ns = self._begun_ns = self._whole_from_ns = self._target_ns = self._reader.begin_ns
        self._said_ns = self._begun_ns  # time of the last frame shown
        self._is_there = False
        if self._reader.range_from_ns is None:
            self._jump(self._target_ns)
        else:
            self.select((self._reader.range_from_ns - self._reader.begin_ns) / 1e9, self.duration_s)
        self.advance()

    def view(self, key: str | None = None, phase: str | None = None, *, window: bool = False) -> SourceView | None:
        """Return the view of a source, of the chosen range if there is one."""
        view = super().view(key, phase, window=window or self._range is not None)
        if view is not None and self._range is None and self._is_there:
            self._marks.judge(self._at_ns, view)
        return view

    def merged(
        self, mode: MergeMode, key: str | None = None, phase: str | None = None, *, window: bool = False
    ) -> SourceView | None:
        """Return one view of all sources that belong together, of the chosen range if there is one."""
        return super().merged(mode, key, phase, window=window or self._range is not None)

    @property
    def duration_s(self) -> float:
        return max(0, self._reader.end_ns - self._reader.begin_ns) / 1e9

    @property
    def at_s(self) -> float:
        """Position in seconds from the beginning."""
        return (self._target_ns - self._reader.begin_ns) / 1e9

    @property
    def now_ns(self) -> int:
        return self._at_ns

    @property
    def damage(self) -> int:
        """Number of frames that could not be shown."""
        return len(self._refused) + self._reader.damaged

    def poll(self, timeout_ms: int = 0) -> None:
        """Advance by the time that has passed if it plays, shows no range, and is not seeking."""
        super().poll()
        now_s = self._clock_s()
        passed_s, self._polled_s = now_s - self._polled_s, now_s
        if self.is_playing and self._range is None and self.on_its_way is None:
            self.seek(self.at_s + passed_s * self._speed)

    def seek(self, to_s: float) -> None:
        """Show the moment `to_s`, limited to the recording."""
        self.aim(to_s)
        self.advance()

    def steps_away(self, from_s: float, steps: int, key: str | None) -> tuple[float, int]:
        """Return the moment `steps` steps of source `key` after `from_s`, and how many were found.

        Negative `steps` go back.

        A joined key counts the steps of all its members. If `key` is None or has no data, steps of any source
        count. The search covers five minutes in each direction. Steps reported in one update (four a second) count
        as one.
        """
        from_ns = self._moment_ns(from_s)
        # The source may be unknown at the moment shown: a history begins before later processes do.
        keys = None if key is None else frozenset(key.split(KEYS_JOINED_BY))
        found = self._steps_from(from_ns, steps, keys)
        if found is None:
            found = self._steps_from(from_ns, steps, None)
        if not found:
            return from_s, 0
        return (found[-1] - self._reader.begin_ns) / 1e9, len(found)

    def _steps_from(self, from_ns: int, steps: int, keys: Container[str] | None) -> list[int] | None:
        """Return the moments at which the next (or last) `steps` steps ended, or None without any report of them."""
        if steps > 0:
            told = self._steps_told(keys, from_ns, from_ns + STEPS_WITHIN_NS)
            if (first := next(told, None)) is None:
                return None
            return list(islice((at_ns for at_ns in chain([first], told) if at_ns > from_ns), steps))
        for within_ns in (FEW_STEPS_NS, STEPS_WITHIN_NS):
            moments = list(self._steps_told(keys, from_ns - within_ns, from_ns))
            if len(moments) > 1 - steps:  # the oldest is where reading began
                break
        # A moment shows the last update before it, so its last step is the first one to take off.
        return moments[:-1][::-1][:-steps] if moments else None

    def _steps_told(self, keys: Container[str] | None, begin_ns: int, end_ns: int) -> Iterator[int]:
        """Yield each moment at which an update reported more ended steps, beginning with the first update."""
        steps, scratch = -1, Store()
        for frame in self._reader.frames(self._reader.keyframe_before(begin_ns), SHOWN):
            at_ns = min(frame.time_ns, self._reader.end_ns)
            if at_ns > end_ns:
                return
            decode = self._decode if frame.kind == FrameKind.KEYFRAME else codec.decode
            try:
                for message in frame.messages(decode):
                    if not isinstance(message, SourceCatalog | StatsUpdate):
                        continue
                    if keys is None or message.source in keys:
                        scratch.apply(message)
            except DecodeError:
                continue  # counted as damaged once it is shown
            now = sum(record.steps_ended for record in scratch.sources.values())
            if scratch.sources and now > steps:
                yield at_ns
                steps = now

    def select(self, one_s: float, other_s: float) -> None:
        """Seek to the range between two moments. Only its steps are shown until `aim` goes elsewhere.

        A step belongs to the range if the daemon reported its end within it.
        """
        begin_ns, end_ns = sorted((self._moment_ns(one_s), self._moment_ns(other_s)))
        self._range = _Range(begin_ns, end_ns)
        self._begin_anew(self._reader.keyframe_before(begin_ns))
        self._at_ns = self._begun_ns = min(self._next.time_ns if self._next else begin_ns, begin_ns)
        self._target_ns, self._is_there = end_ns, False

    @property
    def range_s(self) -> tuple[float, float] | None:
        """The shown range in seconds from the beginning, or None."""
        if self._range is None:
            return None
        begin_ns, end_ns = (at_ns - self._reader.begin_ns for at_ns in (self._range.begin_ns, self._range.end_ns))
        return begin_ns / 1e9, end_ns / 1e9

    def cut_out(self) -> RangeCut:
        """Return the shown range, to be saved as a recording. The caller must close it."""
        assert self._range is not None
        return RangeCut(self._reader.duplicate(), self._range.begin_ns, self._range.end_ns)

    def aim(self, to_s: float) -> None:
        """Set the target to the moment `to_s`, limited to the recording; `advance` goes there.

        Leaves a shown range.
        """
        target_ns = self._moment_ns(to_s)
        was_range, self._range = self._range is not None, None  # after a range, the store lacks what was before it
        from_ns = max(self._at_ns, self._whole_from_ns)
        is_ahead = self._at_ns <= target_ns and self._whole_from_ns <= target_ns <= from_ns + self._reach_ns
        if is_ahead and not was_range:
            self._begun_ns = self._at_ns
        elif (state := self._state_before(target_ns)) is not None:
            self._store = pickle.loads(state.store)
            self._read_from(state.offset)
            self._at_ns = self._begun_ns = self._whole_from_ns = self._said_ns = state.at_ns
        else:
            self._jump(target_ns)
        self._target_ns, self._is_there = target_ns, False

    def advance(self, limit_s: float = math.inf) -> bool:
        """Read on for at most `limit_s`. Returns whether the target is reached; until then the view is not valid."""
        until_s = self._clock_s() + limit_s
        # A frame dated after the end would block all frames after it, so it counts as being at the end.
        while self._next is not None and (time_ns := min(self._next.time_ns, self._reader.end_ns)) <= self._target_ns:
            if self._range is not None:
                self._enter(self._range, time_ns)
            elif self._next.kind == FrameKind.KEYFRAME and time_ns >= self._whole_from_ns:
                self._keep_state(self._next.offset, time_ns)
            self._apply(self._next)
            if self._next.kind in SHOWN:
                self._said_ns = time_ns
            self._next = next(self._frames, None)
            self._at_ns = max(self._at_ns, time_ns)
            if self._clock_s() >= until_s:
                return False
        self._at_ns = self._target_ns
        if self._range is not None and not self._is_there:
            self._enter(self._range, self._range.end_ns + 1)
            self._range.until_ns = self._said_ns
            if self._follows_records:
                self._catch_up_in(self._range)
        self._is_there = True
        return True

    def _enter(self, chosen: _Range, next_ns: int) -> None:
        """Begin the range if the next frame belongs to it."""
        if chosen.from_ns is None and next_ns > chosen.begin_ns:
            chosen.from_ns = self._said_ns
            self._store.begin_range((chosen.end_ns - chosen.begin_ns) / 1e9)

    @property
    def on_its_way(self) -> float | None:
        """The completed share of the way to the target, or None if it is reached."""
        way_ns = self._target_ns - self._begun_ns
        return None if self._is_there else (self._at_ns - self._begun_ns) / way_ns if way_ns > 0 else 1.0

    @property
    def marks(self) -> Mapping[int, Mark]:
        """Events by second, in the part read until now."""
        return self._marks.found

    def holds_data(self) -> bool:
        """Whether any record was counted anywhere in the recording. Reads up to the first one."""
        return any(isinstance(said, StatsUpdate) and any(said.count) for _, said in self._said())

    def first_data_s(self) -> float:
        """Return the first moment at which a selected process has data, or 0 if none ever has.

        The recording is read up to there.
        """
        scratch = Store()
        for at_ns, said in self._said():
            try:
                scratch.apply(said)
            except (DecodeError, LimitError):
                continue  # counted as damaged once it is shown
            record = scratch.sources.get(said.source) if isinstance(said, StatsUpdate) else None
            if record is None or not has_data(record):
                continue
            if not self._selected or is_selected(record, self._selected):
                return max(0, at_ns - self._reader.begin_ns) / 1e9
        return 0.0

    def _said(self) -> Iterator[tuple[int, SourceCatalog | StatsUpdate]]:
        """Yield the catalogs and statistics of processes with their times, from the beginning on."""
        for frame in self._reader.frames(wanted=SHOWN):
            at_ns = min(frame.time_ns, self._reader.end_ns)
            try:
                for said in frame.messages():
                    if isinstance(said, SourceCatalog | StatsUpdate):
                        yield at_ns, said
            except DecodeError:
                continue  # counted as damaged already

    def watched(self) -> TimeView:
        """Return the whole recording, with the events in the part read until now."""
        return TimeView(self.at_s, self.duration_s, self.marks, self.range_s)

    def take_marks(self, others: Marks) -> None:
        """Add the events that the live feed noted meanwhile."""
        self._marks.take(others)

    def follow_records(self, on: bool) -> None:
        """Start or stop showing every record, which a timeline needs. Nothing else changes."""
        if on == self._follows_records:
            return
        self._follows_records = on
        self._store.keep_records(on)
        self._states.clear()  # they were stored with records, or without
        if self._range is not None:
            if on and self._is_there:
                self._catch_up_in(self._range)
            return
        go_on = None if self._next is None else self._next.offset
        if on:
            go_on = self._catch_up(go_on)
        if go_on is not None:
            self._go_on_from(go_on)

    def replay(self) -> ReplayView:
        """Return the position and the description of the recording."""
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
        """Always true: a recording is complete at every moment."""
        return True

    @property
    def left_out(self) -> str:
        """The number, names and reasons of sources dropped for lack of room; empty if none."""
        return self._store.complaint()

    @property
    def refused(self) -> str:
        """Always empty: a recording rejects no viewer."""
        return ""

    def status(self) -> str:
        """Return one line about the recording."""
        damaged = f" · damaged messages: {self.damage}" if self.damage else ""
        damaged += f" ({self._reason})" if self._reason else ""
        left_out = f" · {self.left_out}" if self.left_out else ""
        name = "what its daemon remembers" if self._is_history else self._reader.path.name
        return f"{name}{'' if self._speed == 1 else f' · {self._speed:g}×'}{damaged}{left_out}"

    def finished(self) -> FeedEnd | None:
        """A recording does not end the viewer: it stays at its last moment."""
        return None

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _wanted(self) -> tuple[FrameKind, ...]:
        follows = self._follows_records and self._range is None
        return (*SHOWN, FrameKind.RECORDS) if follows else SHOWN

    def _catch_up_in(self, chosen: _Range) -> None:
        """Show the records of a range: those of its steps, limited to its last minute."""
        assert chosen.from_ns is not None
        from_ns = max(chosen.from_ns, chosen.until_ns - RANGE_RECENT_NS)
        is_before = True
        for frame in self._records_from(from_ns - LEAD_NS):
            if frame.time_ns > chosen.until_ns:
                break
            if is_before and frame.time_ns > from_ns:
                self._store.forget_records()
                is_before = False
            self._apply(frame)
        if is_before:
            self._store.forget_records()

    def _catch_up(self, until: int | None) -> int | None:
        """Show the last records until now, from frames before offset `until`. Returns the next frame's offset.

        For an ended source these are the records before its end, if that is within the reach of a jump.
        """
        behind_ns = self._store.heard_ns - self._said_ns
        sources = self._store.sources.items()
        ended = sorted((record.window.now_ns - behind_ns, key) for key, record in sources if record.has_ended)
        ended = [one for one in ended if one[0] >= self._at_ns - self._reach_ns]
        while ended and ended[0][0] < self._at_ns - RECENT_NS:
            first_ns = ended[0][0]
            together = [key for end_ns, key in ended if end_ns <= first_ns + RECENT_NS]
            last_ns = min(ended[len(together) - 1][0] + RECENT_NS, self._at_ns)
            for frame in self._records_from(first_ns - RECENT_NS):
                if frame.time_ns > last_ns or (until is not None and frame.offset > until):
                    break
                self._apply(frame, together)
            del ended[: len(together)]
        for frame in self._records_from(self._at_ns - RECENT_NS):
            if until is not None and frame.offset > until:
                break
            if min(frame.time_ns, self._reader.end_ns) > self._at_ns:
                return frame.offset
            self._apply(frame)
        return until

    def _records_from(self, at_ns: int) -> Iterator[Frame]:
        return self._reader.frames(self._reader.keyframe_before(at_ns), (FrameKind.RECORDS,))

    def _moment_ns(self, at_s: float) -> int:
        return self._reader.begin_ns + round(min(max(at_s, 0), self.duration_s) * 1e9)

    def _jump(self, target_ns: int) -> None:
        self._begin_anew(self._reader.keyframe_before(target_ns - self._reach_ns - STEPS_BACK_NS))
        begins_ns = self._next.time_ns if self._next else target_ns
        self._at_ns = self._begun_ns = min(begins_ns, target_ns)
        is_first = begins_ns <= self._reader.begin_ns
        self._whole_from_ns = self._reader.begin_ns if is_first else begins_ns + self._reach_ns

    def _begin_anew(self, offset: int) -> None:
        self._store = Store(self._window_s)
        self._store.keep_records(self._follows_records)
        self._read_from(offset)

    def _read_from(self, offset: int) -> None:
        self._marks.forget_before()
        self._said_ns = self._reader.begin_ns
        self._go_on_from(offset)

    def _go_on_from(self, offset: int) -> None:
        self._frames = self._reader.frames(offset, self._wanted)
        self._next = next(self._frames, None)

    def _keep_state(self, offset: int, at_ns: int) -> None:
        if self._store.size_bytes * MAX_STATES <= MAX_STATES_BYTES and all(
            at_ns != one.at_ns for one in self._states
        ):
            self._states.append(_State(at_ns, offset, pickle.dumps(self._store, pickle.HIGHEST_PROTOCOL)))

    def _state_before(self, target_ns: int) -> _State | None:
        """Return the latest kept state from which the target can be reached without a jump."""
        found = [one for one in self._states if one.at_ns <= target_ns <= one.at_ns + self._reach_ns]
        return max(found, key=lambda one: one.at_ns, default=None)

    def _apply(self, frame: Frame, of: Collection[str] | None = None) -> None:
        """Apply a frame. If `of` is given, apply only records of these sources."""
        self.touched += 1
        is_known = False
        try:
            decode = self._decode if frame.kind == FrameKind.KEYFRAME else codec.decode
            for message in frame.messages(decode):
                if of is not None and not (isinstance(message, RecordBatch) and message.source in of):
                    continue
                # A keyframe of the daemon we know must not clear the past that is shown. It is also not a moment of
                # its own, because a live viewer did not hear it.
                if isinstance(message, DaemonHello):
                    is_known = self._knows(message)
                if not (is_known and isinstance(message, DaemonHello | Heartbeat)):
                    self._store.apply(message)
                if isinstance(message, Heartbeat):
                    at_ns = min(frame.time_ns, self._reader.end_ns)
                    self._marks.look(at_ns, (seen.record for seen in self.seen().values()))
        except DecodeError as error:
            self._refused.add(frame.offset)
            self._reason = str(error)
            if isinstance(error, LimitError):
                self._frames = iter(())  # stop until a jump, which starts anew

    def _decode(self, part: bytes) -> Message | None:
        return self._kept(part) if len(part) <= MAX_KEPT_BYTES else codec.decode(part)

    def _knows(self, hello: DaemonHello) -> bool:
        known = self._store.daemon
        return known is not None and (known.host, known.boot_id, known.pid) == (hello.host, hello.boot_id, hello.pid)
