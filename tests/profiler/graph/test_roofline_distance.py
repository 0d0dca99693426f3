"""Each kernel and brick stands under a roof, above it with a flag, or without one where it cannot be known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.graph.execution_graph import ExecutionGraph
from cbtop.profiler.graph.nodes import Layer
from cbtop.profiler.graph.roofline_distance import NodeDistance, roofline_distance

# 100 GFLOP/s over 20 GB/s: the ridge lies at 5 FLOP/byte.
PEAK_GFLOPS, PEAK_GB_PER_SEC = 100.0, 20.0


def one(
    duration_ns: float | None, flops: float | None, moved_bytes: float | None, peak: float | None = PEAK_GFLOPS
) -> NodeDistance:
    graph = ExecutionGraph()
    graph.push_scope(Layer(0))
    graph.record_kernel("gemv", duration_ns=duration_ns, flops=flops, moved_bytes=moved_bytes)
    (found,) = roofline_distance(graph, peak, PEAK_GB_PER_SEC)
    return found


def test_a_kernel_and_its_brick_each_have_their_own_distance() -> None:
    graph = ExecutionGraph()
    graph.record_brick("qkv", 200, 1, flops=2000, moved_bytes=1000)  # 10 GFLOP/s at 2 FLOP/byte
    graph.record_kernel("gemv", duration_ns=100, flops=6000, moved_bytes=100)  # 60 GFLOP/s at 60 FLOP/byte
    brick, kernel = roofline_distance(graph, PEAK_GFLOPS, PEAK_GB_PER_SEC)
    assert brick.distance is not None
    assert kernel.distance is not None
    assert (brick.node, brick.name, brick.flop_per_byte, brick.gflops) == (0, "qkv", 2, 10)
    assert (brick.distance.attainable_gflops, brick.distance.percent_of_roof) == (40, 25)
    assert (kernel.distance.bound, kernel.distance.percent_of_roof) == ("compute", 60)


def test_a_point_above_the_roof_is_flagged() -> None:
    found = one(100, 6000, 6000)  # 60 GFLOP/s where 20 are attainable
    assert found.distance is not None
    assert found.distance.above_roof


@pytest.mark.parametrize(
    ("duration_ns", "flops", "moved_bytes"),
    [
        (100, None, 10),
        (100, 10, None),
        (100, 0, 10),
        (100, 10, 0),
        (None, 10, 10),
        (0, 10, 10),
    ],
)
def test_what_is_unknown_or_nothing_has_no_distance(
    duration_ns: float | None, flops: float | None, moved_bytes: float | None
) -> None:
    assert one(duration_ns, flops, moved_bytes).distance is None


def test_without_ceilings_the_point_is_known_and_its_distance_is_not() -> None:
    found = one(100, 6000, 100, peak=None)
    assert (found.flop_per_byte, found.gflops, found.distance) == (60, 60, None)


amounts = st.one_of(st.none(), st.floats(0, 1e18))


@given(amounts, amounts, amounts)
def test_no_amount_of_work_or_time_divides_by_zero(
    duration_ns: float | None, flops: float | None, moved_bytes: float | None
) -> None:
    found = one(duration_ns, flops, moved_bytes)
    assert found.distance is None or found.distance.attainable_gflops > 0


def test_an_intensity_too_small_for_a_float_has_no_distance() -> None:
    assert one(100, 5e-324, 10).distance is None
