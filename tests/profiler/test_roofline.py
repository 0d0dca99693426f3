"""The roofline's arithmetic, on points worked out by hand."""

from __future__ import annotations

import pytest

from cbtop.profiler.roofline import distance, intensity


def test_left_of_the_ridge_bandwidth_bounds_and_right_of_it_the_peak() -> None:
    # 100 GFLOP/s over 20 GB/s: the ridge lies at 5 FLOP/byte.
    memory = distance(2.0, 10.0, peak_gflops=100, peak_gb_per_sec=20)
    assert memory is not None
    assert (memory.attainable_gflops, memory.percent_of_roof, memory.bound) == (40, 25, "memory")
    compute = distance(50.0, 60.0, peak_gflops=100, peak_gb_per_sec=20)
    assert compute is not None
    assert (compute.attainable_gflops, compute.percent_of_roof, compute.bound) == (100, 60, "compute")


def test_a_point_above_the_roof_is_flagged_not_hidden() -> None:
    found = distance(1.0, 30.0, peak_gflops=100, peak_gb_per_sec=20)
    assert found is not None
    assert found.above_roof
    assert found.percent_of_roof == 150


@pytest.mark.parametrize(("flops", "moved"), [(None, 1.0), (1.0, None), (0.0, 1.0), (1.0, 0.0)])
def test_what_is_unknown_or_nothing_has_no_intensity(flops: float | None, moved: float | None) -> None:
    assert intensity(flops, moved) is None


def test_extreme_numbers_have_no_roof_rather_than_a_division_by_zero() -> None:
    assert distance(1e-300, 1.0, peak_gflops=5e-324, peak_gb_per_sec=5e-324) is None


@pytest.mark.parametrize(("peak", "bandwidth"), [(None, 1.0), (1.0, None), (0.0, 1.0)])
def test_without_both_ceilings_there_is_no_roof(peak: float | None, bandwidth: float | None) -> None:
    assert distance(1.0, 1.0, peak, bandwidth) is None
