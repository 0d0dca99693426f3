"""Play a recording: bring a store to its state at a chosen moment, or after a chosen range."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from cbtop.client.range_cut import LEAD_NS, RangeCut
from cbtop.client.source_record import SourceRecord
from cbtop.client.store import Store
from cbtop.client.window import reaches_back_s
from cbtop.feeds.frame_decoder import FrameDecoder
from cbtop.feeds.kept_states import KeptStates
from cbtop.feeds.marks import Marks
from cbtop.feeds.recording_search import SHOWN, moment_ns
from cbtop.protocol.errors import DecodeError, LimitError
from cbtop.protocol.messages import DaemonHello, Heartbeat, RecordBatch
from cbtop.protocol.recording import Frame, FrameKind, RecordingReader
from cbtop.viewmodels.selection import is_selected

# For a curve of N seconds, this many times N seconds are read, because samples come once a second and may be late.
SLACK = 1.1
# A jump starts this many ns too early, and stores copies of the store on its way. So small steps back in time are
# fast.
STEPS_BACK_NS = 15_000_000_000
# A timeline shows the records of this many ns. For an ended process, these are the last ones.
RECENT_NS = 10_000_000_000
RANGE_RECENT_NS = 60_000_000_000  # In a chosen range, a timeline shows the records of this many ns.


@dataclass(slots=True)
class _Range:
    """The chosen range of a recording, which is then shown instead of a single moment."""

    begin_ns: int
    end_ns: int
    # Time of the last frame before the range. None until the playback has reached it.
    from_ns: int | None = None
    until_ns: int = 0  # time of the last frame in the chosen range


class Playback:
    """Brings a store to its state at a moment of a recording or after a range, and finds the notable events until
    then.
    """

    def __init__(
        self,
        reader: RecordingReader,
        window_s: float,
        selected: Sequence[str],
        decoder: FrameDecoder,
        clock_s: Callable[[], float],
        curves_s: float,
    ) -> None:
        self.store = Store(window_s)
        self.touched = 0  # number of frames that were decoded
        self.refused: set[int] = set()  # offsets of frames with messages that cannot be decoded
        self.reason = ""  # the reason why the latest undecodable message was rejected
        self.marks = Marks(reader.begin_ns)
        self._reader, self._window_s, self._selected = reader, window_s, selected
        self._decoder, self._clock_s = decoder, clock_s
        self._follows_records = False
        self._frames: Iterator[Frame] = iter(())
        self._next: Frame | None = None
        # How far before its target a jump must begin. The window and the longest curve need no earlier data, so the
        # view is the same as after playing everything.
        self.reach_ns = round(max(curves_s * SLACK, reaches_back_s(window_s)) * 1e9)
        self._states = KeptStates(self.reach_ns)
        self._range: _Range | None = None
        self.at_ns = self._begun_ns = self._whole_from_ns = self.target_ns = reader.begin_ns
        self._said_ns = self._begun_ns  # time of the last applied frame
        self.is_there = False
        if reader.range_from_ns is None:
            self._jump(self.target_ns)
        else:
            length_s = max(0, reader.end_ns - reader.begin_ns) / 1e9
            self.select((reader.range_from_ns - reader.begin_ns) / 1e9, length_s)
        self.advance()

    def _shown(self) -> Iterator[SourceRecord]:
        """Yield the data of the selected sources in the store."""
        for record in self.store.sources.values():
            if not self._selected or is_selected(record, self._selected):
                yield record

    def select(self, one_s: float, other_s: float) -> None:
        """Make the time between two moments the target. Until `aim` is called, only its steps are shown.

        A step is in the range if the daemon reported its end within the range.
        """
        begin_ns, end_ns = sorted((moment_ns(self._reader, one_s), moment_ns(self._reader, other_s)))
        self._range = _Range(begin_ns, end_ns)
        self._begin_anew(self._reader.keyframe_before(begin_ns))
        self.at_ns = self._begun_ns = min(self._next.time_ns if self._next else begin_ns, begin_ns)
        self.target_ns, self.is_there = end_ns, False

    @property
    def range_s(self) -> tuple[float, float] | None:
        """Begin and end of the shown range in seconds of the recording. None without a range."""
        if self._range is None:
            return None
        begin_ns, end_ns = (at_ns - self._reader.begin_ns for at_ns in (self._range.begin_ns, self._range.end_ns))
        return begin_ns / 1e9, end_ns / 1e9

    def cut_out(self) -> RangeCut:
        """Return the shown range, to save it as a recording. The caller must close it."""
        assert self._range is not None
        return RangeCut(self._reader.duplicate(), self._range.begin_ns, self._range.end_ns)

    def aim(self, to_s: float) -> None:
        """Make the moment `to_s` the target, instead of a range. `advance` moves there."""
        target_ns = moment_ns(self._reader, to_s)
        # The store of a range has nothing from before the range, so it must be built anew.
        was_range, self._range = self._range is not None, None
        from_ns = max(self.at_ns, self._whole_from_ns)
        is_ahead = self.at_ns <= target_ns and self._whole_from_ns <= target_ns <= from_ns + self.reach_ns
        if is_ahead and not was_range:
            self._begun_ns = self.at_ns
        elif (state := self._states.before(target_ns)) is not None:
            self.store = state.store()
            self._read_from(state.offset)
            self.at_ns = self._begun_ns = self._whole_from_ns = self._said_ns = state.at_ns
        else:
            self._jump(target_ns)
        self.target_ns, self.is_there = target_ns, False

    def advance(self, limit_s: float = math.inf) -> bool:
        """Read the recording for at most `limit_s` seconds. Return whether the target is reached. Until then, the
        view is not valid.
        """
        until_s = self._clock_s() + limit_s
        # A damaged frame may claim a time after the end. Give it the recording's end, so that later frames are read.
        while self._next is not None and (time_ns := min(self._next.time_ns, self._reader.end_ns)) <= self.target_ns:
            if self._range is not None:
                self._enter(self._range, time_ns)
            elif self._next.kind == FrameKind.KEYFRAME and time_ns >= self._whole_from_ns:
                self._states.keep(self.store, self._next.offset, time_ns)
            self._apply(self._next)
            if self._next.kind in SHOWN:
                self._said_ns = time_ns
            self._next = next(self._frames, None)
            self.at_ns = max(self.at_ns, time_ns)
            if self._clock_s() >= until_s:
                return False
        self.at_ns = self.target_ns
        if self._range is not None and not self.is_there:
            self._enter(self._range, self._range.end_ns + 1)
            self._range.until_ns = self._said_ns
            if self._follows_records:
                self._catch_up_in(self._range)
        self.is_there = True
        return True

    def _enter(self, chosen: _Range, next_ns: int) -> None:
        """If the frame at `next_ns` is after the start of the range, tell the store that it begins."""
        if chosen.from_ns is None and next_ns > chosen.begin_ns:
            chosen.from_ns = self._said_ns
            self.store.begin_range((chosen.end_ns - chosen.begin_ns) / 1e9)

    @property
    def on_its_way(self) -> float | None:
        """Completed part of the move to the target (0 to 1). None at the target."""
        way_ns = self.target_ns - self._begun_ns
        return None if self.is_there else (self.at_ns - self._begun_ns) / way_ns if way_ns > 0 else 1.0

    def follow_records(self, on: bool) -> None:
        """Start or stop storing single records, which only a timeline needs. All else stays."""
        if on == self._follows_records:
            return
        self._follows_records = on
        self.store.keep_records(on)
        self._states.clear()  # The copies were made with the old setting.
        if self._range is not None:
            if on and self.is_there:
                self._catch_up_in(self._range)
            return
        go_on = None if self._next is None else self._next.offset
        if on:
            go_on = self._catch_up(go_on)
        if go_on is not None:
            self._go_on_from(go_on)

    @property
    def _wanted(self) -> tuple[FrameKind, ...]:
        follows = self._follows_records and self._range is None
        return (*SHOWN, FrameKind.RECORDS) if follows else SHOWN

    def _catch_up_in(self, chosen: _Range) -> None:
        """Read the records of the last minute of a range for the timeline."""
        assert chosen.from_ns is not None
        from_ns = max(chosen.from_ns, chosen.until_ns - RANGE_RECENT_NS)
        is_before = True
        for frame in self._records_from(from_ns - LEAD_NS):
            if frame.time_ns > chosen.until_ns:
                break
            if is_before and frame.time_ns > from_ns:
                self.store.forget_records()
                is_before = False
            self._apply(frame)
        if is_before:
            self.store.forget_records()

    def _catch_up(self, until: int | None) -> int | None:
        """Read the last records before the current moment, up to the frame at offset `until`. Return the offset of
        the next frame.

        For an ended source, these are the last records before its end, if a jump reaches it.
        """
        behind_ns = self.store.heard_ns - self._said_ns
        sources = self.store.sources.items()
        ended = sorted((record.window.now_ns - behind_ns, key) for key, record in sources if record.has_ended)
        ended = [one for one in ended if one[0] >= self.at_ns - self.reach_ns]
        while ended and ended[0][0] < self.at_ns - RECENT_NS:
            first_ns = ended[0][0]
            together = [key for end_ns, key in ended if end_ns <= first_ns + RECENT_NS]
            last_ns = min(ended[len(together) - 1][0] + RECENT_NS, self.at_ns)
            for frame in self._records_from(first_ns - RECENT_NS):
                if frame.time_ns > last_ns or (until is not None and frame.offset > until):
                    break
                self._apply(frame, together)
            del ended[: len(together)]
        for frame in self._records_from(self.at_ns - RECENT_NS):
            if until is not None and frame.offset > until:
                break
            if min(frame.time_ns, self._reader.end_ns) > self.at_ns:
                return frame.offset
            self._apply(frame)
        return until

    def _records_from(self, at_ns: int) -> Iterator[Frame]:
        return self._reader.frames(self._reader.keyframe_before(at_ns), (FrameKind.RECORDS,))

    def _jump(self, target_ns: int) -> None:
        self._begin_anew(self._reader.keyframe_before(target_ns - self.reach_ns - STEPS_BACK_NS))
        begins_ns = self._next.time_ns if self._next else target_ns
        self.at_ns = self._begun_ns = min(begins_ns, target_ns)
        is_first = begins_ns <= self._reader.begin_ns
        self._whole_from_ns = self._reader.begin_ns if is_first else begins_ns + self.reach_ns

    def _begin_anew(self, offset: int) -> None:
        self.store = Store(self._window_s)
        self.store.keep_records(self._follows_records)
        self._read_from(offset)

    def _read_from(self, offset: int) -> None:
        self.marks.forget_before()
        self._said_ns = self._reader.begin_ns
        self._go_on_from(offset)

    def _go_on_from(self, offset: int) -> None:
        self._frames = self._reader.frames(offset, self._wanted)
        self._next = next(self._frames, None)

    def _apply(self, frame: Frame, of: Collection[str] | None = None) -> None:
        """Apply a frame. With `of`, apply only the records of these sources."""
        self.touched += 1
        is_known = False
        try:
            for message in self._decoder.messages(frame):
                if of is not None and not (isinstance(message, RecordBatch) and message.source in of):
                    continue
                # Skip the hello and the heartbeat of a keyframe. The hello repeats an earlier one, and would clear
                # the store. Live viewers do not receive the heartbeat.
                if isinstance(message, DaemonHello):
                    is_known = self._knows(message)
                if not (is_known and isinstance(message, DaemonHello | Heartbeat)):
                    self.store.apply(message)
                if isinstance(message, Heartbeat):
                    at_ns = min(frame.time_ns, self._reader.end_ns)
                    self.marks.look(at_ns, self._shown())
        except DecodeError as error:
            self.refused.add(frame.offset)
            self.reason = str(error)
            if isinstance(error, LimitError):
                self._frames = iter(())  # The memory limit is reached. Stop until the next jump.

    def _knows(self, hello: DaemonHello) -> bool:
        known = self.store.daemon
        return known is not None and (known.host, known.boot_id, known.pid) == (hello.host, hello.boot_id, hello.pid)
