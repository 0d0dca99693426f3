"""Tests of the arithmetic of the roofline, with points that were calculated by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.analysis.roofline import distance, intensity, roof_applies

ROOFS = st.floats(1, 1000)


def test_left_of_the_ridge_bandwidth_bounds_and_right_of_it_the_peak() -> None:
    # With peaks of 100 GFLOP/s and 20 GB/s, the ridge point is at 5 FLOP/byte.
    memory = distance(2.0, 30.0, [100], [20])
    assert memory is not None
    assert (memory.attainable_gflops, memory.percent_of_roof, memory.bound) == (40, 75, "memory")
    compute = distance(50.0, 60.0, [100], [20])
    assert compute is not None
    assert (compute.attainable_gflops, compute.percent_of_roof, compute.bound) == (100, 60, "compute")


@given(st.floats(0.01, 1000), st.floats(0.1, 2), st.lists(ROOFS, min_size=1), st.lists(ROOFS, min_size=1))
def test_the_bound_is_a_roof_reached_to_60_percent_or_else_overhead(
    intensity: float, part: float, peaks: list[float], bandwidths: list[float]
) -> None:
    gflops = part * min(max(peaks), intensity * max(bandwidths))
    found = distance(intensity, gflops, peaks, bandwidths)
    assert found is not None
    near = {"compute"} if any(gflops >= 0.6 * one for one in peaks) else set()
    near |= {"memory"} if any(gflops >= 0.6 * intensity * one for one in bandwidths) else set()
    assert found.bound in near if near else found.bound == "latency or overhead"


def test_near_to_dram_and_far_from_the_cache_above_it_is_memory_that_bounds() -> None:
    found = distance(1.0, 28.0, [1000], [100, 30])
    assert found is not None
    assert (found.percent_of_roof, found.bound) == (28, "memory")
    assert distance(1.0, 28.0, [1000], [100]).bound == "latency or overhead"  # type: ignore[union-attr]


def test_a_point_above_the_roof_is_flagged_not_hidden() -> None:
    found = distance(1.0, 30.0, [100], [20])
    assert found is not None
    assert found.above_roof
    assert found.percent_of_roof == 150


@pytest.mark.parametrize(("flops", "moved"), [(None, 1.0), (1.0, None), (0.0, 1.0), (1.0, 0.0)])
def test_what_is_unknown_or_nothing_has_no_intensity(flops: float | None, moved: float | None) -> None:
    assert intensity(flops, moved) is None


def test_extreme_numbers_have_no_roof_rather_than_a_division_by_zero() -> None:
    assert distance(1e-300, 1.0, [5e-324], [5e-324]) is None


@pytest.mark.parametrize(("peaks", "bandwidths"), [([], [1.0]), ([1.0], []), ([0.0], [1.0])])
def test_without_both_kinds_of_ceilings_there_is_no_roof(peaks: list[float], bandwidths: list[float]) -> None:
    assert distance(1.0, 1.0, peaks, bandwidths) is None


@pytest.mark.parametrize(
    ("dtype", "roof", "stands"),
    [
        ("int8", "int8", True),
        ("int8", "float32", False),
        # In recordings of older versions, a roof (peak rate) has no data type. Such roofs are for float32.
        ("int8", "", False),
        ("float32", "int8", False),
        ("float32", "float32", True),
        ("float32", "bfloat16", False),
        ("float32", "", True),
        ("", "int8", False),
        ("", "bfloat16", True),
        ("", "", True),
    ],
)
def test_work_stands_under_the_roofs_of_what_it_multiplies(dtype: str, roof: str, stands: bool) -> None:
    assert roof_applies(dtype, roof) == stands
