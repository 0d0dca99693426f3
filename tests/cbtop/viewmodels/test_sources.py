"""Tests of the row of a process in the list: the row has the same figures as the views of the process.

Each missing figure has a reason.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.client.source_record import SourceRecord
from cbtop.client.store import Store
from cbtop.daemon.source import Source
from cbtop.feeds.replay import ReplayFeed
from cbtop.protocol.device_messages import DeviceProcess
from cbtop.protocol.messages import Activity, Sampling
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.text import rate_text
from cbtop.text.source_text import SOURCE_FIGURES, process_cost
from cbtop.viewmodels.devices import machine_view
from cbtop.viewmodels.loss import LossView, loss_view
from cbtop.viewmodels.selection import WindowView
from cbtop.viewmodels.source import source_view
from cbtop.viewmodels.sources import NOT_READ, ClockView, SourceRow, daemon_cost, source_row
from tests.cbtop import made_machines
from tests.cbtop.made_machines import CPU, HELLO, NVML, PID, START, store_of
from tests.cbtop.made_recordings import BEGIN_NS, made_recording
from tests.cbtop.recorded import Clock, apply, decode_run, profiler_in, seen_at, source_of

SECOND_NS = 1_000_000_000
ELSEWHERE = ClockView(-3_210.0, 88.0, 110.0)


def record(runtime: Path, at_ns: int = SECOND_NS) -> SourceRecord:
    """Return the record of a process. Its last message came at `at_ns` of its host's clock."""
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.step("decode", tokens=2), profiler.brick("a", 8):
        clock.sleep_us(400)
    store = Store()
    source = source_of(runtime)
    apply(store, seen_at(source, at_ns))
    return store.sources[source.key]


def figures_without_reason(row: SourceRow) -> set[str]:
    """Return the missing figures that do not have exactly one reason."""
    steps = row.steps
    values = {
        "model": row.model,
        "steps_per_sec": row.steps_per_sec,
        "tokens_per_sec": steps.tokens_per_sec if steps and row.steps_per_sec is not None else 0,
        "lag_s": row.lag_s if row.state is SourceStatus.LIVE else 0,
        "devices": row.devices if row.state is SourceStatus.LIVE else 0,
        "clock_offset_us": row.clock,
        "overhead_percent": row.overhead.overhead_percent if row.overhead else None,
    }
    assert {*values, "rate_change"} == SOURCE_FIGURES.keys()  # rate_change is known only with a baseline.
    unknown = [one.figure for one in row.unknown]
    assert len(unknown) == len(set(unknown))
    assert all(one.why for one in row.unknown)
    return {name for name, value in values.items() if value is None} ^ set(unknown)


def test_its_figures_are_those_of_its_view(runtime: Path) -> None:
    found = decode_run(runtime)
    row, view = source_row(found), source_view(found)
    assert (row.key, row.pid, row.host, row.program, row.model) == (
        view.key, view.pid, view.host, view.program, view.model,
    )  # fmt: skip
    assert (row.phase, row.steps, row.loss, row.standing) == (view.phase, view.steps, view.loss, view.standing)
    assert (row.since_s, row.window) == (view.since_s, view.window)
    assert source_row(found, "prefill").steps == source_view(found, "prefill").steps


def test_steps_a_second_are_ended_ones_over_the_wall_clock_time_of_rates(runtime: Path) -> None:
    found = decode_run(runtime)
    row, time_range = source_row(found), source_view(found).time_range
    assert row.steps is not None
    assert time_range is not None
    assert row.wall_us == time_range.wall_us
    assert row.steps_per_sec == pytest.approx(row.steps.count / time_range.wall_us * 1e6)
    assert row.steps_per_sec == pytest.approx(row.steps.tokens_per_sec)  # one token per step


def test_a_source_lags_by_the_time_on_its_own_hosts_clock_since_it_was_heard(runtime: Path) -> None:
    found = record(runtime)
    assert source_row(found, now_ns=SECOND_NS + 400_000_000).lag_s == pytest.approx(0.4)
    # The estimated clock may be a little earlier than the last message, because it has an error.
    assert source_row(found, now_ns=SECOND_NS - 5_000).lag_s == 0
    assert source_row(found).lag_s is None


