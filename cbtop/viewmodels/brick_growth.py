"""Find how much each brick's time has grown between the beginning and the end of a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cbtop.client.source_record import SourceRecord
from cbtop.client.window import SliceGrowth
from cbtop.profiler.analysis.brick_stats import brick_stats
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.vocabulary import BrickCategory

MIN_BLOCKS = 6  # At least this many blocks (of about a second) must contain recorded steps.
LEAST_SHARE = 0.05  # Bricks with a smaller share of all bricks' time are ignored, because their growth means little.
# Bricks do not grow alike if the factor of one differs from the common factor by more than this share.
ALIKE = 0.15


@dataclass(frozen=True, slots=True)
class BrickGrowth:
    """The exclusive time per recorded step of a brick, in the first and in the last third of a window."""

    name: str
    category: BrickCategory
    before_us: float
    after_us: float


def brick_growth(record: SourceRecord, phase: str | None) -> tuple[BrickGrowth, ...]:
    """Return the growth of each brick of `phase`, largest first. () if the window has too few blocks."""
    blocks = [block for block in record.window.blocks() if block.growth.node.size]
    if phase is None or len(blocks) < MIN_BLOCKS:
        return ()
    third = len(blocks) // 3
    before, after = (_us_a_step(record, part, phase) for part in (blocks[:third], blocks[-third:]))
    found = [BrickGrowth(*brick, before[brick], after[brick]) for brick in before.keys() & after.keys()]
    return tuple(sorted(found, key=lambda one: one.before_us - one.after_us))


def alike(growth: Sequence[BrickGrowth]) -> float | None:
    """Return the common growth factor of all larger bricks. None if their factors differ, or if fewer than two
    factors are known.
    """
    before_us, after_us = sum(one.before_us for one in growth), sum(one.after_us for one in growth)
    larger = [one for one in growth if one.before_us >= LEAST_SHARE * before_us]
    if len(larger) < 2 or not before_us:
        return None
    factor = after_us / before_us
    is_alike = all(abs(one.after_us / one.before_us / factor - 1) <= ALIKE for one in larger)
    return factor if is_alike else None


def _us_a_step(
    record: SourceRecord, blocks: Sequence[SliceGrowth], phase: str
) -> dict[tuple[str, BrickCategory], float]:
    """Return the exclusive µs per recorded step of each brick, by (name, category)."""
    stats = NodeStats()
    for block in blocks:
        stats.count(block.growth)
    totals = PhaseTotals.of(record.nodes, stats, phase)
    if totals.step is None:
        return {}
    steps = int(totals.columns["count"][totals.step.id])
    if not steps:
        return {}
    return {(one.name, one.category): one.exclusive_ns / 1e3 / steps for one in brick_stats(totals)}
