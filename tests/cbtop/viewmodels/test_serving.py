"""Tests of the view of an engine that serves requests: its lanes and its text."""

from __future__ import annotations

from pathlib import Path

from cbtop.protocol.serving_messages import ServedRequest
from cbtop.reports import OVERVIEW, REPORTS
from cbtop.reports.summary import summary
from cbtop.text import serving_text
from cbtop.tui.views.timeline_lanes import row_blocks
from cbtop.viewmodels.request_lanes import MAX_REQUEST_LANES, request_lanes
from cbtop.viewmodels.selection import has_data
from cbtop.viewmodels.serving import (
    LatencyView,
    LoadView,
    QueueRow,
    SchedulesView,
    ServingView,
    engine_of,
    serving_view,
    shared_engine,
)
from cbtop.viewmodels.source import source_view, summaries
from tests.cbtop.made_serving import MS, REQUESTS, other_pid, served

LINE = (
    "engine TTFT p50 12.00 ms, p99 80.00 ms (3 requests); inter-token p50 8.00 ms, p99 9.00 ms (40 gaps); "
    "1 running, 2 waiting, KV cache 40.0 % used"
)
PARTS = (
    "engine step 10.00 ms, 1.50 requests: scheduler 5.0 %, model 75.0 %, between steps 20.0 % (the latest 4 steps)"
)


def _view(directory: Path) -> ServingView:
    found = serving_view(served(directory))
    assert found is not None
    return found


def test_the_parts_of_an_engine_are_shares_in_a_fixed_order(tmp_path: Path) -> None:
    view = _view(tmp_path)
    assert [(part.name, part.percent, part.mean_us, part.p50_us) for part in view.parts] == [
        ("scheduler", 5.0, 500.0, 500.0),
        ("model", 75.0, 7_500.0, 7_000.0),
        ("between steps", 20.0, 2_000.0, 1_000.0),
    ]
    assert (view.first_token, view.between_tokens) == (
        LatencyView(3, 12_000.0, 80_000.0),
        LatencyView(40, 8_000.0, 9_000.0),
    )


def test_the_schedules_of_an_engine_are_means_and_shares(tmp_path: Path) -> None:
    queue = QueueRow("limit of running requests", 25.0, 2.0, 3.0, 12.5)
    assert _view(tmp_path).schedules == SchedulesView(8, 1.5, 2, 1, (queue,))


def test_the_load_over_time_counts_from_the_first_arrival(tmp_path: Path) -> None:
    view = _view(tmp_path)
    assert view.loads == (LoadView(0.005, 1, 0, 12.5), LoadView(0.08, 1, 2, 40.0))
    assert view.load == view.loads[-1]


def test_a_request_has_the_times_of_the_moments_that_came(tmp_path: Path) -> None:
    ended, aborted, running = _view(tmp_path).requests
    assert (ended.queued_us, ended.first_token_us, ended.total_us) == (2_000.0, 12_000.0, 52_000.0)
    assert ended.per_token_us == 10_000.0
    assert (aborted.first_token_us, aborted.total_us, aborted.reason) == (None, 20_000.0, "abort")
    assert (running.total_us, running.per_token_us, running.reason) == (None, None, "")


def test_a_process_without_an_engine_has_no_view_of_one(tmp_path: Path) -> None:
    assert serving_view(served(tmp_path, is_worker_of=7)) is None


def test_a_worker_shows_the_requests_of_the_engine_it_names(tmp_path: Path) -> None:
    for name in ("engine", "other", "worker"):
        (tmp_path / name).mkdir()
    engine = other_pid(served(tmp_path / "engine", steps=0), 7)
    other = other_pid(served(tmp_path / "other", steps=0), 8)
    worker = served(tmp_path / "worker", is_worker_of=7)
    assert engine_of(worker, [other, engine, worker]) is engine
    assert engine_of(worker, [other, worker]) is worker
    assert engine_of(other, [engine, worker]) is other
    assert shared_engine([worker, worker], [engine, worker]) is engine
    assert shared_engine([worker, other], [engine, other, worker]) is None
    shown = source_view(worker, engine=engine)
    assert shown.serving is not None
    assert shown.serving.ended == 2


