"""Roofline: the measured ceilings of the machine and each brick under them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from cbtop.profiler.roofline import Distance, distance
from cbtop.protocol.messages import Ceiling
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.model import CeilingRow, RooflineView


def under_roofs(bricks: Iterable[BrickRow], ceilings: Iterable[Ceiling]) -> tuple[BrickRow, ...]:
    """Every brick with its distance from the roof above it, where its work and both roofs are known."""
    # The highest roof of a kind bounds what any brick can reach; lower ones (DRAM under cache) stand beside it.
    peaks: dict[str, float] = {}
    for ceiling in ceilings:
        peaks[ceiling.kind] = max(ceiling.value, peaks.get(ceiling.kind, ceiling.value))
    return tuple(replace(row, roof=_roof(row, peaks.get("compute"), peaks.get("bandwidth"))) for row in bricks)


def roofline(ceilings: Iterable[Ceiling], bricks: Sequence[BrickRow], note: str = "") -> RooflineView:
    """Every brick that declared flops and bytes as a point; the rest by name."""
    return RooflineView(
        ceilings=tuple(
            CeilingRow(c.name, c.kind, c.value, c.unit, c.provenance, c.median, c.lowest, c.measured_on)
            for c in ceilings
        ),
        points=tuple(brick for brick in bricks if _is_point(brick)),
        without_work=tuple(brick.name for brick in bricks if not _is_point(brick)),
        note=note,
    )


def missing_ceilings(view: RooflineView) -> str:
    """Which kinds of ceilings are not known, and why; "" where both are."""
    kinds = {ceiling.kind for ceiling in view.ceilings}
    missing = [name for name in ("bandwidth", "compute") if name not in kinds]
    return f"{' and '.join(missing)} ceiling n/a: {view.note or 'not measured by this source'}" if missing else ""


def _is_point(brick: BrickRow) -> bool:
    return brick.intensity is not None and brick.gflops is not None and brick.gb_per_sec is not None


def _roof(brick: BrickRow, peak_gflops: float | None, peak_gb_per_sec: float | None) -> Distance | None:
    if brick.intensity is None or brick.gflops is None:
        return None
    return distance(brick.intensity, brick.gflops, peak_gflops, peak_gb_per_sec)
