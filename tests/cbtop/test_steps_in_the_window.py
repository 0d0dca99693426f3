"""Tests of steps at the edge of the window of the last seconds.

The part of a step inside the window counts as time in steps, exact to the nanosecond. Clocks are fake.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.client.store import Store
from cbtop.client.window import Window
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.profiler.analysis.step_intervals import MAX_SAID_INTERVALS
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.columns import pack_columns
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.messages import Activity, Heartbeat, HostHello, Message, Packed, SourceCatalog, StatsUpdate
from cbtop.protocol.ring_reader import Batch
from cbtop.reports import REPORTS
from cbtop.text.range_text import between_steps
from cbtop.viewmodels.merge import merged_view
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import source_view
from cbtop.viewmodels.sources import source_row
from cbtop.viewmodels.time_range import TimeRangeView
from tests.cbtop.recorded import Clock, apply, source_of

MS = 1_000_000
SECOND = 1000 * MS
PHASES = ("prefill", "decode")  # Node 1 has the phase prefill, and node 2 the phase decode.
Span = tuple[int, int, int]  # a step: its node, its begin and its end in ns


class Host:
    """A process that records steps of two phases, and its daemon.

    The test decides when the process and the daemon act.
    """

    def __init__(self, directory: Path) -> None:
        self.recorder, self._clock = RingRecorder(directory, 1 << 20), Clock(0)
        self.profiler = BrickProfiler(clock_ns=self._clock, recorder=self.recorder)
        self.profiler.announce(Activity("loading"))
        self.source = source_of(directory)
        self.spans: list[Span] = []

    def begins(self, at_ns: int = 0) -> None:
        """Record a first step of zero length in each phase. These steps announce the phases."""
        self._clock.now_ns = at_ns
        for phase in PHASES:
            with self.profiler.step(phase, 1):
                pass

    def ran(self, *spans: Span) -> None:
        for node, begin_ns, end_ns in spans:
            self.recorder.record(node, begin_ns, end_ns, 1)
        self.spans += spans

    def said(self, at_ns: int, whole: bool = False) -> list[Message]:
        """Return what the daemon publishes at `at_ns`.

        With `whole`, the messages are complete, as a viewer gets them that has just connected.
        """
        self.source.poll()
        return [_dated(m, at_ns) for m in (self.source.snapshot() if whole else self.source.delta())]

    def heartbeat(self, at_ns: int) -> Message:
        return Heartbeat(at_ns, (self.source.state_message(),))


def _dated(message: Message, at_ns: int) -> Message:
    match message:
        case StatsUpdate():
            return replace(message, monotonic_ns=at_ns)
        case SourceCatalog():
            said = [replace(m, monotonic_ns=0) if isinstance(m, HostHello) else m for m in message.messages]
            return replace(message, messages=tuple(said))
    return message


@dataclass
class Viewer:
    host: Host
    store: Store = field(default_factory=lambda: Store(4.0))

    def hears(self, messages: Sequence[Message]) -> None:
        apply(self.store, messages)

    @property
    def time_range(self) -> TimeRangeView:
        (record,) = self.store.sources.values()
        found = source_view(record, window=True).time_range
        assert found is not None
        return found

    def shows_what_ran(self) -> None:
        """Check that the view has the exact time that steps and the window overlap, for each phase and in total."""
        (record,) = self.store.sources.values()
        if not record.window.has_watched:
            return
        (time_range,) = [record.window.statistics(record.stats)[1]]
        found = self.time_range
        assert found.in_steps_us == covered_ns(self.host.spans, time_range.begin_ns, time_range.end_ns) / 1e3
        assert not found.counts_whole
        parts = (found.in_steps_us or 0, found.between_us or 0, found.since_last_us or 0)
        assert sum(parts) == pytest.approx(found.wall_us)
        assert min(parts) >= 0
        for node, phase in enumerate(PHASES, 1):
            own = covered_ns(
                [span for span in self.host.spans if span[0] == node], time_range.begin_ns, time_range.end_ns
            )
            assert sum(one.us for one in found.by_phase if one.name == phase) == own / 1e3
            self._has_the_rate_of(phase, found.wall_us)

    def _has_the_rate_of(self, phase: str, wall_us: float) -> None:
        """Check the rate in steps: the tokens of whole steps, divided by the time of these steps.

        This rate must be at least the rate by wall clock.
        """
        (record,) = self.store.sources.values()
        for steps in source_view(record, window=True).phases:
            if steps.phase == phase and steps.count and steps.union_us and wall_us:
                rate = steps.tokens / min(steps.union_us, wall_us) * 1e6
                assert steps.tokens_per_sec_in_steps == pytest.approx(rate)
                assert steps.tokens_per_sec_in_steps >= (steps.tokens_per_sec or 0) * (1 - 1e-9)


def covered_ns(spans: Sequence[Span], begin_ns: int, end_ns: int) -> int:
    """Return the time in ns that at least one of the spans covers inside the range."""
    total, reached = 0, begin_ns
    for _, begin, end in sorted(spans, key=lambda span: span[1]):
        total += max(0, min(end, end_ns) - max(begin, reached))
        reached = max(reached, min(end, end_ns))
    return total


@contextmanager
def a_host(*, has_begun: bool = True) -> Iterator[Host]:
    with tempfile.TemporaryDirectory() as directory:
        made = Host(Path(directory))
        if has_begun:
            made.begins()
        try:
            yield made
        finally:
            made.source.close()
            made.profiler.close()


def test_a_prefill_counts_by_its_part_in_the_window_if_it_ended_after_attach() -> None:
    with a_host() as host:
        viewer = Viewer(host, Store(10.0))
        viewer.hears(host.said(4 * SECOND, whole=True))  # The viewer connects one second before the step ends.
        host.ran((1, 0, 5 * SECOND))
        viewer.hears(host.said(5_100 * MS))
        host.ran(*((2, at * 100 * MS, (at * 100 + 50) * MS) for at in range(80, 110)))
        viewer.hears(host.said(11_000 * MS))
        found = viewer.time_range
        assert found.wall_us == 7e6
        assert found.in_steps_us == 1e6 + 1.5e6
        assert {phase.name: phase.us for phase in found.by_phase} == {"prefill": 1e6, "decode": 1.5e6}
        assert (found.between_us, found.since_last_us) == (4.45e6, 0.05e6)


def waited_for_its_first_step(viewer: Viewer) -> None:
    """The viewer connects at 1 s. The first step begins at 7 s. Until 10 s, steps of 50 ms take half of the time."""
    viewer.hears(viewer.host.said(SECOND, whole=True))
    for second in range(2, 7):
        viewer.hears([viewer.host.heartbeat(second * SECOND)])
    viewer.host.begins(7 * SECOND)
    for second in range(8, 11):
        begins = range((second - 1) * SECOND, second * SECOND, 100 * MS)
        viewer.host.ran(*((2, begin, begin + 50 * MS) for begin in begins))
        viewer.hears(viewer.host.said(second * SECOND))


def test_the_wait_for_the_first_step_is_no_time_between_steps() -> None:
    with a_host(has_begun=False) as host:
        viewer = Viewer(host, Store(10.0))
        waited_for_its_first_step(viewer)
        found = viewer.time_range
        assert (found.wall_us, found.in_steps_us, found.between_us) == (3e6, 1.5e6, 1.45e6)
        (record,) = viewer.store.sources.values()
        view, row = source_view(record, window=True), source_row(record, window=True)
        assert view.window is not None
        # The report says that the rates cover only 3 s.
        assert (view.window.covers_s, view.window.is_short) == (3, True)
        assert view.steps is not None
        assert view.steps.tokens_per_sec == pytest.approx(31 / 3)
        assert row.steps_per_sec == pytest.approx(31 / 3)
        merged = merged_view([record, replace(record, key="other")], MergeMode.SUM, window=True)
        assert merged.window is not None
        assert merged.window.covers_s == 3
        record.window.is_range = True
        # A range that the user has selected counts completely, including the time before the first step.
        assert viewer.time_range.wall_us == 9e6
        record.window.is_range = False
        for second in range(11, 18):
            viewer.hears([host.heartbeat(second * SECOND)])
        # The first step is older than the window now, so all other time in the window counts as time between steps.
        assert viewer.time_range.wall_us == 10e6


def test_a_prompt_that_leaves_the_window_keeps_the_rate_it_had_inside_of_it() -> None:
    with a_host() as host:
        viewer = Viewer(host, Store(10.0))
        viewer.hears(host.said(SECOND, whole=True))
        viewer.hears([host.heartbeat(second * SECOND) for second in range(2, 10)])
        host.recorder.record(1, 2 * SECOND, 10 * SECOND, 8_000)  # a prefill of 8 s with 1,000 tokens a second
        viewer.hears(host.said(10 * SECOND))
        for second in range(11, 20):
            viewer.hears([host.heartbeat(second * SECOND)])
            (record,) = viewer.store.sources.values()
            view = source_view(record, "prefill", window=True)
            assert view.steps is not None
            assert view.steps.tokens_per_sec_in_steps == pytest.approx(1_000)
        assert view.time_range is not None
        # Only the last second of the prefill is in the window of the last seconds.
        assert view.time_range.in_steps_us == 1e6
        text = REPORTS["text"]([view], ["bricks"])
        assert "1,000 tok/s without pauses: steps ran 1.00 s of 10.00 s, and 7.00 s before" in text


# A random event: a step of random length ends, then the daemon reads or publishes, and some time passes.
LENGTH = st.integers(0, 6 * SECOND) | st.integers(0, 50 * MS)
HAPPENS = st.tuples(
    st.integers(0, 3 * SECOND), st.sampled_from((1, 2)), LENGTH, st.just(0) | st.integers(0, 2 * SECOND)
)
WORDS = st.sampled_from(("read", "delta", "delta", "keyframe", "heartbeat"))
SPEAKS = st.tuples(st.integers(0, 300 * MS), WORDS, st.just(0), st.just(0))


@given(st.lists(HAPPENS | SPEAKS, max_size=60), st.integers(0, 30))
def test_in_steps_is_the_exact_overlap_of_steps_and_window_at_any_attach(
    events: list[tuple[int, int | str, int, int]], attach: int
) -> None:
    with a_host() as host:
        viewer, now_ns = Viewer(host), SECOND
        for at, (later_ns, what, length_ns, ago_ns) in enumerate(events):
            now_ns += later_ns
            is_watched = bool(viewer.store.sources)
            if isinstance(what, int):
                end_ns = max(0, now_ns - ago_ns)
                host.ran((what, max(0, end_ns - length_ns), end_ns))
            elif what == "read":
                host.source.poll()
            else:
                said = [host.heartbeat(now_ns)] if what == "heartbeat" else host.said(now_ns, what == "keyframe")
                if is_watched:
                    viewer.hears(said)
            if at == attach:
                viewer.hears(host.said(now_ns, whole=True))
        if viewer.store.sources:
            viewer.hears(host.said(now_ns))
            viewer.shows_what_ran()


def test_a_step_over_many_slices_is_in_each_window_with_the_part_inside_it() -> None:
    with a_host() as host:
        viewer = Viewer(host)
        viewer.hears(host.said(SECOND, whole=True))
        for second in range(2, 20):
            viewer.hears([host.heartbeat(second * SECOND)])
        host.ran((1, 3 * SECOND // 2, 20 * SECOND))
        viewer.hears(host.said(20 * SECOND))
        assert (viewer.time_range.in_steps_us, viewer.time_range.between_us) == (viewer.time_range.wall_us, 0)
        host.ran((2, 41 * SECOND // 2, 41 * SECOND // 2 + 1))
        viewer.hears(host.said(41 * SECOND // 2 + 1))
        for second in range(21, 30):
            viewer.hears([host.heartbeat(second * SECOND)])
            viewer.shows_what_ran()
        assert viewer.time_range.in_steps_us == 0


def test_what_a_lost_update_said_of_steps_is_said_again_by_the_next_keyframe() -> None:
    with a_host() as host:
        viewer = Viewer(host)
        viewer.hears(host.said(SECOND, whole=True))
        viewer.hears([host.heartbeat(2 * SECOND)])
        host.ran((1, SECOND // 2, 3 * SECOND))
        host.said(3 * SECOND)  # The viewer never receives these messages.
        host.ran((2, 3 * SECOND + 5, 4 * SECOND))
        viewer.hears(host.said(4 * SECOND))
        viewer.hears(host.said(4 * SECOND + 1, whole=True))
        viewer.shows_what_ran()


def without_ran(messages: Sequence[Message]) -> list[Message]:
    return [replace(m, ran=Packed(b"")) if isinstance(m, StatsUpdate) else m for m in messages]


def test_steps_count_whole_with_a_note_if_an_older_daemon_omits_their_time() -> None:
    with a_host() as host:
        viewer = Viewer(host)
        viewer.hears(without_ran(host.said(4 * SECOND, whole=True)))
        host.ran((1, 0, 5 * SECOND))
        viewer.hears(without_ran(host.said(7 * SECOND)))
        assert (viewer.time_range.wall_us, viewer.time_range.in_steps_us, viewer.time_range.between_us) == (
            3e6,
            1e6,
            0,
        )
        assert viewer.time_range.counts_whole
        (record,) = viewer.store.sources.values()
        text = REPORTS["text"]([source_view(record, window=True)], ["bricks"])
        assert "a step that began before counts whole" in text
        assert between_steps(viewer.time_range) == "between steps at least 0.0 % (0.00 µs of 3.00 s)"
        # Without a window of the last seconds, the time range begins with the first step.
        every = source_view(record).time_range
        assert every is not None
        assert not every.counts_whole


@pytest.mark.parametrize("window", [True, False])
def test_a_sum_of_processes_adds_up_what_lay_in_the_window_of_each(window: bool) -> None:
    with a_host() as one, a_host() as other:
        viewers = [Viewer(one), Viewer(other)]
        for at, viewer in enumerate(viewers):
            viewer.hears(viewer.host.said(4 * SECOND, whole=True))
            viewer.host.ran((1, at * SECOND, (5 + at) * SECOND), (2, 7 * SECOND - 1, 7 * SECOND))
            viewer.hears(viewer.host.said(7 * SECOND))
        records = [replace(next(iter(v.store.sources.values())), key=str(at)) for at, v in enumerate(viewers)]
        found = merged_view(records, MergeMode.SUM, window=window).time_range
        assert found is not None
        assert found.in_steps_us == (3e6 + 0.002 if window else 10e6 + 0.002)


def _forged(node: int, begin: int, length: int) -> Callable[[StatsUpdate], StatsUpdate]:
    columns = [np.array([value], np.int64) for value in (node, begin, length)]
    return lambda update: replace(update, ran=Packed(pack_columns(columns)))


ROWS = [(-1, 0, 1), (1 << 40, 0, 1), (1, -1, 1), (1, 0, -1), (1, 1 << 62, 1), (1, 0, 1 << 62)]


@pytest.mark.parametrize("row", ROWS)
def test_steps_that_cannot_have_run_are_refused(row: tuple[int, int, int]) -> None:
    with a_host() as host:
        viewer = Viewer(host)
        viewer.hears(host.said(SECOND, whole=True))
        host.ran((1, 0, SECOND))
        for message in host.said(2 * SECOND):
            if isinstance(message, StatsUpdate):
                with pytest.raises(DecodeError, match="steps out of range"):
                    viewer.hears([_forged(*row)(message)])


def test_of_more_intervals_than_a_message_takes_the_newest_are_said() -> None:
    stats, step_of = NodeStats(), np.array([-1, 1], np.int64)
    one = np.ones(3 * MAX_SAID_INTERVALS, np.int64)
    begin = 10 * np.arange(len(one))
    stats.add(Batch(one, 0 * one, begin, begin + 7, one, 0), step_of, -one[:2])
    node, begins, lengths = stats.intervals.since(0, MAX_SAID_INTERVALS)
    assert (len(node), set(lengths.tolist())) == (MAX_SAID_INTERVALS, {7})
    assert begins.tolist() == begin[-MAX_SAID_INTERVALS:].tolist()
    assert stats.intervals.since(int(begin[-1]), MAX_SAID_INTERVALS)[0].tolist() == [0, 1]


def test_a_window_that_is_let_go_of_takes_nothing() -> None:
    with a_host() as host:
        viewer = Viewer(host)
        viewer.hears(host.said(SECOND, whole=True))
        host.ran((1, 0, 2 * SECOND))
        viewer.hears(host.said(2 * SECOND))
        (record,) = viewer.store.sources.values()
        window: Window = record.window
        assert window.size_bytes > 0
        for _ in range(window.stored_slices):
            window.shorten()
        assert window.size_bytes == 0