def test_an_engine_whose_model_is_elsewhere_has_data_and_comes_last(tmp_path: Path) -> None:
    for name in ("engine", "worker"):
        (tmp_path / name).mkdir()
    worker = served(tmp_path / "worker", is_worker_of=7)
    engine = served(tmp_path / "engine", steps=0)
    assert has_data(engine)
    assert source_view(engine).has_data
    assert [one.key for one in summaries([engine, worker])] == [worker.key, engine.key]


def test_latencies_and_parts_stand_in_every_text(tmp_path: Path) -> None:
    view = source_view(served(tmp_path))
    assert view.serving is not None
    assert serving_text.lines(view.serving) == [LINE, PARTS]
    overview = REPORTS["text"]([view], [OVERVIEW]).splitlines()
    assert overview[overview.index(LINE) + 1] == PARTS
    assert LINE in summary(view, "cbtop")


def test_the_section_requests_has_tables_of_parts_load_and_requests(tmp_path: Path) -> None:
    text = REPORTS["text"]([source_view(served(tmp_path))], ["requests"])
    rows = [line.split() for line in text.splitlines()]
    assert ["scheduler", "5.0", "0.50", "0.50"] in rows
    assert "1.50 requests in a step, at most 2; 1 preempted (the latest 8 schedules)" in text
    assert ["limit", "of", "running", "requests", "25.0", "2.00", "3.00", "12.5"] in rows
    assert ["0.1", "1", "2", "40.0"] in rows
    assert ["a", "0.000", "2.00", "12.00", "10.00", "52.00", "32", "16", "5", "0", "length"] in rows
    assert rows[[row[:1] for row in rows].index(["c"])][-1] == "runs"


def test_requests_are_lanes_from_arrival_to_end(tmp_path: Path) -> None:
    lanes = request_lanes(REQUESTS, 0, 100 * MS)
    assert [
        [(span.name, span.start_ns // MS, span.end_ns // MS) for span in lane.rows[1].spans] for lane in lanes
    ] == [
        [("prefill", 12, 22), ("decode", 22, 62), ("prefill", 71, 80), ("decode", 80, 100)],
        [("prefill", 30, 40)],
    ]
    assert [[(gap.name, gap.start_ns // MS, gap.duration_ns // MS) for gap in lane.gaps] for lane in lanes] == [
        [("no request", 0, 10), ("queued", 10, 2), ("no request", 62, 8), ("queued", 70, 1)],
        [("no request", 0, 20), ("queued", 20, 10), ("no request", 40, 60)],
    ]
    for lane in lanes:
        assert sum(lane.parts_ns(0, 100 * MS).values()) == 100 * MS


def test_a_request_outside_of_the_timeline_is_left_out_or_cut() -> None:
    (lane,) = request_lanes(REQUESTS, 50 * MS, 15 * MS)
    assert [(span.name, span.start_ns // MS, span.end_ns // MS) for span in lane.rows[0].spans] == [("a", 0, 12)]


def test_the_number_of_lanes_for_requests_is_limited() -> None:
    many = [ServedRequest(number, str(number), 1 + number) for number in range(MAX_REQUEST_LANES + 5)]
    assert len(request_lanes(many, 0, MS)) == MAX_REQUEST_LANES


def test_the_timeline_of_an_engine_ends_with_the_lanes_of_its_requests(tmp_path: Path) -> None:
    timeline = source_view(served(tmp_path)).timeline
    assert timeline is not None
    assert [lane.name for lane in timeline.lanes] == ["steps", "requests", "requests 2"]
    assert [lane.name for lane in timeline.newest_lanes][-1] == "requests 2"


def test_the_lanes_of_requests_are_drawn_with_a_row_for_their_phases() -> None:
    rows = row_blocks(request_lanes(REQUESTS, 0, 100 * MS))
    assert [(row.lane.name, row.title, row.is_bricks) for row in rows] == [
        ("requests", "requests", False),
        ("requests", "phases", True),
        ("requests", "requests", False),
        ("requests", "phases", True),
    ]
    names = [row.blocks[at].names()[-1] for row in rows[:2] for at in range(len(row.blocks))]
    assert names == [
        "a",
        "c",
        "no request",
        "queued",
        "prefill",
        "decode",
        "no request",
        "queued",
        "prefill",
        "decode",
    ]
