"""Tests of tokens per second of wall-clock time: all outputs show the same rate.

The clock is fake, so nothing sleeps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.client.source_record import SourceRecord
from cbtop.client.store import Store
from cbtop.daemon.source import Source
from cbtop.profiler.analysis.node_columns import ANY_STEP
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.messages import StatsUpdate
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.reports import REPORTS
from cbtop.reports.sources import sources_json, sources_text
from cbtop.telemetry.metrics import TOKENS
from cbtop.telemetry.snapshot import snapshot
from cbtop.text import range_text
from cbtop.tui.views.books import books_rule
from cbtop.tui.views.header import Heading, _identity, _tiles
from cbtop.viewmodels.merge import merged_view
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import SourceView, source_view
from cbtop.viewmodels.sources import source_row
from cbtop.viewmodels.verdicts.data_incomplete import DATA_INCOMPLETE
from cbtop.viewmodels.verdicts.idle_between_steps import IDLE_BETWEEN_STEPS
from tests.cbtop.recorded import Clock, apply, profiler_in, seen_at, source_of
from tests.representatives import first_by_default

MS = 1_000_000


class Paced:
    """A process with steps of 30 ms for one token and pauses of 30 ms. The daemon reads it every 100 ms."""

    def __init__(self, directory: Path, ring_bytes: int = 1 << 20, ahead_ns: int = 0) -> None:
        directory.mkdir(exist_ok=True)
        self.clock = Clock(ahead_ns)
        self._ahead_ns = ahead_ns  # time by which the clock of the process is ahead of its host's clock
        self.profiler = profiler_in(directory, self.clock, ring_bytes)
        self.store = Store()
        self._directory = directory
        self._source: Source | None = None
        self._looked_ns = ahead_ns

    def step(self, ms: float = 30, phase: str = "decode", tokens: int = 1) -> None:
        with self.profiler.step(phase, tokens), self.profiler.brick("Work", 1):
            self.clock.sleep_us(1000 * ms)

    def run(self, seconds: float, sleep_ms: float = 30) -> None:
        until_ns = self.clock.now_ns + seconds * 1e9
        while self.clock.now_ns < until_ns:
            self.step()
            self.sleep(sleep_ms)

    def sleep(self, ms: float, then_ms: float = 100) -> None:
        """Let `ms` milliseconds pass without steps. The daemon reads every `then_ms` milliseconds."""
        until_ns = self.clock.now_ns + round(ms * MS)
        while self._looked_ns + then_ms * MS <= until_ns:
            self.clock.now_ns = max(self.clock.now_ns, self._looked_ns + round(then_ms * MS))
            self.look()
        self.clock.now_ns = until_ns

    def look(self) -> None:
        self._looked_ns = self.clock.now_ns
        if any(self._directory.glob("*.ring")):
            apply(self.store, seen_at(self.source, self.clock.now_ns - self._ahead_ns))

    @property
    def source(self) -> Source:
        self._source = self._source or source_of(self._directory)
        return self._source

    @property
    def record(self) -> SourceRecord:
        (record,) = self.store.sources.values()
        return record

    def view(self, *, window: bool = True, phase: str | None = None) -> SourceView:
        return source_view(self.record, phase, window=window)

    def end(self) -> None:
        """End the process and let the daemon report it."""
        self.source._end(SourceStatus.ENDED, "done")
        apply(self.store, [self.source.state_message()])


@pytest.fixture
def paced(tmp_path: Path) -> Iterator[Paced]:
    made = Paced(tmp_path)
    yield made
    made.profiler.close()


def header_of(view: SourceView) -> str:
    return "\n".join("".join(text for text, _ in line) for line in _tiles(view, 200))


def shown_rates(paced: Paced, name: str, *, window: bool) -> dict[str, float]:
    """Return a rate as text, JSON and the other outputs show it. `name` is its key in JSON."""
    view, row = paced.view(window=window), source_row(paced.record, window=window)
    said = json.loads(REPORTS["json"]([view], []))["sources"][0]["steps"]
    text = REPORTS["text"]([view], ["bricks"])
    above, below = header_of(view).split("\n")
    if name == "tokens_per_sec":
        (in_text,) = re.findall(r"([\d,.]+) tokens/s", text)
        found = {"header": below.split()[0], "text": in_text}
        found["ls"] = re.findall(r"  ([\d.]+) +[\d.]+ +[\d.]+ ms$", sources_text([row]), re.MULTILINE)[0]
    else:
        (in_text,) = re.findall(r"([\d,.]+) tok/s without pauses", text)
        at = above.index("tok/s no pauses")
        found = {"header": below[at:].split()[0], "text": in_text}
    listed = json.loads(sources_json([row]))["sources"][0][name]
    return {"JSON": said[name], "JSON of ls": listed, **{where: float(value) for where, value in found.items()}}


@pytest.mark.slow
def test_a_process_with_sleeps_between_steps_shows_wall_clock_tokens_always(paced: Paced) -> None:
    paced.run(30)
    for window in (True, False):
        view = paced.view(window=window)
        for where, rate in shown_rates(paced, "tokens_per_sec", window=window).items():
            assert rate == pytest.approx(16.7, abs=0.15), where
        for where, rate in shown_rates(paced, "tokens_per_sec_in_steps", window=window).items():
            assert rate == pytest.approx(33.3, abs=0.1), where
        assert view.tokens_per_sec_history
        assert all(15 <= rate <= 18 for rate in view.tokens_per_sec_history)


def test_screen_text_list_and_json_hold_the_same_tokens_per_second(paced: Paced) -> None:
    for pause_ms in (0, 7, 300):
        paced.run(3, pause_ms)
        for window in (True, False):
            for name in ("tokens_per_sec", "tokens_per_sec_in_steps"):
                rates = shown_rates(paced, name, window=window)
                assert all(rate == pytest.approx(rates["JSON"], abs=0.006) for rate in rates.values()), rates


@pytest.mark.slow
def test_what_prometheus_computes_from_the_counter_is_the_same_number(paced: Paced) -> None:
    counted = []
    for _ in range(2):
        paced.run(10.2)
        paced.look()
        (point,) = snapshot(paced.store, 0)[TOKENS]
        counted.append((point.value, paced.clock.now_ns / 1e9))
    (tokens, at_s), (later, later_s) = counted
    steps = paced.view().steps
    assert steps is not None
    assert steps.tokens_per_sec == pytest.approx((later - tokens) / (later_s - at_s), rel=0.02)


def test_between_steps_is_a_line_that_closes_on_screen_in_text_and_in_json(paced: Paced) -> None:
    paced.run(30)
    for window in (True, False):
        view = paced.view(window=window)
        said = json.loads(REPORTS["json"]([view], []))["sources"][0]["stretch"]
        parts = said["in_steps_us"] + said["between_steps_us"] + said["since_last_step_us"]
        assert said["wall_us"] == pytest.approx(parts)
        assert said["between_steps_percent"] == pytest.approx(50, abs=1)
        line = next(line for line in REPORTS["text"]([view], ["bricks"]).splitlines() if line.startswith("wall "))
        for key in ("wall_us", "in_steps_us", "between_steps_us"):
            assert f" {said[key] / 1e6:.2f} s" in line
        rule = "".join(text for text, _ in books_rule(view, "where a step's time goes", 80))
        assert f"between steps {said['between_steps_percent']:.1f} %" in rule


def test_prefill_is_not_between_decode_steps_and_phases_share_the_wall_clock(
    paced: Paced,
) -> None:
    paced.sleep(100)
    for _ in range(20):
        paced.step(500, "prefill", tokens=100)
        paced.step(400)
        paced.sleep(100)
    view = paced.view(window=False)
    assert view.time_range is not None
    assert {phase.name: phase.us for phase in view.time_range.by_phase} == {"prefill": 10e6, "decode": 8e6}
    assert (view.time_range.in_steps_us, view.time_range.between_us) == (18e6, pytest.approx(1.9e6))
    rates = {steps.phase: steps.tokens_per_sec for steps in view.phases}
    assert rates == {"prefill": pytest.approx(2000 / 20, rel=0.01), "decode": pytest.approx(20 / 20, rel=0.01)}
    assert "in steps 18.00 s (prefill 10.00 s, decode 8.00 s) + between" in REPORTS["text"]([view], ["bricks"])


@pytest.mark.slow
def test_steps_that_run_at_the_same_time_in_two_phases_count_that_time_once(paced: Paced) -> None:
    for _ in range(2):
        with paced.profiler.step("outer", 1):
            paced.step(1000, "inner")
            paced.clock.sleep_us(1e6)
        paced.sleep(5000)
    time_range = paced.view(window=False).time_range
    assert time_range is not None
    assert (time_range.in_steps_us, time_range.between_us, time_range.since_last_us) == (4e6, 5e6, 5e6)


def test_time_in_any_step_is_known_for_one_phase_if_the_daemon_omits_it(
    paced: Paced,
) -> None:
    paced.step(1000)
    paced.sleep(500)
    del paced.record.stats.sparse["union_ns"][ANY_STEP]
    time_range = paced.view(window=False).time_range
    assert time_range is not None
    assert time_range.in_steps_us == 1e6
    paced.step(1000, "prefill")
    paced.sleep(500)
    del paced.record.stats.sparse["union_ns"][ANY_STEP]
    view = paced.view(window=False)
    assert view.time_range is not None
    assert (view.time_range.in_steps_us, view.time_range.between_us) == (None, None)
    assert "wall clock 3.00 s: in how much of it steps ran is n/a" in REPORTS["text"]([view], ["bricks"])
    assert json.loads(REPORTS["json"]([view], []))["sources"][0]["stretch"]["between_steps_us"] is None


@pytest.mark.parametrize("field", ["steps_ns", "first_ns"])
def test_times_that_cannot_be_are_refused(paced: Paced, field: str) -> None:
    paced.run(1)
    said = [message for message in paced.source.snapshot() if isinstance(message, StatsUpdate)]
    for value in (-1, 1 << 62):
        with pytest.raises(DecodeError, match="times out of range"):
            apply(paced.store, [replace(said[0], **{field: value})])


@pytest.mark.slow
def test_the_rate_of_a_process_that_has_stopped_stepping_falls_to_zero(paced: Paced) -> None:
    paced.run(20)
    rates = []
    for _ in range(6):
        paced.sleep(2000)
        view = paced.view()
        assert view.steps is not None
        rates.append(view.steps.tokens_per_sec)
    assert rates[0] == pytest.approx(13.3, rel=0.1)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0
    assert view.tokens_per_sec_history[-1] == 0
    assert view.time_range is not None
    # The time since the last step does not count as time between steps, because a step may be running.
    assert view.time_range.between_us == 0
    assert view.time_range.since_last_us == view.time_range.wall_us
    rule = "".join(text for text, _ in books_rule(view, "where a step's time goes", 80))
    assert "no step has ended in these 10." in rule


def test_each_second_has_its_mean_step_next_to_its_rate_or_none_if_none_end(paced: Paced) -> None:
    paced.run(3)
    paced.sleep(3_000)
    view = paced.view(window=True)
    assert len(view.step_us_history) == len(view.tokens_per_sec_history)
    assert [us and round(us) for us in view.step_us_history[:2]] == [30_000, 30_000]
    assert view.step_us_history[-2:] == (None, None)
    assert view.tokens_per_sec_history[-2:] == (0.0, 0.0)


@pytest.mark.slow
def test_the_figures_of_a_process_that_has_ended_end_with_its_last_step(paced: Paced) -> None:
    paced.run(20)
    before = {window: paced.view(window=window) for window in (True, False)}
    paced.end()
    paced.sleep(60_000, then_ms=5000)  # The process has ended. Later keyframes repeat this state.
    for window, running in before.items():
        ended = paced.view(window=window)
        assert ended.steps is not None
        assert running.steps is not None
        assert ended.steps.count == running.steps.count
        assert ended.steps.tokens_per_sec == pytest.approx(16.7, abs=0.15)
        assert ended.time_range is not None
        assert ended.time_range.since_last_us == 0
        assert range_text.shown_time(ended).startswith("its last 10." if window else "since ")
    assert paced.view().tokens_per_sec_history == before[True].tokens_per_sec_history


def test_since_is_the_begin_of_the_first_seen_record_and_not_of_the_process(tmp_path: Path) -> None:
    late = Paced(tmp_path, ring_bytes=1 << 16)
    for _ in range(5000):  # 5,000 steps have 10,000 records. The ring has room for only 2,048.
        late.step()
        late.clock.sleep_us(30_000)
    late.look()
    view = late.view(window=False)
    hello = late.record.hello
    assert hello is not None
    assert view.since_s is not None
    assert view.loss.before_attach > 0
    assert view.steps is not None
    seen_s = 5000 * 0.06 - (view.since_s - hello.realtime_ns / 1e9)
    assert seen_s == pytest.approx(view.steps.count * 0.06, abs=0.001)
    assert view.steps.tokens_per_sec == pytest.approx(16.7, abs=0.1)
    said = json.loads(REPORTS["json"]([view], []))["sources"][0]
    assert said["since_s"] == view.since_s
    late.profiler.close()


def test_no_time_of_day_is_made_if_the_records_have_another_clock(paced: Paced) -> None:
    paced.run(3)
    record = paced.record
    assert record.hello is not None
    record.hello = replace(record.hello, monotonic_ns=10**15)
    view = paced.view(window=False)
    assert view.since_s is None
    assert view.steps is not None
    assert view.steps.tokens_per_sec == pytest.approx(16.7, rel=0.02)
    assert "figures: all that was seen" in REPORTS["text"]([view], ["bricks"])


@pytest.mark.slow
def test_records_lost_in_the_window_are_said_however_many_were_seen_before(tmp_path: Path) -> None:
    made = Paced(tmp_path, ring_bytes=1 << 12)  # room for 128 records
    made.run(30)
    assert DATA_INCOMPLETE.judge(made.view()) is None
    for _ in range(70):  # 140 records overflow the ring of 128 records before the daemon reads it.
        made.step()
    made.look()
    assert made.record.state is not None
    made.record.state = replace(made.record.state, produced=10**6, received=10**6 - 12)
    said = {window: DATA_INCOMPLETE.judge(made.view(window=window)) for window in (True, False)}
    assert said[False] is None
    assert said[True] is not None
    assert re.match(r"Data is incomplete: \d+ of 4\d\d records were lost in these last seconds", said[True].sentence)
    made.profiler.close()


def test_records_lost_before_a_viewer_came_are_not_of_its_last_seconds(tmp_path: Path) -> None:
    made = Paced(tmp_path, ring_bytes=1 << 12)
    made.run(1)
    for _ in range(70):
        made.step()
    made.look()
    made.store = Store()  # This new viewer receives statistics before it receives the state of the process.
    made.run(3)
    assert made.view().loss.lost > 0
    said = {window: DATA_INCOMPLETE.judge(made.view(window=window)) for window in (True, False)}
    assert said[True] == said[False] is not None
    losses = made.record.window.losses
    assert (losses.lost, losses.seen > 0) == (0, True)
    made.profiler.close()


@pytest.mark.slow
def test_the_last_seconds_of_a_sum_are_those_of_members_that_run_and_say_so(tmp_path: Path) -> None:
    members = [Paced(tmp_path / str(at)) for at in range(3)]
    for member in members:
        member.run(15)
    records = [replace(member.record, key=str(at)) for at, member in enumerate(members)]
    cases = (
        (0, r"figures: the last 10\.\d s;", 3),
        (1, r"figures: the last 10\.\d s of the 2 that run;", 2),
        (2, r"figures: the last 10\.\d s of the 1 that runs;", 1),
        (3, r"figures: its last 10\.\d s;", 3),
    )
    for gone, shown, added in cases:
        for record in records[:gone]:
            assert record.state is not None
            record.state = replace(record.state, state=SourceStatus.GONE)
        view = merged_view(records, MergeMode.SUM, window=True)
        text = REPORTS["text"]([view], ["bricks"])
        assert re.search(shown, text)
        assert f" (of {added} processes, added up) = in steps " in text
        head = "".join(word for word, _ in _identity(Heading(view, paused=False, position=""), 120))
        assert (" that run" in head) == (gone in (1, 2))
    for member in members:
        member.profiler.close()


@first_by_default("ended_s", [-1, 4])
def test_a_range_of_a_sum_has_members_that_ended_in_it_and_not_those_before(tmp_path: Path, ended_s: int) -> None:
    members = [Paced(tmp_path / str(at)) for at in range(2)]
    for member, until_s in zip(members, (15, 15 + ended_s), strict=True):
        member.run(min(15, until_s))
        if until_s < 15:
            member.end()
        member.record.begin_range(member.clock.now_ns, 10)
    members[0].run(10)
    if ended_s > 0:
        members[1].run(ended_s)
        members[1].end()
    records = [replace(member.record, key=str(at)) for at, member in enumerate(members)]
    view = merged_view(records, MergeMode.SUM, window=True)
    alone = source_view(records[0], window=True)
    assert view.steps is not None
    assert alone.steps is not None
    assert view.steps.count == alone.steps.count + max(ended_s, 0) * 1000 // 60
    assert view.window is not None
    assert alone.window is not None
    assert view.window.covers_s == pytest.approx(alone.window.covers_s)
    assert view.window.range_s == pytest.approx(alone.window.range_s, abs=0.001)
    assert view.steps.tokens_per_sec == pytest.approx(view.steps.tokens / alone.window.covers_s)
    assert len(view.tokens_per_sec_history) == len(alone.tokens_per_sec_history)
    assert view.tokens_per_sec_history[-4:] == alone.tokens_per_sec_history[-4:]
    for member in members:
        member.profiler.close()


@pytest.mark.slow
def test_a_clock_ahead_of_the_host_gives_no_since_and_no_time_since_an_end(
    tmp_path: Path,
) -> None:
    # The clock of this process is time.time_ns, which is far ahead of the daemon's clock.
    ahead = Paced(tmp_path, ahead_ns=1_700_000_000_000_000_000)
    ahead.run(15)
    ahead.sleep(6000)
    for window in (True, False):
        view = ahead.view(window=window)
        assert view.time_range is not None
        assert (view.since_s, view.time_range.since_last_us) == (None, None)
        assert (view.time_range.between_us is None) == window
        assert f"between steps {'n/a' if window else '7'}" in REPORTS["text"]([view], ["bricks"])
        assert IDLE_BETWEEN_STEPS.judge(view) is None or not window
    text = REPORTS["text"]([view], ["bricks"])
    assert "figures: all that was seen" in text
    ahead.profiler.close()


def test_before_a_second_was_watched_all_that_was_seen_is_shown_and_said(paced: Paced) -> None:
    paced.run(0.5)
    assert paced.view().window is None
    assert "figures: since " in REPORTS["text"]([paced.view()], ["bricks"])
    paced.run(2)
    assert paced.view().window is not None
    assert "figures: the last " in REPORTS["text"]([paced.view()], ["bricks"])


def test_what_is_found_ended_shows_all_that_was_seen(paced: Paced) -> None:
    for _ in range(10):
        paced.step()
        paced.clock.sleep_us(30_000)
    paced.look()
    paced.end()
    view = paced.view()
    assert view.window is None
    assert view.steps is not None
    assert (view.steps.count, view.steps.tokens_per_sec) == (10, pytest.approx(10 / 0.57))


@pytest.mark.slow
@first_by_default("window", [True, False])
def test_the_rate_of_a_sum_is_the_sum_of_the_rates_and_its_time_closes(tmp_path: Path, window: bool) -> None:
    members = [Paced(tmp_path / str(at)) for at in range(2)]
    for at, member in enumerate(members):
        member.run(15, sleep_ms=30 + 40 * at)
    records = [replace(member.record, key=str(at)) for at, member in enumerate(members)]
    view = merged_view(records, MergeMode.SUM, window=window)
    assert view.steps is not None
    assert view.steps.tokens_per_sec == pytest.approx(16.7 + 10, abs=0.2)
    assert view.steps.tokens_per_sec_in_steps == pytest.approx(66.7, abs=0.1)
    assert view.time_range is not None
    assert None not in (view.time_range.in_steps_us, view.time_range.between_us, view.time_range.since_last_us)
    parts = (
        (view.time_range.in_steps_us or 0) + (view.time_range.between_us or 0) + (view.time_range.since_last_us or 0)
    )
    assert view.time_range.wall_us == pytest.approx(parts)
    assert " (of 2 processes, added up) = in steps " in REPORTS["text"]([view], ["bricks"])
    for member in members:
        member.profiler.close()
