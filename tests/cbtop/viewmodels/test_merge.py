"""Tests of merged ranks: their sum equals the view of one process that has all of their records."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.client.source_record import SourceRecord, StepSample
from cbtop.profiler.definitions import BrickDefinition
from cbtop.protocol.attributes import Work
from cbtop.protocol.messages import CheckResult, Dependency, Manifest, Quiet
from cbtop.protocol.vocabulary import BrickCategory, BrickId, SourceStatus
from cbtop.reports.text import text_report
from cbtop.text import merge_text, range_text, source_text
from cbtop.tui.views.header import notice
from cbtop.viewmodels import merge
from cbtop.viewmodels.merge import members_of, merged_view
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import SourceView, source_view
from tests.cbtop.recorded import Clock, profiler_in, record_of, source_of
from tests.representatives import first_by_default

LAYERS = 2


def rank_run(
    directory: Path, rank: int, down_us: list[int], *, extra: bool = False, exchanges: bool = False
) -> SourceRecord:
    """Record a rank whose steps take `down_us` for DownProjection in every layer. The norm always takes 5 µs."""
    directory = directory / str(rank)
    directory.mkdir(parents=True)
    clock = Clock()
    profiler = profiler_in(directory, clock)
    profiler.announce(Manifest("toy", "qwen2", "numba", "F32", 1, LAYERS, 64, 512, 1000, 4000))
    down = BrickDefinition.of(BrickId.DOWN_PROJECTION, work=Work(flops_per_element=2, bytes_per_call=10 + rank))
    for us in down_us:
        with profiler.step("decode", tokens=1):
            if extra:
                with profiler.brick("Router", 1):
                    clock.sleep_us(3)
            for layer in range(LAYERS):
                with profiler.layer(layer):
                    with profiler.brick(BrickId.RMS_NORM, 64):
                        clock.sleep_us(5)
                    with profiler.brick(down, 64):
                        clock.sleep_us(us)
                    clock.sleep_us(1)
            if exchanges:
                with profiler.brick(BrickDefinition("AllReduce", BrickCategory.COMMUNICATION), 1):
                    clock.sleep_us(3)
    record = record_of(source_of(directory))
    assert record.hello is not None
    record.hello = replace(record.hello, rank=rank, world_size=3)
    return record


def bricks_of(view: SourceView) -> dict[str, tuple[int, float, float | None]]:
    return {row.name: (row.count, row.total_exclusive_us, row.flops) for row in view.bricks}


def assert_books_close(view: SourceView) -> None:
    books = view.books
    assert books is not None
    assert books.wall_us == pytest.approx(books.bricks_us + books.gaps_us + books.unattributed_us)
    assert sum(row.total_exclusive_us for row in view.bricks) == pytest.approx(books.bricks_us + books.open_us)


runs = st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=6), min_size=1, max_size=4)


@given(runs=runs)
def test_the_sum_is_what_one_process_with_all_calls_would_show(
    tmp_path_factory: pytest.TempPathFactory, runs: list[list[int]]
) -> None:
    directory = tmp_path_factory.mktemp("ranks")
    records = [rank_run(directory, rank, down_us) for rank, down_us in enumerate(runs)]
    views = [source_view(record) for record in records]
    summed = merged_view(records, MergeMode.SUM)
    durations = sorted(us for down_us in runs for us in down_us * LAYERS)
    down = next(row for row in summed.bricks if row.name == "DownProjection")
    assert down.count == len(durations)
    assert down.total_inclusive_us == sum(durations)
    assert (down.min_us, down.max_us) == (durations[0], durations[-1])
    for fraction, found in ((0.5, down.p50_us), (0.95, down.p95_us), (0.99, down.p99_us)):
        exact = durations[max(1, int(np.ceil(fraction * len(durations)))) - 1]
        assert found == pytest.approx(exact, rel=0.01)
    assert down.bytes == sum(row.bytes or 0 for view in views for row in view.bricks if row.name == "DownProjection")
    assert_books_close(summed)
    assert summed.steps is not None
    assert summed.steps.count == summed.steps.tokens == sum(len(down_us) for down_us in runs)
    assert summed.loss.produced == sum(view.loss.produced for view in views)
    assert summed.loss.produced == summed.loss.received + summed.loss.dropped
    for rate in ("tokens_per_sec", "tokens_per_sec_in_steps"):
        rates = [getattr(view.steps, rate) for view in views]
        assert getattr(summed.steps, rate) == pytest.approx(sum(rates))


def test_ranks_of_a_thousand_tokens_a_second_each_make_as_many_thousand(tmp_path: Path) -> None:
    # Each rank has a step of 1 ms: 494 µs for Down in each of two layers, and a little for norms and gaps.
    records = [rank_run(tmp_path, rank, [494] * 10) for rank in range(3)]
    for record in records:
        record.history.clear()
        for second in range(1, 5):
            record.history.setdefault("decode", deque()).append(StepSample(second * 10**9, second * 1000))
    for mode in (MergeMode.SUM, MergeMode.RANKS):
        summed = merged_view(records, mode)
        assert summed.steps is not None
        assert summed.steps.tokens_per_sec == pytest.approx(3000)
        assert summed.steps.tokens_per_sec_in_steps == pytest.approx(3000)
        assert summed.tokens_per_sec_history == pytest.approx((3000,) * 3)
        assert summed.phases == (summed.steps,)
    assert merged_view(records[:1], MergeMode.SUM).steps == source_view(records[0]).steps


def test_tokens_that_ranks_compute_together_count_once_and_a_line_says_so(tmp_path: Path) -> None:
    records = [rank_run(tmp_path, rank, [494] * 10) for rank in range(2)]
    for record in records:
        assert record.manifest is not None
        record.manifest = replace(record.manifest, ranks=2)
        record.history.clear()
        for second in range(1, 5):
            record.history.setdefault("decode", deque()).append(StepSample(second * 10**9, second * 1000))
    for mode in MergeMode:
        merged = merged_view(records, mode)
        assert merged.steps is not None
        assert merged.merged is not None
        assert merged.steps.tokens_per_sec == pytest.approx(1000)
        assert merged.steps.tokens_per_sec_in_steps == pytest.approx(1000)
        assert merged.tokens_per_sec_history == pytest.approx((1000,) * 3)
        said = "tokens/s counts once what 2 ranks compute together; " in merge_text.merged_means(merged.merged)
        # In the mode MAX, all steps come from one rank, so this text is left out.
        assert said == (mode is not MergeMode.MAX)


def test_a_rank_whose_others_are_gone_counts_its_tokens_whole(tmp_path: Path) -> None:
    record = rank_run(tmp_path, 0, [494] * 10)
    assert record.manifest is not None
    record.manifest = replace(record.manifest, ranks=8)
    alone, merged = source_view(record), merged_view([record], MergeMode.SUM)
    assert alone.steps is not None
    assert merged.steps is not None
    assert merged.steps.tokens_per_sec_in_steps == alone.steps.tokens_per_sec_in_steps


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_line_says_that_ranks_which_exchange_results_may_share_tokens(exchanges: bool, tmp_path: Path) -> None:
    records = [rank_run(tmp_path, rank, [494] * 2, exchanges=exchanges) for rank in range(2)]
    merged = merged_view(records, MergeMode.SUM)
    assert merged.merged is not None
    assert merged.merged.may_share_tokens == exchanges
    assert ("even where ranks compute the same tokens" in merge_text.merged_means(merged.merged)) == exchanges


def test_where_the_rate_of_one_rank_is_unknown_so_is_that_of_the_sum(tmp_path: Path) -> None:
    records = [rank_run(tmp_path, rank, [494] * 10) for rank in range(2)]
    (step,) = records[1].nodes.children[None]
    records[1].stats.sparse["uncounted"][step.id] = 1
    steps = merged_view(records, MergeMode.SUM).steps
    assert steps is not None
    assert (steps.tokens_per_sec, steps.tokens_per_sec_in_steps) == (None, None)


@first_by_default(
    ("states", "worst"),
    [
        ("live live", "live"),
        ("live ended", "ended"),
        ("ended gone live", "gone"),
        ("gone faulty ended live", "faulty"),
        ("ended ended", "ended"),
    ],
    6,
)
@first_by_default("mode", MergeMode, 6)
def test_a_merge_is_in_the_state_of_its_worst_member(
    tmp_path: Path, states: str, worst: str, mode: MergeMode
) -> None:
    records = [rank_run(tmp_path, rank, [10]) for rank in range(len(states.split()))]
    for record, state in zip(records, states.split(), strict=True):
        assert record.state is not None
        record.state = replace(record.state, state=SourceStatus(state), reason="" if state == "live" else "it left")
    view = merged_view(records, mode)
    assert view.state == worst
    at = states.split().index(worst)
    assert view.state_reason == ("" if worst == "live" else f"rank {at}: it left")


def test_a_dead_rank_stays_in_the_merge_of_its_job_until_one_takes_its_place(tmp_path: Path) -> None:
    first = [rank_run(tmp_path, rank, [10]) for rank in range(3)]
    assert first[1].state is not None
    first[1].state = replace(first[1].state, state=SourceStatus.GONE)
    assert members_of(first[0], first) == first
    second = replace(rank_run(tmp_path / "1", 1, [10]), key="again")
    assert second.hello is not None
    second.hello = replace(second.hello, realtime_ns=second.hello.realtime_ns + 10**12)
    assert members_of(first[0], [*first, second]) == [first[0], second, first[2]]


@pytest.mark.parametrize("mode", MergeMode)
def test_two_that_run_as_the_same_rank_both_count_and_have_their_own_names(tmp_path: Path, mode: MergeMode) -> None:
    records = [rank_run(tmp_path / name, rank, [10 + 10 * rank]) for name, rank in RUNS]
    for pid, record in enumerate(records):
        assert record.hello is not None
        record.hello = replace(record.hello, pid=70 + pid, realtime_ns=10**9 * pid)
        record.key = f"of-{pid}"
    assert {record.key for record in members_of(records[0], records)} == {record.key for record in records}
    view = merged_view(records, mode)
    assert view.merged is not None
    assert set(view.merged.members) == {"pid 70", "pid 72", "rank 1"}
    assert view.steps is not None
    if mode is not MergeMode.MAX:
        assert view.steps.count == 3
    if view.ranks is not None:
        assert [column.pid for column in view.ranks.ranks] == [70, 72, 71]
    first = records[0].state
    assert first is not None
    records[0].state = replace(first, state=SourceStatus.ENDED)
    assert {record.key for record in members_of(records[0], records)} == {"of-1", "of-2"}


@pytest.mark.parametrize(("after_ns", "both"), [(-10_000, True), (-1, True), (1, False)])
def test_a_later_run_of_a_rank_replaces_the_first_only_if_that_had_ended(
    tmp_path: Path, after_ns: int, both: bool
) -> None:
    records = [rank_run(tmp_path / name, 0, [5] * 9) for name in ("first", "second")]
    ended_ns = max(node_ns for node_ns in records[0].stats.sparse["last_ns"].values())
    for at, record in enumerate(records):
        assert record.hello is not None
        assert record.state is not None
        record.hello = replace(record.hello, realtime_ns=at * (ended_ns + after_ns), monotonic_ns=0)
        record.state = replace(record.state, state=SourceStatus.ENDED)
        record.key = f"of-{at}"
    assert members_of(records[0], records) == (records if both else records[1:])


RUNS = (("first", 0), ("first", 1), ("second", 0))


def test_two_of_one_pid_on_two_hosts_are_two_columns(tmp_path: Path) -> None:
    records = [rank_run(tmp_path, rank, [10]) for rank in range(2)]
    for at, record in enumerate(records):
        assert record.hello is not None
        record.hello = replace(record.hello, pid=1, host=f"box{at}", rank=None, world_size=None)
        record.key = f"box{at}:1"
    view = merged_view(records, MergeMode.RANKS)
    assert view.ranks is not None
    assert [column.host for column in view.ranks.ranks] == ["box0", "box1"]


def test_what_is_no_rank_is_merged_with_what_is_in_its_own_state(tmp_path: Path) -> None:
    records = [rank_run(tmp_path, rank, [10]) for rank in range(3)]
    for record in records:
        assert record.hello is not None
        record.hello = replace(record.hello, rank=None, world_size=None)
    assert records[1].state is not None
    records[1].state = replace(records[1].state, state=SourceStatus.ENDED)
    assert members_of(records[0], records) == [records[0], records[2]]
    assert members_of(records[1], records) == [records[1]]


def test_a_killed_process_stays_with_those_it_ran_next_to_and_no_later_run(tmp_path: Path) -> None:
    lives, killed, later, elsewhere = [rank_run(tmp_path, rank, [10]) for rank in range(4)]
    for record, begun_ns in ((lives, 0), (killed, 500), (later, 10**9), (elsewhere, 0)):
        assert record.hello is not None
        record.hello = replace(record.hello, rank=None, world_size=None, monotonic_ns=begun_ns, boot_id="this")
    assert killed.state is not None
    assert elsewhere.hello is not None
    killed.state = replace(killed.state, state=SourceStatus.GONE, reason="killed")
    elsewhere.hello = replace(elsewhere.hello, boot_id="another")
    every = [lives, killed, later, elsewhere]  # The killed process stopped 1 ms after its last step.
    assert members_of(lives, every) == every
    assert members_of(killed, every) == [lives, killed]
    assert members_of(later, every) == [lives, later, elsewhere]
    view = merged_view([lives, killed], MergeMode.SUM)
    assert view.merged is not None
    assert (view.standing, view.state_reason.partition(": ")[2]) == ("gone", "killed")


@pytest.mark.parametrize("mode", MergeMode)
def test_a_merge_with_a_stalled_one_is_stalled_and_says_which_and_in_what(tmp_path: Path, mode: MergeMode) -> None:
    records = [rank_run(tmp_path, rank, [10] * 5) for rank in range(4)]
    known = {1: Quiet(5 * 10**9, is_watched=True), 2: Quiet(32 * 10**9, in_flight=4, threads=1)}
    for rank, quiet in known.items():
        state = records[rank].state
        assert state is not None
        records[rank].state = replace(state, quiet=quiet)
    view = merged_view(records, mode)
    assert view.stall is not None
    assert (view.standing, view.state_reason) == ("stalled", "")
    assert source_text.stall(view.stall).startswith("rank 2: stalled for 32 s in decode → Layer 0 → DownProjection")
    assert view.loss.produced == sum(record.state.produced for record in records if record.state)
    assert merged_view([records[0], records[1]], mode).standing == "idle"
    assert merged_view([records[0], records[3]], mode).standing == "live"
    last = records[3].state
    assert last is not None
    records[3].state = replace(last, state=SourceStatus.GONE)
    assert merged_view(records, mode).standing == "gone"


@pytest.mark.parametrize("mode", MergeMode)
def test_a_merge_names_every_member_that_is_gone_suspended_or_stalled(tmp_path: Path, mode: MergeMode) -> None:
    records = [rank_run(tmp_path, rank, [10] * 5) for rank in range(5)]
    quiet = {
        1: Quiet(5 * 10**9, is_watched=True),  # idle
        2: Quiet(32 * 10**9, in_flight=4, threads=1),
        3: Quiet(20 * 10**9, is_suspended=True),
    }
    for rank, record in enumerate(records):
        assert record.state is not None
        record.state = replace(record.state, quiet=quiet.get(rank))
    stalled = merged_view(records, mode)
    assert (stalled.standing, stalled.stall and stalled.stall.member) == ("stalled", "rank 2")
    assert stalled.merged is not None
    assert [(one.name, one.state) for one in stalled.merged.troubled] == [("rank 3", "suspended")]
    assert records[4].state is not None
    records[4].state = replace(records[4].state, state=SourceStatus.GONE, reason="it left")
    gone = merged_view(records, mode)
    assert gone.merged is not None
    assert (gone.standing, gone.state_reason) == ("gone", "rank 4: it left")
    assert [one.name for one in gone.merged.troubled] == ["rank 2", "rank 3"]
    text = text_report([gone], [])
    assert "\nrank 2: stalled for 32 s in decode → Layer 0 → DownProjection" in text
    assert "\nrank 3: suspended, without progress for 20 s" in text
    shown = "".join(part for part, _ in notice(gone))
    assert shown.startswith("  ✗ gone: also rank 2 stalled, rank 3 suspended; rank 4: it left")
    fine = merged_view(records[:2], mode).merged
    assert fine is not None
    assert fine.troubled == ()


def test_a_place_of_one_rank_is_in_the_sum_once_and_a_place_of_all_is_one(tmp_path: Path) -> None:
    records = [rank_run(tmp_path, 0, [10, 10]), rank_run(tmp_path, 1, [20], extra=True)]
    summed = merged_view(records, MergeMode.SUM)
    assert bricks_of(summed)["Router"] == (1, 3.0, None)
    assert bricks_of(summed)["RmsNorm"][:2] == (2 * 3, 5.0 * 6)
    norms = [row for row in summed.graph if row.name == "RmsNorm"]
    assert [row.count for row in norms] == [3, 3]  # one for each layer
    assert summed.merged is not None
    assert summed.merged.members == ("rank 0", "rank 1")
    assert_books_close(summed)


def test_the_stretch_of_a_sum_is_the_sum_of_the_stretches(tmp_path: Path) -> None:
    records = [rank_run(tmp_path, rank, [us] * (rank + 2)) for rank, us in ((0, 10), (1, 40))]
    merged = merged_view(records, MergeMode.SUM).time_range
    members = [source_view(record).time_range for record in records]
    assert merged is not None
    assert all(one is not None for one in members)
    for name in ("wall_us", "in_steps_us", "between_us"):
        assert getattr(merged, name) == pytest.approx(sum(getattr(one, name) for one in members))
    assert [(one.name, one.us) for one in merged.by_phase] == [
        ("decode", pytest.approx(sum(one.by_phase[0].us for one in members if one is not None)))
    ]


@first_by_default("fails", [0, 1])
def test_what_fails_in_one_member_fails_in_the_sum_whatever_the_others_found(tmp_path: Path, fails: int) -> None:
    records = [rank_run(tmp_path, rank, [10] * 2) for rank in range(2)]
    for at, record in enumerate(records):
        found = CheckResult("RmsNorm", "finite", at != fails, None, None)
        record.checks[found.brick, found.assertion] = found
    (check,) = merged_view(records, MergeMode.SUM).checks
    assert not check.passed


def test_a_sum_of_all_that_was_seen_says_its_rates_begin_at_different_times(tmp_path: Path) -> None:
    records = [rank_run(tmp_path, rank, [10] * 2) for rank in range(2)]
    for mode in MergeMode:
        shown = range_text.shown_time(replace(merged_view(records, mode), since_s=1e9))
        assert shown.startswith("since ")
        assert shown.endswith(" at the earliest") is (mode is MergeMode.SUM)


def test_a_merge_has_no_clock_second_so_its_pictures_are_always_drawn_again(tmp_path: Path) -> None:
    records = [rank_run(tmp_path, rank, [100] * 3) for rank in range(2)]
    at_ns = max(record.window.now_ns for record in records) + 1_000_000_000
    for record in records:
        record.window.tick(at_ns)
    assert [source_view(record).second for record in records] == [at_ns // 1_000_000_000] * 2
    assert [merged_view(records, mode).second for mode in MergeMode] == [None] * len(MergeMode)
    assert source_view(records[0]).held().second is None


def test_a_sum_has_no_roof(tmp_path: Path) -> None:
    summed = merged_view([rank_run(tmp_path, 0, [10])], MergeMode.SUM)
    assert summed.roofline.ceilings == ()
    assert all(point.attainable_gflops is None for point in summed.roofline.points)


def test_the_window_of_a_sum_is_the_sum_of_the_windows(tmp_path: Path) -> None:
    records = [rank_run(tmp_path, 0, [10, 10]), rank_run(tmp_path, 1, [20])]
    for record in records:
        # 20 s pass, so all steps are older than the window of the last seconds
        record.window.tick(record.window.now_ns + 2 * 10**10)
    assert merged_view(records, MergeMode.SUM, window=True).bricks == ()
    assert merged_view(records, MergeMode.SUM).bricks != ()


def test_the_slowest_takes_each_brick_from_the_rank_it_takes_longest_a_step(tmp_path: Path) -> None:
    records = [rank_run(tmp_path, 0, [10] * 9), rank_run(tmp_path, 1, [30]), rank_run(tmp_path, 2, [20], extra=True)]
    slowest = merged_view(records, MergeMode.MAX)
    assert {row.name: row.rank for row in slowest.bricks} == {
        "DownProjection": "rank 1", "Router": "rank 2", "RmsNorm": "rank 0",
    }  # fmt: skip
    down = next(row for row in slowest.bricks if row.name == "DownProjection")
    assert (down.count, down.total_exclusive_us) == (LAYERS, 30 * LAYERS)
    # The percentage is relative to the step of the rank that the brick comes from.
    assert down.percent == pytest.approx(100 * 2 * 30 / (2 * 36))
    assert {row.category.name: row.percent for row in slowest.categories}["FFN"] == pytest.approx(down.percent)
    assert slowest.steps is not None
    assert slowest.steps.mean_us == 2 * 36
    assert (slowest.books, slowest.graph) == (None, ())


def test_without_steps_each_brick_is_of_the_rank_with_the_longest_call(
    tmp_path: Path,
) -> None:
    def run(rank: int, call_us: int, calls: int) -> SourceRecord:
        directory = tmp_path / str(rank)
        directory.mkdir()
        clock = Clock()
        profiler = profiler_in(directory, clock)
        for _ in range(calls):
            with profiler.brick("Tokenize", 1):
                clock.sleep_us(call_us)
        record = record_of(source_of(directory))
        assert record.hello is not None
        record.hello = replace(record.hello, rank=rank, world_size=2)
        return record

    (row,) = merged_view([run(0, 20, 9), run(1, 30, 2)], MergeMode.MAX).bricks
    assert (row.rank, row.count, row.total_exclusive_us) == ("rank 1", 2, 60.0)


def test_side_by_side_shows_each_rank_beside_the_sum(tmp_path: Path) -> None:
    records = [rank_run(tmp_path, rank, [us] * 3) for rank, us in ((2, 20), (0, 10), (1, 30))]
    view = merged_view(records, MergeMode.RANKS)
    assert view.ranks is not None
    assert [column.name for column in view.ranks.ranks] == ["rank 0", "rank 1", "rank 2"]
    down = next(row for row in view.ranks.rows if row.brick == "DownProjection")
    assert [us and round(us, 6) for us in down.us] == [20, 60, 40]
    assert (down.slowest, down.spread_percent) == (1, pytest.approx(50))
    assert bricks_of(view) == bricks_of(merged_view(records, MergeMode.SUM))


def test_a_rank_that_has_not_run_the_phase_does_not_lend_it_another(tmp_path: Path) -> None:
    records = [rank_run(tmp_path, 0, [10]), rank_run(tmp_path, 1, [20])]
    prefill = rank_run(tmp_path, 2, [500])
    for at, node in enumerate(prefill.nodes.nodes):
        if node.name == "decode":
            prefill.nodes.nodes[at] = renamed = replace(node, name="prefill")
            prefill.nodes.children[None] = [renamed]
    view = merged_view([*records, prefill], MergeMode.RANKS, "decode")
    assert view.ranks is not None
    assert [column.name for column in view.ranks.ranks] == ["rank 0", "rank 1"]
    down = next(row for row in merged_view([*records, prefill], MergeMode.MAX, "decode").bricks)
    assert (down.rank, down.total_exclusive_us) == ("rank 1", 20 * LAYERS)


def test_what_belongs_together_has_one_program_and_model_and_ranks_one_job(tmp_path: Path) -> None:
    alone, alike, another_model, another_program, rank, peer, another_job, silent = (
        rank_run(tmp_path, at, [10]) for at in range(8)
    )
    for record in (alone, alike, another_model, another_program):
        assert record.hello is not None
        record.hello = replace(record.hello, rank=None, world_size=None)
    assert another_model.manifest is not None
    assert another_program.hello is not None
    assert another_job.hello is not None
    another_model.manifest = replace(another_model.manifest, model="another")
    another_program.hello = replace(another_program.hello, program="another.py")
    another_job.hello = replace(another_job.hello, job="another")
    silent.hello = None
    every = [alone, alike, another_model, another_program, rank, peer, another_job, silent]
    assert members_of(alone, every) == [alone, alike]
    assert members_of(another_model, every) == [another_model]
    assert members_of(rank, every) == [rank, peer]


def test_a_source_whose_nodes_find_no_room_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [rank_run(tmp_path, rank, [10]) for rank in range(2)]
    nodes = len(records[0].nodes)
    for room, taken in ((2 * nodes, 2), (2 * nodes - 1, 1)):
        monkeypatch.setattr(merge, "MAX_NODES", room)
        merged = merged_view(records, MergeMode.SUM).merged
        assert merged is not None
        assert (len(merged.members), merged.left_out) == (taken, 2 - taken)


def test_members_run_that_have_not_ended_and_are_watched(tmp_path: Path) -> None:
    records = [rank_run(tmp_path, rank, [10]) for rank in range(3)]
    merged = merged_view(records, MergeMode.SUM).merged
    assert merged is not None
    assert merged.running == 0  # The viewer has received nothing about one of the processes for a while.


def test_of_a_dependency_on_a_node_that_nobody_named_there_is_none_in_a_sum(tmp_path: Path) -> None:
    record = rank_run(tmp_path, 0, [10])
    nodes = len(record.nodes)
    for then in (nodes, nodes + 1):
        record.dependencies[Dependency(1, then)] = None
    assert list(merge._sum([record])[0].dependencies) == [Dependency(1, nodes)]
