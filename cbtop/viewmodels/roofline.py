"""Roofline: the measured ceilings of the machine and each brick under them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cbtop.profiler.roofline import distance, intensity
from cbtop.protocol.messages import Ceiling
from cbtop.viewmodels.model import BrickRow, CeilingRow, RooflinePoint, RooflineView


def roofline(ceilings: Iterable[Ceiling], bricks: Sequence[BrickRow]) -> RooflineView:
    """Every brick that declared flops and bytes as a point; the rest by name."""
    rows = tuple(CeilingRow(c.name, c.kind, c.value, c.unit, c.provenance) for c in ceilings)
    # The highest roof of a kind bounds what any brick can reach; lower ones (DRAM under cache) stand beside it.
    peak_gflops = max((row.value for row in rows if row.kind == "compute"), default=None)
    peak_gb_per_sec = max((row.value for row in rows if row.kind == "bandwidth"), default=None)
    points = [_point(brick, peak_gflops, peak_gb_per_sec) for brick in bricks]
    return RooflineView(
        ceilings=rows,
        points=tuple(point for point in points if point),
        without_work=tuple(brick.name for brick, point in zip(bricks, points, strict=True) if not point),
    )


def _point(brick: BrickRow, peak_gflops: float | None, peak_gb_per_sec: float | None) -> RooflinePoint | None:
    flop_per_byte = intensity(brick.flops, brick.bytes)
    if flop_per_byte is None or brick.gflops is None or brick.gb_per_sec is None:
        return None
    roof = distance(flop_per_byte, brick.gflops, peak_gflops, peak_gb_per_sec)
    return RooflinePoint(
        brick=brick.name,
        category=brick.category,
        intensity=flop_per_byte,
        gflops=brick.gflops,
        gb_per_sec=brick.gb_per_sec,
        attainable_gflops=roof.attainable_gflops if roof else None,
        percent_of_roof=roof.percent_of_roof if roof else None,
        bound=roof.bound if roof else "n/a",
        above_roof=roof.above_roof if roof else False,
        percent=brick.percent,
    )