def test_what_has_ended_lags_behind_nothing_and_is_on_no_device(runtime: Path) -> None:
    found = record(runtime)
    assert found.state is not None
    found.state = replace(found.state, state=SourceStatus.ENDED, reason="exit")
    row = source_row(found, now_ns=9 * SECOND_NS, clock=ELSEWHERE)
    assert (row.lag_s, row.devices) == (None, None)
    assert not {"lag_s", "devices"} & {one.figure for one in row.unknown}


def test_every_figure_that_is_na_has_one_reason_and_none_that_is_there(runtime: Path) -> None:
    found = record(runtime)
    assert figures_without_reason(source_row(found)) == set()
    assert figures_without_reason(source_row(found, clock=ELSEWHERE, now_ns=SECOND_NS)) == set()
    for said in (Sampling(20, None, None, None, 1.0), Sampling(20, 0.6, 0.4, 0.8, 1.0)):
        found.sampling = said
        assert figures_without_reason(source_row(found, clock=ELSEWHERE, now_ns=SECOND_NS)) == set()
    empty = SourceRecord("x", found.window)
    assert figures_without_reason(source_row(empty, clock=ELSEWHERE, now_ns=SECOND_NS)) == set()
    empty.activity = Activity("compiling kernels")
    (why,) = (one.why for one in source_row(empty).unknown if one.figure == "steps_per_sec")
    assert why == "it has marked no step: compiling kernels"


def test_of_what_is_not_read_yet_nothing_is_said_that_nobody_looked_for(runtime: Path) -> None:
    profiler = profiler_in(runtime, Clock())
    with profiler.step("decode", tokens=1):
        pass
    profiler.close()
    (ring,) = runtime.glob("*.ring")
    source, store = Source(ring, on_demand=True), Store()
    apply(store, source.snapshot())
    row = source_row(store.sources[source.key])
    assert row.loss.unread == 1
    assert figures_without_reason(row) == set()
    whys = {one.figure: one.why for one in row.unknown if one.figure != "clock_offset_us"}
    assert whys == dict.fromkeys(("model", "steps_per_sec", "overhead_percent"), NOT_READ)


def test_of_a_sample_that_leaves_nothing_of_the_other_steps_no_rate_is_made(runtime: Path) -> None:
    found = record(runtime)
    found.sampling = Sampling(20, 0.6, 0.4, 0.8, 1.0)
    row = source_row(found)
    assert row.steps is not None
    assert row.steps.is_sample
    assert row.steps_per_sec is None


def test_it_is_on_the_gpus_that_its_process_is_on_or_on_none_of_them() -> None:
    def devices(*said: object, **changes: object) -> tuple[tuple[str, ...] | None, list[str]]:
        store = store_of(made_machines.source(**changes), *said)  # type: ignore[arg-type]
        (one,) = store.sources.values()
        row = source_row(one, machine=machine_view(store) if store.devices else None)
        return row.devices, [unknown.why for unknown in row.unknown if unknown.figure == "devices"]

    assert devices(NVML, CPU) == (("0",), [])
    assert devices(made_machines.eight(), CPU) == (("0",), [])
    assert devices(made_machines.NO_DRIVER, CPU) == (("cpu",), [])
    for samples in ((), (made_machines.NO_DRIVER,)):  # The sampler of the host has not reported yet.
        assert devices(*samples) == (None, ["its daemon's samplers have not told it"])
    elsewhere = devices(NVML, CPU, namespace=1)
    assert elsewhere == (None, ["it is in another pid namespace than its daemon"])


def test_lost_excludes_what_nobody_could_see_and_what_the_next_update_brings() -> None:
    loss = LossView(produced=1_000, received=800, dropped=200, before_attach=100, rejected=10, on_the_wire=40)
    assert (loss.seen, loss.lost) == (900, 60)
    assert loss.lost_percent == pytest.approx(100 * 60 / 900)
    assert LossView(0, 0, 0, 0, 0).lost_percent == 0


