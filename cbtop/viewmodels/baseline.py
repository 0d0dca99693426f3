"""A baseline: what a process took at one time, per phase, brick and layer, in which surroundings; derived."""

# Times are exclusive and of the recorded steps, µs for a token; for a step where tokens are not known.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cbtop.client.store import SourceRecord
from cbtop.client.window import Block
from cbtop.profiler.brick_stats import name_and_category
from cbtop.profiler.graph.nodes import display_name
from cbtop.profiler.histograms import Column
from cbtop.profiler.phase_totals import PhaseTotals, exclusive_of
from cbtop.profiler.stats import RARE, Growth, NodeStats
from cbtop.protocol.vocabulary import BrickCategory, NodeKind
from cbtop.viewmodels.layers import BETWEEN, layer_of_nodes
from cbtop.viewmodels.model import StepsView
from cbtop.viewmodels.noise import MIN_BLOCKS, Figure, figures
from cbtop.viewmodels.steps import steps_views

_PLAIN, _PLAIN_TOKENS = RARE.index("plain"), RARE.index("plain_tokens")

Brick = tuple[str, BrickCategory]
BETWEEN_BRICKS: Brick = (BETWEEN, BrickCategory.OTHER)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where and of what figures were measured; None and empty: not said."""

    program: str
    pid: int
    rank: int | None
    model: str | None
    architecture: str | None
    quantization: str | None
    layers: int | None
    backend: str | None
    threads: int | None
    host: str
    devices: tuple[str, ...]  # GPUs
    sample_every: int


@dataclass(frozen=True, slots=True)
class Times:
    """What the steps of a phase took."""

    unit: str  # "token" or "step": what the µs of bricks and layers are of
    step_us: Figure  # of all steps, recorded inside or not
    tokens_per_sec: Figure | None  # of wall-clock time
    bricks: Mapping[Brick, Figure]  # in all layers and outside; the time between bricks is one of them
    cells: Mapping[tuple[Brick, str], Figure]  # in one layer
    layers: Mapping[str, Figure]  # whole


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """One phase: what its steps were, and what they took where they ran in MIN_BLOCKS blocks or more."""

    phase: str
    steps: int
    share: float  # of the steps of all phases
    tokens: float | None  # a step, mean
    sequences: float | None  # that a step works on, mean
    cached: float | None  # positions that the cache of each sequence holds before a step, mean
    blocks: int  # in which steps were recorded
    times: Times | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The figures of some seconds of one process."""

    key: str
    surroundings: Surroundings
    phases: tuple[PhaseFigures, ...]
    begin_ns: int  # on the clock of its host
    end_ns: int
    ended_s: float | None  # the same end, in Unix time of its host
    lost_percent: float  # of the records that were seen in its window

    @property
    def covers_s(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    def of(self, phase: str | None) -> PhaseFigures | None:
        """Those of one phase; None where it has not run."""
        return next((found for found in self.phases if found.phase == phase), None)


def snapshot(
    record: SourceRecord, devices: Sequence[str] = (), phase: str | None = None, beside: Sequence[Snapshot] = ()
) -> Snapshot:
    """The window of `record`, with the times of every phase or of `phase` alone; without what of it is in one of the
    snapshots `beside`, too, and would be compared with itself."""
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
            _phase(record, blocks if phase in (None, steps.phase) else [], stats, steps, everything) for steps in ran
        ),
        begin_ns=blocks[0].begin_ns if blocks else end_ns,
        end_ns=end_ns,
        ended_s=(hello.realtime_ns + end_ns - hello.monotonic_ns) / 1e9 if hello else None,
        lost_percent=100 * losses.lost / losses.seen if losses.seen else 0.0,
    )


def surroundings_of(record: SourceRecord, devices: Sequence[str]) -> Surroundings:
    """What a process says of itself, with the names of its GPUs."""
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
    record: SourceRecord, blocks: Sequence[Block], stats: NodeStats, steps: StepsView, everything: int
) -> PhaseFigures:
    totals = PhaseTotals.of(record.nodes, stats, steps.phase)
    assert totals.step is not None
    ran = [(block, each) for block in blocks if (each := _recorded(block.growth, totals.step.id))[0] > 0]
    return PhaseFigures(
        phase=steps.phase,
        steps=steps.count,
        share=steps.count / everything,
        tokens=None if totals.tokens is None else steps.tokens / steps.count,
        sequences=steps.sequences.mean if steps.sequences else None,
        cached=steps.cached.mean if steps.cached else None,
        blocks=len(ran),
        times=None if len(ran) < MIN_BLOCKS else _times(totals, blocks, ran, is_sample=steps.is_sample),
    )


