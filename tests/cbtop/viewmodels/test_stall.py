"""Tests of the state of a process.

A process is called stalled, idle, suspended or quiet only if the data shows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.client.source_record import SourceRecord
from cbtop.protocol.messages import Activity, Manifest, Quiet, Sampling
from cbtop.protocol.ring import HELD
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.reports.json import json_report
from cbtop.reports.sources import sources_json, sources_text
from cbtop.reports.text import text_report
from cbtop.text import source_text
from cbtop.viewmodels.source import source_view
from cbtop.viewmodels.sources import source_row
from cbtop.viewmodels.stall import MIN_S, SLOW, limit_s, stall_view
from tests.cbtop.recorded import Clock, profiler_in, record_of, source_of

SECOND_NS = 1_000_000_000


@pytest.fixture
def record(runtime: Path) -> SourceRecord:
    """Record a prefill of 500 ms and then decode steps of 100 ms. A scope named loop surrounds the steps.

    AllReduce of layer 17 takes nearly all of the time.
    """
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for phase, ms in [("prefill", 500)] + [("decode", 100)] * 20:
        with profiler.step(phase, 1), profiler.layer(17), profiler.brick("AllReduce"):
            clock.sleep_us(1000 * ms)
    profiler.start_brick("serve")
    profiler.start_brick("wait for a request")
    with profiler.step("verify", 1), profiler.brick("AllReduce"):  # this step does not end
        return record_of(source_of(runtime))


def node(record: SourceRecord, *path: str) -> int:
    found: int | None = None
    for name in path:
        found = next(each.id for each in record.nodes.children[found] if each.name == name)
    assert found is not None
    return found


def quiet(record: SourceRecord, seconds: float, **known: object) -> SourceRecord:
    assert record.state is not None
    record.state = replace(record.state, quiet=Quiet(int(seconds * SECOND_NS), **known))  # type: ignore[arg-type]
    return record


IN_FLIGHT = ("decode", "17", "AllReduce")


def test_a_process_that_goes_on_is_live(record: SourceRecord) -> None:
    view = source_view(record)
    assert (view.stall, view.standing) == (None, "live")


def test_what_hangs_is_stalled_and_names_brick_layer_and_age_everywhere(record: SourceRecord) -> None:
    at = node(record, *IN_FLIGHT)
    quiet(record, 32.4, in_flight=at, in_flight_ns=32_300_000_000, threads=1, is_watched=True)
    view, row = source_view(record), source_row(record)
    stall = view.stall
    assert stall is not None
    assert (view.standing, stall.place) == ("stalled", ("decode", "Layer 17", "AllReduce"))
    assert (stall.phase, stall.layer, stall.brick) == ("decode", "Layer 17", "AllReduce")
    assert (stall.age_s, stall.runs_s) == (32.4, 32.3)
    told = "stalled for 32 s in decode → Layer 17 → AllReduce (p99 of every decode: 100.0 ms)"
    assert source_text.stall(stall) == told
    for text in (text_report([view], []), sources_text([row])):
        assert "STALLED 32 s" in text
        assert told in text
        assert "LIVE" not in text
    for report in (json_report([view]), sources_json([row])):
        (source,) = json.loads(report)["sources"]
        assert (source["state"], source["stall"]["age_s"], source["stall"]["brick"]) == ("stalled", 32.4, "AllReduce")


@given(p99_s=st.none() | st.floats(0, 1e4))
def test_it_takes_two_seconds_or_ten_times_the_p99_whichever_is_longer(p99_s: float | None) -> None:
    limit = limit_s(p99_s)
    assert limit >= MIN_S
    assert limit >= SLOW * (p99_s or 0)
    assert limit in (MIN_S, SLOW * (p99_s or 0))


@pytest.mark.parametrize(
    ("place", "below_s", "above_s"), [(IN_FLIGHT, 1.9, 2.1), (("prefill", "17", "AllReduce"), 4.8, 5.2)]
)
def test_the_threshold_is_that_of_the_phase_that_runs(
    record: SourceRecord, place: tuple[str, ...], below_s: float, above_s: float
) -> None:
    at = node(record, *place)
    assert stall_view(quiet(record, below_s, in_flight=at, threads=1)) is None
    stall = stall_view(quiet(record, above_s, in_flight=at, threads=1))
    assert stall is not None
    assert (stall.word, stall.age_s >= stall.limit_s) == ("stalled", True)


def test_in_a_step_of_which_none_has_ended_nobody_knows_what_is_long(record: SourceRecord) -> None:
    stall = stall_view(quiet(record, 3600, in_flight=node(record, "verify"), threads=1, is_watched=True))
    assert stall is not None
    assert (stall.word, stall.phase) == ("quiet", "verify")
    assert "none of these has ended yet" in source_text.stall(stall)


@pytest.mark.parametrize(
    ("context", "tokens", "seconds", "standing"),
    [
        (0, 0, 60, "quiet"),
        (10_000, 0, 60, "live"),
        (10_000, 0, 101, "stalled"),
        # This process usually takes 10 s per token. So 60 s without progress are not a stall.
        (0, 10_000, 60, "live"),
        (0, 10_000, 101, "stalled"),
        (10_000, 20, 60, "stalled"),
    ],
)
def test_a_step_may_take_as_long_as_its_tokens_or_the_most_at_the_usual_pace(
    runtime: Path, context: int, tokens: int, seconds: float, standing: str
) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for count in (10, 20, 30):  # 1 ms per token
        with profiler.step("prefill", count), profiler.brick("AttentionScore"):
            clock.sleep_us(1000 * count)
    record = record_of(source_of(runtime))
    record.manifest = Manifest("made", "made", "torch", "F32", 1, 1, 8, context, 1_000, 4_000)
    known = {"in_flight": node(record, "prefill"), "in_flight_ns": 10**9, "threads": 1, "in_flight_size": tokens}
    quiet(record, seconds, **known, is_watched=True)
    assert source_view(record).standing == standing


def test_between_two_steps_a_process_is_idle(record: SourceRecord) -> None:
    assert stall_view(quiet(record, 1.9, is_watched=True)) is None
    stall = stall_view(quiet(record, 32, is_watched=True))
    assert stall is not None
    assert source_text.stall(stall) == "idle for 32 s: no step runs"


def test_a_server_that_waits_in_its_loop_is_idle(record: SourceRecord) -> None:
    stall = stall_view(
        quiet(record, 32, in_flight=node(record, "serve", "wait for a request"), threads=1, is_watched=True)
    )
    assert stall is not None
    assert source_text.stall(stall) == "idle for 32 s in serve → wait for a request: no step runs"


def test_a_wait_outside_of_steps_that_is_longer_than_any_before_is_no_stall(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for _ in range(20):
        with profiler.brick("wait for a request"):
            clock.sleep_us(10_000)
        with profiler.step("decode", 1):
            clock.sleep_us(20_000)
    record = record_of(source_of(runtime))
    at = node(record, "wait for a request")
    stall = stall_view(quiet(record, 32, in_flight=at, threads=1, is_watched=True))
    assert stall is not None
    assert source_text.stall(stall) == "idle for 32 s in wait for a request: no step runs"
    _sampled(record)
    stall = stall_view(quiet(record, 32, in_flight=at, threads=1, is_watched=True))
    assert stall is not None
    assert (stall.word, stall.usual_of) == ("quiet", "step of the slowest phase")


def test_where_several_threads_wait_outside_of_steps_none_is_in_one(record: SourceRecord) -> None:
    at = node(record, "serve", "wait for a request")
    stall = stall_view(quiet(record, 32, in_flight=at, threads=2, is_watched=True))
    assert stall is not None
    assert stall.word == "idle"
    # One of the two threads does not report its current node.
    stall = stall_view(quiet(record, 32, in_flight=at, threads=2))
    assert stall is not None
    assert stall.word == "quiet"


def _by_python(record: SourceRecord) -> None:
    """Leave the process as it is. None of its threads reports a current node."""


def _sampled(record: SourceRecord) -> None:
    assert record.hello is not None
    record.hello = replace(record.hello, sample_every=16)


def _governed(record: SourceRecord) -> None:
    record.sampling = Sampling(4, None, None, None, 1.0)


@pytest.mark.parametrize("change", [_by_python, _sampled, _governed])
def test_a_process_that_may_run_an_unrecorded_step_is_not_idle_or_stalled(
    record: SourceRecord, change: Callable[[SourceRecord], None]
) -> None:
    change(record)
    is_watched = change is not _by_python
    # A prefill may take this long, and the process may be in one.
    assert stall_view(quiet(record, 4.8, is_watched=is_watched)) is None
    stall = stall_view(quiet(record, 32, is_watched=is_watched))
    assert stall is not None
    assert (stall.word, stall.place, stall.usual_of) == ("quiet", (), "step of the slowest phase")
    assert "whether a step runs is not known" in source_text.stall(stall)


def test_a_step_without_a_name_is_held_against_the_slowest_steps(record: SourceRecord) -> None:
    assert stall_view(quiet(record, 4.8, in_flight=HELD, threads=1)) is None
    stall = stall_view(quiet(record, 32, in_flight=HELD, threads=1))
    assert stall is not None
    assert source_text.stall(stall).startswith(
        "stalled for 32 s in a step without a name yet (p99 of every step of the slowest phase"
    )


def test_where_only_records_tell_it_is_said_after_what_it_hangs(record: SourceRecord) -> None:
    stall = stall_view(quiet(record, 32, in_flight=node(record, "decode"), last=node(record, *IN_FLIGHT)))
    assert stall is not None
    assert source_text.stall(stall).startswith("stalled for 32 s in decode, after Layer 17 → AllReduce (")


def test_of_several_threads_it_is_said_that_there_are_more(record: SourceRecord) -> None:
    stall = stall_view(quiet(record, 32, in_flight=node(record, *IN_FLIGHT), threads=3))
    assert stall is not None
    assert "begun last of 3 threads" in source_text.stall(stall)


def test_a_suspended_process_says_so_and_what_it_is_in(record: SourceRecord) -> None:
    at = node(record, *IN_FLIGHT)
    record.activity = Activity("measuring ceilings", 0.4)
    stall = stall_view(quiet(record, 32, in_flight=at, threads=1, is_suspended=True))
    assert stall is not None
    assert source_text.stall(stall) == "suspended, without progress for 32 s in decode → Layer 17 → AllReduce"


def test_who_announces_what_it_is_busy_with_is_not_judged(record: SourceRecord) -> None:
    at = node(record, *IN_FLIGHT)
    assert stall_view(quiet(record, 600, in_flight=at, threads=1)) is not None
    record.activity = Activity("compiling kernels", 0.4)
    assert stall_view(quiet(record, 600, in_flight=at, threads=1)) is None
    assert stall_view(quiet(record, 600, is_watched=True)) is None


@pytest.mark.parametrize("ended", [SourceStatus.ENDED, SourceStatus.GONE, SourceStatus.FAULTY])
def test_what_has_ended_is_not_stalled(record: SourceRecord, ended: SourceStatus) -> None:
    quiet(record, 600, in_flight=node(record, *IN_FLIGHT), threads=1)
    assert record.state is not None
    record.state = replace(record.state, state=ended)
    view = source_view(record)
    assert (view.stall, view.standing) == (None, ended)


def test_a_node_that_the_catalog_does_not_know_is_none(record: SourceRecord) -> None:
    stall = stall_view(quiet(record, 600, in_flight=10**6, last=10**6, threads=1))
    assert stall is not None
    assert (stall.word, stall.place, stall.after) == ("quiet", (), ())


def test_without_steps_a_brick_is_held_against_itself(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for _ in range(20):
        with profiler.brick("AllReduce"):
            clock.sleep_us(500_000)
    record = record_of(source_of(runtime))
    at = node(record, "AllReduce")
    assert stall_view(quiet(record, 4.8, in_flight=at, threads=1, is_watched=True)) is None
    stall = stall_view(quiet(record, 32, in_flight=at, threads=1, is_watched=True))
    assert stall is not None
    assert (stall.word, stall.phase, stall.brick, stall.usual_of) == ("stalled", None, "AllReduce", "AllReduce")
    idle = stall_view(quiet(record, 32, is_watched=True))
    assert idle is not None
    assert source_text.stall(idle) == "idle for 32 s: no brick runs"


def test_before_anything_has_run_nothing_is_said(runtime: Path) -> None:
    profiler = profiler_in(runtime, Clock())
    profiler.announce(Activity(""))
    assert stall_view(quiet(record_of(source_of(runtime)), 600)) is None