def test_records_add_up_between_totals_of_a_message_and_the_state_after_it(tmp_path: Path) -> None:
    """The totals of many nodes arrive in several messages.

    Until the last one has arrived, the totals are newer than the counters of the process.
    """
    known = record(tmp_path)
    assert known.state is not None
    received = known.stats.received
    known.state = replace(known.state, produced=0, received=0, unread=received)
    loss = loss_view(known)
    assert (loss.produced, loss.received, loss.dropped) == (received, received, 0)
    assert (loss.on_the_wire, loss.unread) == (0, 0)


def daemon_of(*processes: DeviceProcess, pid: int = 812) -> Store:
    device = replace(CPU.devices[0], processes=processes)
    store = store_of(replace(CPU, devices=(device,)))
    store.daemon = replace(HELLO, pid=pid)
    return store


def test_what_the_daemon_costs_is_what_its_samplers_say_of_its_own_process() -> None:
    mine = DeviceProcess(812, START, "cbtop", 40e6, 1.25)
    cost = daemon_cost(daemon_of(DeviceProcess(PID, START, "x", 1e9, 99.0), mine))
    assert cost is not None
    assert (cost.name, cost.cpu_percent, cost.resident_bytes, cost.why) == ("daemon 812@gpubox", 1.25, 40e6, "")
    first = daemon_cost(daemon_of(replace(mine, utilization_percent=None)))
    assert first is not None
    assert process_cost(first) == "daemon 812@gpubox n/a (a mean needs two samples), 40.0 MB"


def test_why_it_is_not_known_what_the_daemon_costs_is_said() -> None:
    assert daemon_cost(Store()) is None
    silent = daemon_cost(daemon_of(), stale_s=5.2)
    older, untold = daemon_cost(daemon_of()), daemon_cost(store_of())
    assert [cost and process_cost(cost).partition("n/a: ")[2] for cost in (silent, older, untold)] == [
        "nothing was heard of it for 5 s",
        "an older cbtop, it does not say it",
        "its samplers have told nothing yet",
    ]


def test_a_recording_lists_its_sources_as_they_were_at_its_moment(runtime: Path, tmp_path: Path) -> None:
    path = tmp_path / "made.cbtop"
    made_recording(runtime, path, seconds=8)
    with ReplayFeed(path) as feed:
        feed.seek(6.25)
        view = feed.view()
        assert view is not None
        assert view.listed is not None
        (row,) = view.listed.rows()
        assert row.lag_s == pytest.approx(0.25)
        assert row.steps == view.steps
        assert feed.now_ns == BEGIN_NS + round(6.25 * SECOND_NS)
        assert figures_without_reason(row) == set()
        assert [cost.name for cost in view.listed.costs] == ["this viewer", "daemon 77@here"]


def test_a_row_is_made_when_it_is_asked_for_and_once(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    path = runtime / "made.cbtop"
    made_recording(runtime, path, seconds=2)

    def counted(found: SourceRecord, *said: object, **more: object) -> SourceRow:
        made.append(found.key)
        return source_row(found)

    monkeypatch.setattr("cbtop.feeds.feed.source_row", counted)
    with ReplayFeed(path) as feed:
        view = feed.view()
        assert view is not None
        assert view.listed is not None
        assert not made
        (key,) = view.listed.keys
        assert view.listed.row(key) is view.listed.row(key)
    assert made == [key]


def test_rates_are_lower_bounds_if_records_of_their_time_were_lost(tmp_path: Path) -> None:
    row = source_row(record(tmp_path))
    lossy = replace(row, loss=LossView(1_000, 800, 200, 100, 0), window=None)
    assert (rate_text.rate(lossy, 42.0), rate_text.rate(lossy, None)) == ("≥42.00", "n/a")
    recent = WindowView(10.0, 10.0, 0, 500)
    # Records were lost only before the window of the last seconds began, so the rate of the window is exact.
    assert rate_text.rate(replace(lossy, window=recent), 42.0) == "42.00"
    assert replace(lossy, window=replace(recent, lost=3)).are_rates_least
