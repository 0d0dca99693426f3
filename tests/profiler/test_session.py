"""A process can ask what it has recorded, without a daemon."""

from __future__ import annotations

from itertools import count

import pytest

from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.vocabulary import BrickCategory, BrickId


@pytest.fixture
def profiler() -> BrickProfiler:
    return BrickProfiler(clock_ns=count(0, 1000).__next__)  # every look at the clock is a microsecond on


def test_a_brick_is_summed_over_the_places_it_ran_in(profiler: BrickProfiler) -> None:
    assert profiler.stats_for(BrickId.RMS_NORM) is None
    for index in range(3):
        with profiler.layer(index), profiler.brick(BrickId.RMS_NORM, 10):
            pass
    stats = profiler.stats_for(BrickId.RMS_NORM)
    assert stats is not None
    assert (stats.calls.count, stats.calls.total_ns, stats.calls.elements) == (3, 3000, 30)
    assert stats.elements_per_sec == pytest.approx(1e7)
    assert profiler.stats_for("RmsNorm") == stats


def test_f110_category_sums_are_those_of_their_bricks(profiler: BrickProfiler) -> None:
    for brick in (BrickId.GATE_PROJECTION, BrickId.UP_PROJECTION, BrickId.SAMPLING):
        with profiler.brick(brick, 5):
            pass
    found = profiler.category_stats()
    assert {category: (stats.count, stats.exclusive_ns) for category, stats in found.items()} == {
        BrickCategory.FFN: (2, 2000),
        BrickCategory.OTHER: (1, 1000),
    }


def test_nested_bricks_are_not_counted_twice_and_tokens_are_not_elements(profiler: BrickProfiler) -> None:
    with profiler.step("decode", tokens=2), profiler.brick("outer", 4096), profiler.brick("inner", 4096):
        pass
    report = profiler.report()
    inner, outer = report.bricks[1], report.bricks[0]
    assert {stats.name: stats.exclusive_ns for stats in (inner, outer)} == {"outer": 2000, "inner": 1000}
    assert (report.steps, report.tokens, report.wall_ns, report.total_ns) == (1, 2, 5000, 3000)
    assert report.coverage == pytest.approx(0.6)
    assert report.tokens_per_sec == pytest.approx(2 / 5e-6)
    assert "60.0 % of it in bricks" in str(report)


def test_the_report_goes_on_where_the_last_one_ended(profiler: BrickProfiler) -> None:
    for times in (1, 2, 3):
        with profiler.brick("a"):
            pass
        assert profiler.report().bricks[0].calls.count == times


def test_what_the_ring_overwrote_is_said() -> None:
    from cbtop.profiler.recorder import RingRecorder

    profiler = BrickProfiler(recorder=RingRecorder(ring_bytes=8 * 32))
    for _ in range(20):
        with profiler.brick("a"):
            pass
    report = profiler.report()
    assert report.bricks[0].calls.count + report.overwritten == 20
    assert report.overwritten > 0
    assert f"{report.overwritten} records were overwritten" in str(report)
