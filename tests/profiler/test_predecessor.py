"""The examples of cbtop's predecessor run as printed, with the names of its methods in snake case.

Its requirements F101 and F102 are in tests/protocol/test_vocabulary.py, and F121 to F127 in
tests/profiler/analysis/graph/test_tree.py.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbtop import (
    Bounded,
    BrickCategory,
    BrickDefinition,
    BrickId,
    BrickProfiler,
    Equivalent,
    Finite,
    Layer,
    TokenBudget,
)
from cbtop.profiler.recorder import RingRecorder
from cbtop.profiler.scopes import Scopes
from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.messages import CheckResult


@pytest.fixture
def profiler(runtime: Path) -> BrickProfiler:
    return BrickProfiler(recorder=RingRecorder(runtime))


def test_deferred_times_are_those_of_the_work(profiler: BrickProfiler) -> None:
    profiler.reset_epoch()
    start = profiler.elapsed_ns()
    time.sleep(0.02)
    profiler.record_deferred(BrickId.RMS_NORM, start, 4096)
    end = profiler.elapsed_ns()
    profiler.finalize(end)

    stats = profiler.stats_for(BrickId.RMS_NORM)
    assert stats is not None
    assert 20_000_000 <= stats.total_ns <= end
    assert (stats.count, stats.total_elements) == (1, 4096)
    assert profiler.recording  # the predecessor's call of `finalize` must not end recording
    profiler.record_deferred(BrickId.RMS_NORM, profiler.elapsed_ns(), 1)
    profiler.finalize()
    again = profiler.stats_for(BrickId.RMS_NORM)
    assert again is not None
    assert again.count == 2


def test_the_first_use_of_a_brick_is_not_part_of_its_deferred_time(
    profiler: BrickProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    define = Scopes.define

    def slow(*arguments: Any) -> Any:
        time.sleep(0.05)
        return define(*arguments)

    monkeypatch.setattr(Scopes, "define", slow)
    start = profiler.elapsed_ns()
    profiler.record_deferred(BrickId.RMS_NORM, start, 1)
    whole_ns = profiler.elapsed_ns() - start
    profiler.finalize()
    stats = profiler.stats_for(BrickId.RMS_NORM)
    assert stats is not None
    assert stats.total_ns <= whole_ns - 50_000_000


def test_the_categories_share_the_time_of_all_bricks(profiler: BrickProfiler) -> None:
    for brick in (BrickId.RMS_NORM, BrickId.QKV_PROJECTION, BrickId.DOWN_PROJECTION):
        timer = profiler.start_brick(brick)
        time.sleep(0.002)
        profiler.stop_brick(timer, 4096)
    cats = profiler.category_stats()
    assert set(cats) == {*BrickCategory}  # as an array with an entry for each category
    ran = [category for category in cats if cats[category].count]
    assert ran == [BrickCategory.NORM, BrickCategory.ATTENTION, BrickCategory.FFN]
    total = profiler.total_ns
    percentages = [cats[category].percentage(total) for category in cats]
    assert sum(one or 0.0 for one in percentages) == pytest.approx(100)
    assert cats[BrickCategory.NORM].total_elements == 4096
    assert cats[BrickCategory.NORM].percentage(0) is None
    other = cats[BrickCategory.OTHER]
    assert (other.count, other.total_ns, other.total_elements, other.percentage(total)) == (0, 0, 0, 0.0)


def test_a_timer_has_one_word_for_each_of_its_three_fields(profiler: BrickProfiler) -> None:
    if profiler.implementation != "compiled":
        pytest.skip("without a compiler, a timer is a tuple")
    timer = profiler.start_brick(BrickId.RMS_NORM)
    assert sys.getsizeof(timer) == object.__basicsize__ + 3 * 8  # the predecessor's 32 bytes, plus a second pointer
    profiler.stop_brick(timer, 1)


def test_a_launch_without_three_sizes_is_refused_with_an_example(profiler: BrickProfiler) -> None:
    with pytest.raises(ValueError, match=r"kernel gemv: grid is \(32, 1\); three whole numbers are expected"):
        profiler.graph_record_kernel("gemv", 0x1, (32, 1), (256, 1, 1))  # type: ignore[arg-type]
    assert profiler.recording


def test_the_graph_of_a_layer_is_drawn_and_analysed(profiler: BrickProfiler) -> None:
    profiler.enable_graph()
    profiler.graph_push_scope(Layer(0))
    profiler.graph_record_brick(BrickId.QKV_PROJECTION, 200_000, 4096)
    profiler.graph_record_kernel("batched_gemv", 0x1234, (32, 1, 1), (256, 1, 1), 4096)
    profiler.graph_pop_scope()
    assert profiler.graph_is_scope_balanced
    assert profiler.graph_to_dot().startswith("digraph ExecutionGraph {")

    graph = profiler.execution_graph()
    lines = graph.to_ascii_tree().splitlines()
    assert lines[:2] == ["Layer 0", "└── QkvProjection  200.0µs (4096 elem)"]
    assert lines[2].startswith("    └── batched_gemv  <<<32,256,1>>> smem=4096B")
    assert graph.to_tree_node().label == "Layer 0"
    assert [node["kind"] for node in json.loads(graph.to_json())["nodes"]] == ["Layer", "Brick", "KernelLaunch"]
    path = graph.critical_path()
    assert path.total_ns >= 200_000
    assert 1 in path.nodes
    assert graph.compute_slack()[1] == 0
    assert graph.critical_path_summary().startswith("Critical Path: ")
    assert graph.roofline_distance(1.0, 50.0).whole is None  # no FLOP and bytes were declared


def test_f103_and_f104_deferred_bricks_accumulate_until_finalize(profiler: BrickProfiler) -> None:
    for _ in range(3):
        profiler.record_deferred(BrickId.RMS_NORM, profiler.elapsed_ns(), 4096)
    assert profiler.pending_count == 3
    assert profiler.stats_for(BrickId.RMS_NORM) is None
    profiler.finalize()
    assert profiler.pending_count == 0
    stats = profiler.stats_for(BrickId.RMS_NORM)
    assert stats is not None
    assert (stats.count, stats.total_elements) == (3, 3 * 4096)


def test_f105_a_disabled_profiler_reads_no_clock(runtime: Path) -> None:
    read: list[int] = []

    def clock_ns() -> int:
        read.append(time.perf_counter_ns())
        return read[-1]

    profiler = BrickProfiler(enabled=False, recorder=RingRecorder(runtime), clock_ns=clock_ns)
    begun = len(read)
    profiler.stop_brick(profiler.start_brick(BrickId.RMS_NORM), 4096)
    assert (len(read), profiler.stats_for(BrickId.RMS_NORM)) == (begun, None)
    profiler.enable()
    profiler.stop_brick(profiler.start_brick(BrickId.RMS_NORM), 4096)
    assert len(read) > begun


def test_f106_a_brick_is_found_by_its_index() -> None:
    assert [list(BrickId)[brick] for brick in BrickId] == list(BrickId)


def test_f107_threads_record_at_the_same_time(profiler: BrickProfiler) -> None:
    begin = threading.Barrier(4)

    def record() -> None:
        begin.wait()
        for _ in range(200):
            profiler.stop_brick(profiler.start_brick(BrickId.RMS_NORM), 2)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = profiler.stats_for(BrickId.RMS_NORM)
    assert stats is not None
    assert (stats.count, stats.total_elements) == (800, 1600)


def test_f109_elapsed_time_never_goes_back(profiler: BrickProfiler) -> None:
    read = [profiler.elapsed_ns() for _ in range(1000)]
    assert read == sorted(read)
    assert read[-1] > read[0]


def test_a_self_verifying_brick_runs_its_assertions_and_has_a_budget(profiler: BrickProfiler, runtime: Path) -> None:
    def slow(x: Any) -> Any:
        return x / np.sqrt((x * x).mean())

    norm = BrickDefinition.of(
        BrickId.RMS_NORM, checks=(Finite(), Bounded(-10, 10), Equivalent(slow, 1e-5)), budget=TokenBudget(50.0)
    )
    assert norm.budget is not None
    assert norm.budget == TokenBudget.from_throughput(20_000)
    profiler.timed(norm)(lambda x: 1.01 * slow(x))(np.linspace(-1, 1, 64, dtype=np.float32))
    profiler.close()
    (catalog,) = runtime.glob("*.catalog")
    results = {one.assertion: one for one in CatalogReader(catalog).read() if isinstance(one, CheckResult)}
    assert {name: one.passed for name, one in results.items()} == {
        "finite": True,
        "from -10 to 10": True,
        "equals slow": False,
    }
    assert results["equals slow"].max_error == pytest.approx(0.01, rel=1e-4)


def test_the_graph_of_two_bricks_is_drawn_as_in_the_seed(profiler: BrickProfiler) -> None:
    profiler.enable_graph()
    profiler.graph_push_scope(Layer(0))
    for brick, total_ns, kernel, blocks, shared in (
        (BrickId.RMS_NORM, 50_000, "rmsnorm_kernel", 16, 1024),
        (BrickId.QKV_PROJECTION, 200_000, "batched_q4k_gemv", 32, 4096),
    ):
        profiler.graph_record_brick(brick, total_ns, 4096)
        profiler.graph_record_kernel(kernel, 0x1234, (blocks, 1, 1), (256, 1, 1), shared)
    profiler.graph_pop_scope()
    assert profiler.execution_graph().to_ascii_tree().splitlines() == [
        "Layer 0",
        "├── RmsNorm  50.0µs (4096 elem)",
        "│   └── rmsnorm_kernel  <<<16,256,1>>> smem=1024B",
        "└── QkvProjection  200.0µs (4096 elem)",
        "    └── batched_q4k_gemv  <<<32,256,1>>> smem=4096B",
    ]