def _times(
    totals: PhaseTotals, blocks: Sequence[Block], ran: Sequence[tuple[Block, tuple[int, int]]], *, is_sample: bool
) -> Times:
    """Of `ran`, the `blocks` with recorded steps: how many, and how many tokens."""
    assert totals.step is not None
    step = totals.step.id
    steps, tokens = np.array([each for _, each in ran], float).T
    is_counted = totals.tokens is not None and tokens.sum() > 0
    places = Places(totals)
    rows = np.array([places.row(block.growth) for block, _ in ran]) / 1e3
    parts = np.split(rows, np.cumsum([len(places.bricks), len(places.cells)]), axis=1)
    found = (figures(part, tokens if is_counted else steps) for part in parts)
    calls = totals.stats.calls_of([*places.nodes, [step]])
    *medians, step_median = [None if one is None or one.p50_ns is None else one.p50_ns / 1e3 for one in calls]
    known = iter(medians)
    bricks, cells, layers = ([replace(one, median_us=next(known)) for one in part] for part in found)
    every = [(_of(block.growth, "count", step), _of(block.growth, "total_ns", step)) for block, _ in ran]
    count, total_ns = np.array(every, float).T
    (step_us,) = figures(total_ns[:, None] / 1e3, count)
    step_us = replace(step_us, median_us=step_median)
    rate = None
    if is_counted and not is_sample:
        wall_s = np.array([block.end_ns - block.begin_ns for block in blocks]) / 1e9
        (rate,) = figures(np.array([[_of(block.growth, "elements", step)] for block in blocks], float), wall_s)
    return Times(
        unit="token" if is_counted else "step",
        step_us=step_us,
        tokens_per_sec=rate,
        bricks=dict(zip(places.bricks, bricks, strict=True)),
        cells=dict(zip(places.cells, cells, strict=True)),
        layers=dict(zip(places.layers, layers, strict=True)),
    )


class Places:
    """Every brick, every brick in a layer, and every layer of a phase; which nodes their times are those of."""

    def __init__(self, totals: PhaseTotals) -> None:
        assert totals.step is not None
        table, ids = totals.table, totals.inside.ids
        self._totals, self._step = totals, totals.step.id
        kind_of, layer_of = table.column("kind_of"), layer_of_nodes(totals)
        names = {node.id: display_name(node) for node in totals.nodes if layer_of[node.id] == node.id}
        self.layers = list(dict.fromkeys(names.values()))
        at_layer = {name: at for at, name in enumerate(self.layers)}
        self._layer_ids = np.array(list(names), np.int64)
        self._layer_at = np.array([at_layer[name] for name in names.values()], np.int64)
        row_of = np.full(len(layer_of), -1)
        row_of[self._layer_ids] = self._layer_at
        row_of[0] = -1
        self.nodes_of_bricks = self._ids = ids[
            (kind_of[ids] == NodeKind.BRICK) & ~totals.adopted[ids] & (totals.columns["count"][ids] > 0)
        ]
        firsts, self._brick_at = np.unique(table.column("first_of")[self._ids], return_inverse=True)
        self.bricks: list[Brick] = [*(name_and_category(table[node]) for node in firsts.tolist()), BETWEEN_BRICKS]
        layer = row_of[layer_of[self._ids]]
        self._is_inside = layer >= 0
        pair = layer[self._is_inside] * len(self.bricks) + self._brick_at[self._is_inside]
        pairs, self._cell_at = np.unique(pair, return_inverse=True)
        self._layer_of_cell = pairs // len(self.bricks)
        at = (divmod(one, len(self.bricks)) for one in pairs.tolist())
        inside = [(self.bricks[brick], self.layers[layer]) for layer, brick in at]
        self.cells = [*inside, *((BETWEEN_BRICKS, name) for name in self.layers)]

    @property
    def nodes(self) -> list[Column]:
        """Whose calls those of `bricks`, `cells` and `layers` are; what lies between bricks is judged by what holds
        them."""
        inside = self._ids[self._is_inside]
        of_layers = [self._layer_ids[self._layer_at == at] for at in range(len(self.layers))]
        return [
            *(self._ids[self._brick_at == at] for at in range(len(self.bricks) - 1)),
            np.array([self._step]),
            *(inside[self._cell_at == at] for at in range(len(self._layer_of_cell))),
            *of_layers,
            *of_layers,
        ]

    def row(self, growth: Growth) -> NDArray[np.int64]:
        """What each of `bricks`, `cells` and `layers` took, ns."""
        totals = self._totals
        closed_ns = _dense(growth, "closed_ns", len(totals.table) + 1)
        own_ns = exclusive_of(totals.table, totals.inside, closed_ns, closed_ns)[self._ids]
        bricks, cells, layers = (np.zeros(len(each), np.int64) for each in (self.bricks, self.cells, self.layers))
        np.add.at(bricks, self._brick_at, own_ns)
        bricks[-1] = closed_ns[self._step] - bricks.sum()
        np.add.at(cells, self._cell_at, own_ns[self._is_inside])
        np.add.at(layers, self._layer_at, closed_ns[self._layer_ids])
        between = layers.copy()
        np.subtract.at(between, self._layer_of_cell, cells[: len(self._layer_of_cell)])
        cells[len(self._layer_of_cell) :] = between
        return np.concatenate((bricks, cells, layers))


def _recorded(growth: Growth, step: int) -> tuple[int, int]:
    """The steps whose inside was recorded, and their tokens."""
    plain, plain_tokens = (growth.rare.get((column, step), 0) for column in (_PLAIN, _PLAIN_TOKENS))
    return _of(growth, "count", step) - plain, _of(growth, "elements", step) - plain_tokens


def _of(growth: Growth, column: str, node: int) -> int:
    return int(growth.columns[column][growth.node == node].sum())


def _dense(growth: Growth, column: str, size: int) -> Column:
    found = np.zeros(size, np.int64)
    known = growth.node < size
    found[growth.node[known]] = growth.columns[column][known]
    return found
