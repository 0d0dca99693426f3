"""Search a recording for steps and data. The shown moment stays the same."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice

from cbtop.client.store import Store
from cbtop.feeds.frame_decoder import FrameDecoder
from cbtop.protocol.errors import DecodeError, LimitError
from cbtop.protocol.messages import SourceCatalog, StatsUpdate
from cbtop.protocol.recording import FrameKind, RecordingReader
from cbtop.viewmodels.merge import KEYS_JOINED_BY
from cbtop.viewmodels.selection import has_data, is_selected

# Searches read only these kinds of frames. Only exporters and the timeline need frames with records.
SHOWN = (FrameKind.LIVE, FrameKind.KEYFRAME)
STEPS_WITHIN_NS = 300_000_000_000  # A step is searched for within this many ns.
# A backward search first covers this many ns. With too few steps, it covers STEPS_WITHIN_NS.
FEW_STEPS_NS = 10_000_000_000


def moment_ns(reader: RecordingReader, at_s: float) -> int:
    """Return the moment `at_s` seconds after the beginning of the recording, in ns, within the recording."""
    length_s = max(0, reader.end_ns - reader.begin_ns) / 1e9
    return reader.begin_ns + round(min(max(at_s, 0), length_s) * 1e9)


class RecordingSearch:
    """Reads a recording by itself, without the playback, for all sources or the `selected` ones."""

    def __init__(self, reader: RecordingReader, selected: Sequence[str], decoder: FrameDecoder) -> None:
        self._reader, self._selected, self._decoder = reader, selected, decoder

    def steps_away(self, from_s: float, steps: int, key: str | None) -> tuple[float, int]:
        """Return the moment at which the source `key` has done `steps` steps after `from_s`, and how many steps were
        found.

        If `steps` is negative, the moment is before `from_s`. For merged sources, the steps of all count. Without a
        `key`, or without its data, the steps of any source count. The search covers five minutes. All steps in an
        update count as one, and there are four updates a second.
        """
        from_ns = moment_ns(self._reader, from_s)
        # This source does not exist yet at the moment, so count any source's steps.
        keys = None if key is None else frozenset(key.split(KEYS_JOINED_BY))
        found = self._steps_from(from_ns, steps, keys)
        if found is None:
            found = self._steps_from(from_ns, steps, None)
        if not found:
            return from_s, 0
        return (found[-1] - self._reader.begin_ns) / 1e9, len(found)

    def _steps_from(self, from_ns: int, steps: int, keys: Container[str] | None) -> list[int] | None:
        """Return the times of the next `steps` updates with ended steps (negative: earlier ones). None without
        any.
        """
        if steps > 0:
            told = self._steps_told(keys, from_ns, from_ns + STEPS_WITHIN_NS)
            if (first := next(told, None)) is None:
                return None
            return list(islice((at_ns for at_ns in chain([first], told) if at_ns > from_ns), steps))
        for within_ns in (FEW_STEPS_NS, STEPS_WITHIN_NS):
            moments = list(self._steps_told(keys, from_ns - within_ns, from_ns))
            # The oldest time belongs to the first update that was read, not to a step.
            if len(moments) > 1 - steps:
                break
        # Skip the last update before `from_ns`, which is already shown.
        return moments[:-1][::-1][:-steps] if moments else None

    def _steps_told(self, keys: Container[str] | None, begin_ns: int, end_ns: int) -> Iterator[int]:
        """Yield the time of the first update, then of each update in `begin_ns..end_ns` with newly ended steps."""
        steps, scratch = -1, Store()
        for frame in self._reader.frames(self._reader.keyframe_before(begin_ns), SHOWN):
            at_ns = min(frame.time_ns, self._reader.end_ns)
            if at_ns > end_ns:
                return
            try:
                for message in self._decoder.messages(frame):
                    if not isinstance(message, SourceCatalog | StatsUpdate):
                        continue
                    if keys is None or message.source in keys:
                        scratch.apply(message)
            except DecodeError:
                continue  # Skip the damaged frame. The playback counts damaged frames.
            now = sum(record.steps_ended for record in scratch.sources.values())
            if scratch.sources and now > steps:
                yield at_ns
                steps = now

    def holds_data(self) -> bool:
        """Whether the recording has statistics with a record. It is read up to the first ones."""
        return any(isinstance(said, StatsUpdate) and any(said.count) for _, said in self._said())

    @cached_property
    def main_source(self) -> str | None:
        """The key of the process to show first, whatever the moment.

        It is the command that `cbtop run` ran, if it has steps. Otherwise it is the process with the most steps. None
        if no selected process has steps.

        The recording is read from its last keyframe on.
        """
        scratch = Store()
        for _, said in self._said(self._reader.keyframe_before(self._reader.end_ns)):
            try:
                scratch.apply(said)
            except (DecodeError, LimitError):
                continue  # Skip the damaged frame. The playback counts damaged frames.
        records = [one for one in scratch.sources.values() if not self._selected or is_selected(one, self._selected)]
        main = max(records, key=lambda one: (one.is_command and one.steps_ended > 0, one.steps_ended), default=None)
        return main.key if main is not None and main.steps_ended else None

    def first_data_s(self, key: str | None = None) -> float:
        """Return the first moment with data of the process `key`, in seconds. If `key` is None, any selected process
        counts. Return 0 if there is no data.

        The recording is read up to the returned moment.
        """
        scratch = Store()
        for at_ns, said in self._said():
            try:
                scratch.apply(said)
            except (DecodeError, LimitError):
                continue  # Skip the damaged frame. The playback counts damaged frames.
            record = scratch.sources.get(said.source) if isinstance(said, StatsUpdate) else None
            if record is None or not has_data(record) or key not in (None, record.key):
                continue
            if not self._selected or is_selected(record, self._selected):
                return max(0, at_ns - self._reader.begin_ns) / 1e9
        return 0.0

    def _said(self, offset: int = 0) -> Iterator[tuple[int, SourceCatalog | StatsUpdate]]:
        """Yield (time in ns, message) for each catalog and each statistics message, from the frame at `offset` on."""
        for frame in self._reader.frames(offset, SHOWN):
            at_ns = min(frame.time_ns, self._reader.end_ns)
            try:
                for said in frame.messages():
                    if isinstance(said, SourceCatalog | StatsUpdate):
                        yield at_ns, said
            except DecodeError:
                continue  # Skip the damaged frame. The playback counts damaged frames.
