"""Tests of exported numbers: they equal the numbers on the screen.

Histograms are exact, and counters never decrease. The size of the export is bounded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.client import DEFAULT_WINDOW_S
from cbtop.client.source_record import SourceRecord
from cbtop.client.store import Store
from cbtop.client.window import Window
from cbtop.profiler.analysis.brick_stats import BrickStats
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.profiler.analysis.stats import MAX_HISTOGRAM_NODES, NodeStats
from cbtop.protocol.messages import CheckResult, Node, Quiet, SourceState
from cbtop.protocol.ring_reader import Batch
from cbtop.protocol.vocabulary import NodeKind, SourceStatus
from cbtop.telemetry import metrics
from cbtop.telemetry import snapshot as snapshot_module
from cbtop.telemetry.metrics import METRICS, DurationHistogram, Metric, MetricType, Snapshot
from cbtop.telemetry.snapshot import BOUNDS_NS, _durations, snapshot
from cbtop.viewmodels.source import source_view
from tests.cbtop import made_machines, made_serving
from tests.cbtop.recorded import Clock, decode_run, profiler_in, record_of, source_of

NOW_NS = 1_700_000_000_000_000_000


def store_of(*records: SourceRecord) -> Store:
    store = Store()
    store.sources = {record.key: record for record in records}
    return store


def store_on_gpus(*records: SourceRecord) -> Store:
    """Return a store with these processes and eight GPUs. One GPU is throttled by heat, and one is lost."""
    store = store_of(*records)
    store.devices = made_machines.store_of(made_machines.eight(), made_machines.CPU).devices
    return store


def values(found: Snapshot, metric: Metric, **labels: str) -> list[float | DurationHistogram]:
    """Return the values of `metric` at all points that have these labels."""
    wanted = labels.items()
    points = found[metric]
    return [point.value for point in points if wanted <= dict(zip(metric.labels, point.labels, strict=True)).items()]


def series(found: Snapshot) -> int:
    return sum(
        len(BOUNDS_NS) + 3 if isinstance(point.value, DurationHistogram) else 1
        for points in found.values()
        for point in points
    )


def test_an_engine_has_its_load_latencies_and_counts_and_after_its_end_only_counts(tmp_path: Path) -> None:
    record = made_serving.served(tmp_path)
    record.serving.take(replace(made_serving.TIMES, preemptions=7))
    gauges = metrics.REQUESTS_RUNNING, metrics.REQUESTS_WAITING, metrics.CACHE_USAGE
    found = snapshot(store_of(record), NOW_NS)
    assert [values(found, metric) for metric in gauges] == [[1], [2], [0.4]]
    assert [point.labels[1:] for point in found[metrics.ENGINE_LATENCY]] == [
        ("first token", "0.5"),
        ("first token", "0.99"),
        ("between tokens", "0.5"),
        ("between tokens", "0.99"),
    ]
    assert values(found, metrics.ENGINE_LATENCY) == [0.012, 0.08, 0.008, 0.009]
    assert record.state is not None
    record.state = replace(record.state, state=SourceStatus.GONE)
    later = snapshot(store_of(record), NOW_NS)
    assert not any(later[metric] for metric in (*gauges, metrics.ENGINE_LATENCY))
    for each in (found, later):
        assert (values(each, metrics.REQUESTS_ENDED), values(each, metrics.PREEMPTIONS)) == ([2], [7])


def test_a_stalled_process_has_one_state_and_its_age_names_phase_and_brick(tmp_path: Path) -> None:
    record = decode_run(tmp_path)
    live = snapshot(store_of(record), NOW_NS)
    assert (values(live, metrics.STATE, state="live"), live[metrics.QUIET]) == ([1], [])
    brick = next(node.id for node in record.nodes.nodes if node.name == "DownProjection")
    assert record.state is not None
    record.state = replace(record.state, quiet=Quiet(32_400_000_000, in_flight=brick, threads=1))
    found = snapshot(store_of(record), NOW_NS)
    assert [point.labels for point in found[metrics.STATE]] == [(record.key, "stalled")]
    where = {"source": record.key, "phase": "prefill", "layer": "Layer 0", "brick": "DownProjection"}
    assert values(found, metrics.QUIET, **where) == [32.4]
    record.state = replace(record.state, quiet=Quiet(32_400_000_000, is_watched=True))
    found = snapshot(store_of(record), NOW_NS)
    assert values(found, metrics.STATE, state="idle") == [1]
    assert [point.labels for point in found[metrics.QUIET]] == [(record.key, "", "", "")]


def test_the_numbers_are_those_that_reports_and_screens_show(tmp_path: Path) -> None:
    record = decode_run(tmp_path)
    found = snapshot(store_of(record), NOW_NS)
    for phase in ("prefill", "decode"):
        view = source_view(record, phase)
        assert view.steps is not None
        assert values(found, metrics.TOKENS, phase=phase) == [view.steps.tokens]
        (steps,) = values(found, metrics.STEP_DURATION, phase=phase)
        assert isinstance(steps, DurationHistogram)
        assert sum(steps.counts) == view.steps.count
        assert len(values(found, metrics.BRICK_DURATION, phase=phase)) == len(view.bricks)
        for row in view.bricks:
            here = {"phase": phase, "brick": row.name, "category": row.category.display_name, "backend": row.backend}
            (calls,) = values(found, metrics.BRICK_DURATION, **here)
            assert isinstance(calls, DurationHistogram)
            assert (sum(calls.counts), calls.total_ns / 1e3) == (row.count, row.total_inclusive_us)
            assert (calls.min_ns / 1e3, calls.max_ns / 1e3) == (row.min_us, row.max_us)
            assert values(found, metrics.BRICK_EXCLUSIVE, **here) == [pytest.approx(row.total_exclusive_us / 1e6)]
            assert values(found, metrics.BRICK_ELEMENTS, **here) == [row.elements]
            assert values(found, metrics.BRICK_FAILED, **here) == [row.failed]
            assert values(found, metrics.BRICK_FLOPS, **here) == ([] if row.flops is None else [row.flops])
            assert values(found, metrics.BRICK_TRAFFIC, **here) == ([] if row.bytes is None else [row.bytes])
    assert values(found, metrics.CHECK) == [1, 1]
    assert values(found, metrics.SOURCE, model="toy 2L", quantization="Q4_K") == [1]
    assert values(found, metrics.WEIGHTS) == [560_000]
    assert values(found, metrics.LEFT_OUT) == [0, 0, 0, 0, 0]


def test_the_rank_is_a_label_of_the_process_and_of_nothing_else(tmp_path: Path) -> None:
    record = decode_run(tmp_path)
    assert record.hello is not None
    for rank, label in ((None, ""), (0, "0"), (3, "3")):
        record.hello = replace(record.hello, rank=rank)
        assert values(snapshot(store_of(record), NOW_NS), metrics.SOURCE, rank=label) == [1]
    assert [metric for metric in METRICS if "rank" in metric.labels] == [metrics.SOURCE]


def test_of_a_sample_the_factor_is_a_label_of_the_process(tmp_path: Path) -> None:
    record = decode_run(tmp_path)
    assert record.hello is not None
    record.hello = replace(record.hello, sample_every=10)
    assert values(snapshot(store_of(record), NOW_NS), metrics.SOURCE, sample_every="10") == [1]


def test_the_losses_add_up(tmp_path: Path) -> None:
    record = decode_run(tmp_path)
    record.state = SourceState(
        record.key, SourceStatus.LIVE, "", 1000, 900, 80, before_attach=30, rejected=20, unread=5
    )
    found = snapshot(store_of(record), NOW_NS)
    dropped = {reason: values(found, metrics.DROPPED, reason=reason) for reason in ("overwritten", "before_attach")}
    assert dropped == {"overwritten": [50], "before_attach": [30]}
    (produced,), (received,) = values(found, metrics.PRODUCED), values(found, metrics.RECEIVED)
    assert produced == received + sum(values(found, metrics.DROPPED))  # type: ignore[operator, arg-type]


@given(
    st.lists(st.integers(0, 1 << 36) | st.sampled_from([b + d for b in BOUNDS_NS for d in (-1, 0, 1)]), min_size=1)
)
def test_no_call_is_on_the_wrong_side_of_a_bound(durations_ns: list[int]) -> None:
    stats = NodeStats()
    end = np.array(durations_ns, np.int64)
    node, zero = np.ones_like(end), np.zeros_like(end)
    no_steps = np.full(2, -1)
    stats.add(
        Batch(node=node, start_ns=zero, end_ns=end, elements=zero, flags=zero, overwritten=0), no_steps, no_steps
    )
    calls = stats.calls([1])
    assert calls is not None
    found = _durations(stats, [1], calls)
    for at, bound_ns in enumerate(BOUNDS_NS, 1):
        assert sum(found.counts[:at]) == sum(duration <= bound_ns for duration in durations_ns)
    assert sum(found.counts) == len(durations_ns)


def test_calls_that_are_not_all_in_the_histogram_are_only_counted() -> None:
    stats = NodeStats()
    nodes = np.array([1, MAX_HISTOGRAM_NODES + 1, MAX_HISTOGRAM_NODES + 2], np.int64)
    zero = np.zeros(3, np.int64)
    ends = np.array([5_000, 7_000, 7_000], np.int64)
    step_of = np.full(MAX_HISTOGRAM_NODES + 3, -1)
    batch = Batch(node=nodes, start_ns=zero, end_ns=ends, elements=zero, flags=zero, overwritten=0)
    # Only MAX_HISTOGRAM_NODES nodes have their own histogram. The last two nodes share one.
    stats.add(batch, step_of, step_of, first_of=0 * step_of)
    some = nodes[[0, 2]].tolist()
    calls = stats.calls(some)
    assert calls is not None
    assert _durations(stats, some, calls) == DurationHistogram((), (2,), 12_000, 5_000, 7_000)
    every = stats.calls(nodes.tolist())
    assert every is not None
    assert sum(_durations(stats, nodes.tolist(), every).counts) == 3


@pytest.mark.parametrize("in_steps", [True, False])
def test_a_counter_never_goes_down_while_a_brick_holds_another(tmp_path: Path, in_steps: bool) -> None:
    clock = Clock()
    profiler = profiler_in(tmp_path, clock)
    seen: list[float] = []

    def look() -> None:
        found = snapshot(store_of(record_of(source_of(tmp_path))), NOW_NS)
        seen.extend(
            v for v in values(found, metrics.BRICK_EXCLUSIVE, brick="Outer") if not isinstance(v, DurationHistogram)
        )

    def work() -> None:
        with profiler.brick("Outer"):
            clock.sleep_us(10)
            with profiler.brick("Inner"):
                clock.sleep_us(30)
            look()
        look()

    for _ in range(3):
        if in_steps:
            with profiler.step("decode", tokens=1):
                work()
            look()
        else:
            work()
    assert seen == sorted(seen)
    assert seen[-1:] == ([pytest.approx(30e-6)] if in_steps else [])


def many_bricks(key: str, bricks: int, phases: int = 1, checks: int = 0) -> SourceRecord:
    """Return a source with calls of `bricks` bricks, all in its first phase."""
    record = SourceRecord(
        key,
        Window(DEFAULT_WINDOW_S),
        checks={(str(n), "x"): CheckResult(str(n), "x", True, None, None) for n in range(checks)},
    )
    for at in range(phases):
        record.nodes.add(Node(at + 1, None, NodeKind.STEP, f"phase {at}"))
    for at in range(bricks):
        record.nodes.add(Node(phases + at + 1, 1, NodeKind.BRICK, f"brick {at}"))
    node = np.arange(1, phases + bricks + 1)
    zero = np.zeros_like(node)
    batch = Batch(node=node, start_ns=zero, end_ns=zero + 5_000, elements=zero, flags=zero, overwritten=0)
    record.stats.add(batch, *record.nodes.columns())
    return record


@pytest.mark.slow
def test_the_export_stays_bounded_for_any_input_and_says_what_it_left_out() -> None:
    records = [many_bricks(f"h:{n}", bricks=300, phases=20, checks=100) for n in range(20)]
    found = snapshot(store_of(*records), NOW_NS)
    assert metrics.MAX_SERIES - 100 < series(found) <= metrics.MAX_SERIES
    assert len(values(found, metrics.SOURCE)) == 20
    kept = {record.key: len(values(found, metrics.BRICK_DURATION, source=record.key)) for record in records}
    assert max(kept.values()) - min(kept.values()) <= 1
    assert min(kept.values()) > 5
    assert values(found, metrics.LEFT_OUT, of="brick") == [20 * 300 - sum(kept.values())]
    assert values(found, metrics.LEFT_OUT, of="phase") == [20 * 20 - len(found[metrics.TOKENS])]
    assert values(found, metrics.LEFT_OUT, of="check") == [20 * 100 - len(found[metrics.CHECK])]


def test_a_source_that_cannot_be_read_is_left_out_and_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = snapshot_module.brick_stats

    def broken(totals: PhaseTotals) -> list[BrickStats]:
        if totals.table is bad.nodes:
            raise ZeroDivisionError
        return real(totals)

    bad, good = many_bricks("h:1", bricks=3), many_bricks("h:2", bricks=3)
    monkeypatch.setattr(snapshot_module, "brick_stats", broken)
    found = snapshot(store_of(bad, good), NOW_NS)
    assert len(values(found, metrics.BRICK_DURATION, source="h:2")) == 3
    assert values(found, metrics.SOURCE, source="h:1") == []
    assert values(found, metrics.LEFT_OUT, of="source") == [1]


def test_what_is_left_out_does_not_change_from_one_export_to_the_next() -> None:
    record = many_bricks("h:1", bricks=400)
    before = {point.labels for point in snapshot(store_of(record), NOW_NS)[metrics.BRICK_DURATION]}
    node = np.full(1, 300)  # Node 300 now becomes the slowest brick.
    zero = np.zeros_like(node)
    record.stats.add(
        Batch(node=node, start_ns=zero, end_ns=zero + 10**9, elements=zero, flags=zero, overwritten=0),
        *record.nodes.columns(),
    )
    assert {point.labels for point in snapshot(store_of(record), NOW_NS)[metrics.BRICK_DURATION]} == before


def test_every_point_has_its_labels_and_no_two_are_the_same_series(tmp_path: Path) -> None:
    record = decode_run(tmp_path)
    twice = record.nodes.nodes[0]
    record.nodes.add(replace(twice, id=len(record.nodes) + 1))  # a second step node with the same name
    found = snapshot(store_of(record), NOW_NS)
    assert set(found) == set(METRICS)
    for metric, points in found.items():
        assert all(len(point.labels) == len(metric.labels) for point in points)
        assert len({point.labels for point in points}) == len(points)
        assert all(
            isinstance(point.value, DurationHistogram) == (metric.kind is MetricType.HISTOGRAM) for point in points
        )


def test_a_source_counts_from_its_own_beginning_if_it_says_a_possible_one(tmp_path: Path) -> None:
    record = decode_run(tmp_path)
    assert record.hello is not None
    for said_ns, taken_ns in ((NOW_NS - 5, NOW_NS - 5), (-1, 0), (1 << 63, NOW_NS)):
        record.hello = replace(record.hello, realtime_ns=said_ns)
        assert snapshot(store_of(record), NOW_NS)[metrics.TOKENS][0].since_ns == taken_ns
