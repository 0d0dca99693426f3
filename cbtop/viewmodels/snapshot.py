"""Make a snapshot of a live process, to compare it with a baseline. All its figures are derived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cbtop.client.source_record import SourceRecord
from cbtop.client.window import SliceGrowth, TimeRange
from cbtop.comparison.baseline import BrickWork, PhaseFigures, PhaseTimes, Snapshot, Surroundings
from cbtop.comparison.items import Brick, PhasePlaces, Place, PlaceTimes, place_times
from cbtop.comparison.noise import MIN_BLOCKS, figures
from cbtop.profiler.analysis.brick_stats import brick_stats
from cbtop.profiler.analysis.calls import Calls
from cbtop.profiler.analysis.growth import Growth
from cbtop.profiler.analysis.node_columns import SPARSE_COLUMNS
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.profiler.analysis.roofline import intensity
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.viewmodels.steps import StepsView, steps_views
from cbtop.viewmodels.time_range import of_model

_PLAIN, _PLAIN_TOKENS = SPARSE_COLUMNS.index("plain"), SPARSE_COLUMNS.index("plain_tokens")


def snapshot(
    record: SourceRecord,
    devices: Sequence[str] = (),
    phase: str | None = None,
    beside: Sequence[Snapshot] = (),
    *,
    inside: bool = True,
) -> Snapshot:
    """Return a snapshot of the window of `record`, with the times of all phases or only of `phase`.

    Blocks of steps that are also in a snapshot of this process in `beside` are excluded, so that no data is compared
    with itself. With `inside`, the snapshot has the times of bricks and layers.
    """
    blocks = record.window.blocks()
    for other in beside:
        if other.key == record.key:
            blocks = [block for block in blocks if block.end_ns <= other.begin_ns or block.begin_ns >= other.end_ns]
    together = Growth.of([block.growth for block in blocks])
    stats = record.stats.since(together)
    ran = [steps for steps in steps_views(record, stats, None) if steps.count]
    everything = sum(steps.count for steps in ran)
    hello, losses = record.hello, record.window.losses
    end_ns = blocks[-1].end_ns if blocks else record.window.now_ns
    return Snapshot(
        key=record.key,
        surroundings=surroundings_of(record, devices),
        phases=tuple(
            _phase(record, blocks if phase in (None, steps.phase) else [], stats, steps, everything, inside=inside)
            for steps in ran
        ),
        begin_ns=blocks[0].begin_ns if blocks else end_ns,
        end_ns=end_ns,
        ended_s=(hello.realtime_ns + end_ns - hello.monotonic_ns) / 1e9 if hello else None,
        lost_percent=100 * losses.lost / losses.seen if losses.seen else 0.0,
    )


def surroundings_of(record: SourceRecord, devices: Sequence[str]) -> Surroundings:
    """Return the conditions that the process reports, and the names of its GPUs."""
    hello, manifest = record.hello, record.manifest
    return Surroundings(
        program=hello.program if hello else "",
        pid=hello.pid if hello else 0,
        rank=hello.rank if hello else None,
        model=manifest.model if manifest else None,
        architecture=manifest.architecture if manifest else None,
        quantization=manifest.quantization if manifest else None,
        layers=manifest.layers if manifest else None,
        backend=manifest.backend if manifest else None,
        threads=manifest.threads if manifest else None,
        host=hello.host if hello else "",
        devices=tuple(devices),
        sample_every=record.sample_every,
    )


def _phase(
    record: SourceRecord,
    blocks: Sequence[SliceGrowth],
    stats: NodeStats,
    steps: StepsView,
    everything: int,
    *,
    inside: bool,
) -> PhaseFigures:
    totals = PhaseTotals.of(record.nodes, stats, steps.phase)
    assert totals.step is not None
    if blocks:
        whole = TimeRange(blocks[0].begin_ns, blocks[-1].end_ns)
        of = of_model(record, whole, totals.step.label)
        blocks = [block for block in blocks if block.end_ns > of.begin_ns and block.begin_ns < of.end_ns]
    ran = [(block, each) for block in blocks if (each := _recorded(block.growth, totals.step.id))[0] > 0]
    return PhaseFigures(
        phase=steps.phase,
        steps=steps.count,
        share=steps.count / everything,
        tokens=None if totals.tokens is None else steps.tokens / steps.count,
        sequences=steps.sequences.mean if steps.sequences else None,
        cached=steps.cached.mean if steps.cached else None,
        blocks=len(ran),
        times=None
        if len(ran) < MIN_BLOCKS
        else _times(totals, blocks, ran, is_sample=steps.is_sample, inside=inside),
    )


def _times(
    totals: PhaseTotals,
    blocks: Sequence[SliceGrowth],
    ran: Sequence[tuple[SliceGrowth, tuple[int, int]]],
    *,
    is_sample: bool,
    inside: bool,
) -> PhaseTimes:
    """Return the times of one phase's steps.

    `ran` has each block with recorded steps, and its (steps, tokens).
    """
    assert totals.step is not None
    step = totals.step.id
    steps, tokens = np.array([each for _, each in ran], float).T
    is_counted = totals.tokens is not None and tokens.sum() > 0
    units = tokens if is_counted else steps
    (step_calls,) = totals.stats.calls_of([[step]])
    every = [(_of(block.growth, "count", step), _of(block.growth, "total_ns", step)) for block, _ in ran]
    count, total_ns = np.array(every, float).T
    (step_us,) = figures(total_ns[:, None] / 1e3, count)
    step_us = replace(step_us, median_us=_median_us(step_calls))
    rate = None
    if is_counted and not is_sample:
        wall_s = np.array([block.end_ns - block.begin_ns for block in blocks]) / 1e9
        (rate,) = figures(np.array([[_of(block.growth, "elements", step)] for block in blocks], float), wall_s)
    return PhaseTimes(
        unit="token" if is_counted else "step",
        step_us=step_us,
        tokens_per_sec=rate,
        places=_places(totals, [block.growth for block, _ in ran], units, steps) if inside else {},
        work=_work(totals, float(units.sum())) if inside else {},
    )


def _places(
    totals: PhaseTotals, growths: Sequence[Growth], units: NDArray[np.float64], steps: NDArray[np.float64]
) -> dict[Place, PlaceTimes]:
    """Return the times of every brick, every layer, and every brick in a layer.

    `units` (tokens or steps) and `steps` have a number for each block.
    """
    places = PhasePlaces(totals)
    found, _ = place_times(places, totals, growths, units, steps, None)
    medians = map(_median_us, totals.stats.calls_of(places.nodes))
    # With few calls, use their median although its error is unknown.
    return {
        place: one if one.time.median_us is not None else replace(one, time=replace(one.time, median_us=median))
        for (place, one), median in zip(found.items(), medians, strict=True)
    }


def _median_us(calls: Calls | None) -> float | None:
    return None if calls is None or calls.p50_ns is None else calls.p50_ns / 1e3


def _work(totals: PhaseTotals, units: float) -> dict[Brick, BrickWork]:
    """Return the FLOP and bytes per unit (token or step) of each brick that declares both. `units` is the number of
    units.
    """
    return {
        (one.name, one.category): BrickWork(one.flops / units, flop_per_byte, one.gflops)
        for one in brick_stats(totals)
        if one.flops is not None and one.gflops and (flop_per_byte := intensity(one.flops, one.bytes))
    }


def _recorded(growth: Growth, step: int) -> tuple[int, int]:
    """Return the number of a phase's recorded steps, and of their tokens."""
    plain, plain_tokens = (growth.rare.get((column, step), 0) for column in (_PLAIN, _PLAIN_TOKENS))
    return _of(growth, "count", step) - plain, _of(growth, "elements", step) - plain_tokens


def _of(growth: Growth, column: str, node: int) -> int:
    return int(growth.column(column)[growth.node == node].sum())
