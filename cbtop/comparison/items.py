"""Compute the times of every brick, every layer, and every brick in a layer of a phase, from blocks of steps. All are
derived from records.
"""

# Rules
# - The time of a call and the calls per step are two figures, each with its own error. If a brick runs only in some
#   steps, its calls vary by chance.
# - Other programs delay a few calls. So a call is judged by the median call of its layer.
# - These are judged by the mean: calls of bricks that contain other bricks, and the time between a layer's bricks.
# - The typical call of a brick over several layers is a mean with fixed weights, so that more calls in one layer do
#   not change it.

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cbtop.comparison.call_counts import call_figures
from cbtop.comparison.noise import MIN_BLOCKS, Figure, figures, stretched
from cbtop.comparison.quantiles import MEDIAN, MIN_BEYOND, P99, CallTimes, Quantile
from cbtop.profiler.analysis.brick_stats import name_and_category
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.growth import Growth
from cbtop.profiler.analysis.histograms import Column
from cbtop.profiler.analysis.layers import BETWEEN, layer_of_nodes
from cbtop.profiler.analysis.node_columns import SPARSE_COLUMNS
from cbtop.profiler.analysis.phase_totals import PhaseTotals, exclusive_of
from cbtop.protocol.vocabulary import BrickCategory, NodeKind

Brick = tuple[str, BrickCategory]
BETWEEN_BRICKS: Brick = (BETWEEN, BrickCategory.OTHER)
Place = tuple[Brick | None, str | None]  # a place: (brick, None), (None, layer), (brick, layer), or WHOLE_STEP
WHOLE_STEP: Place = (None, None)
_OVERLAP = SPARSE_COLUMNS.index("overlap_ns")
# If all calls of a brick or layer are alike, its `Quantile.stretch` is below this, except by chance.
_UNEVEN = 1.5
# A common factor needs at least this many bricks in layers. With fewer bricks, a single slow brick would change the
# factor.
MIN_SHARING = 8


@dataclass(frozen=True, slots=True)
class PlaceTimes:
    """The times in µs of one brick, layer, or brick in a layer: the time per token or step, the time of a typical
    call, and quantiles of all calls.

    `calls` is per step. `call` is without inner bricks, and quantiles are with them. None: too few calls.
    """

    time: Figure
    call: Figure | None = None
    p50: Figure | None = None
    p99: Figure | None = None
    calls: Figure | None = None


def tells_pace(place: Place) -> bool:
    """Return whether `place` is a brick in one layer. These do not overlap, so together they show how fast the
    machine is.
    """
    return place[0] is not None and place[0] != BETWEEN_BRICKS and place[1] is not None


class PhasePlaces:
    """All parts of a phase that are compared: every brick, every brick in a layer, and every layer.

    A part can have several nodes. Its time is the sum of their times.
    """

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
        # Ids of nodes that may contain bricks, such as layers.
        self._around = ids[~totals.adopted[ids] & ~totals.held[ids]]
        self._around_in = row_of[layer_of[self._around]]
        at = (divmod(one, len(self.bricks)) for one in pairs.tolist())
        inside = [(self.bricks[brick], self.layers[layer]) for layer, brick in at]
        self.cells = [*inside, *((BETWEEN_BRICKS, name) for name in self.layers)]

    @property
    def names(self) -> list[Place]:
        """The keys of all places: first bricks, then bricks in layers (`cells`), then layers."""
        return [*((brick, None) for brick in self.bricks), *self.cells, *((None, layer) for layer in self.layers)]

    @property
    def nodes(self) -> list[Column]:
        """The nodes of each place, for `bricks`, `cells` and `layers` in this order.

        A place's calls are its nodes' calls. The time between bricks has no calls, so the nodes are of the layer or
        step.
        """
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
        """Return the times (ns) of all bricks, then of all bricks in layers (`cells`), then of all layers, in
        `growth`.
        """
        totals = self._totals
        closed_ns = _dense(growth, "closed_ns", len(totals.table) + 1)
        overlap_ns = _overlap_ns(growth, len(closed_ns))
        own_ns = exclusive_of(totals.table, totals.inside, closed_ns, closed_ns, overlap_ns)[self._ids]
        bricks, cells, layers = (np.zeros(len(each), np.int64) for each in (self.bricks, self.cells, self.layers))
        np.add.at(bricks, self._brick_at, own_ns)
        around_ns = overlap_ns[self._around]
        bricks[-1] = closed_ns[self._step] - bricks.sum() + overlap_ns[self._step] + around_ns.sum()
        np.add.at(cells, self._cell_at, own_ns[self._is_inside])
        np.add.at(layers, self._layer_at, closed_ns[self._layer_ids])
        between = layers.copy()
        np.subtract.at(between, self._layer_of_cell, cells[: len(self._layer_of_cell)])
        in_layer = self._around_in >= 0
        np.add.at(between, self._around_in[in_layer], around_ns[in_layer])
        cells[len(self._layer_of_cell) :] = between
        return np.concatenate((bricks, cells, layers))


def place_times(
    places: PhasePlaces,
    totals: PhaseTotals,
    growths: Sequence[Growth],
    units: NDArray[np.float64],
    steps: NDArray[np.float64],
    along: NDArray[np.float64] | None,
) -> tuple[dict[Place, PlaceTimes], NDArray[np.float64] | None]:
    """Return the times of every brick and layer, and the pace of each block (the common factor of all times).

    Arguments have one entry per block. `steps` counts recorded steps. `along` is a quantity such as cached positions
    (see `noise.figures`).
    """
    rows = np.array([places.row(growth) for growth in growths]) / 1e3
    names = places.names
    node_places = _NodePlaces.of(places, totals, growths)
    plain = CallTimes(growths, node_places.columns, node_places.size, steps)
    calls = _calls_of(names, plain.by_block, steps)
    pacers = np.array([tells_pace(place) for place in names])
    pace = _pace(rows[:, pacers], calls[:, pacers])
    times = _by_kind(places, rows, units, along, pace)
    of_calls = plain
    if along is not None:
        of_calls = CallTimes(growths, node_places.columns, node_places.size, steps, along, pace)
    p50, p99 = (of_calls.quantile(fraction) for fraction in (MEDIAN, P99))
    typical_us = node_places.typical_us(p50, plain.by_block)
    by_mean = {BETWEEN_BRICKS, *_nested(places, totals)}
    means = np.array([name[0] in by_mean for name in names])
    typical_us[:, means] = 0
    typical = _by_kind(places, typical_us, calls, along, _pace(typical_us[:, pacers], calls[:, pacers]))
    mean = _by_kind(places, np.where(means, rows, 0), calls, along, pace)
    stretch = node_places.stretch(p50, plain.calls.astype(np.float64)).tolist()
    a_step = call_figures(calls, steps)
    of_layer = dict(zip(names, p50.figures, strict=False))
    found: dict[Place, PlaceTimes] = {}
    for at, (place, time) in enumerate(zip(names, times, strict=True)):
        is_between = place[0] == BETWEEN_BRICKS
        # The time between bricks has no calls. Use the median call of the layer or step around it.
        median = of_layer.get((None, place[1])) if is_between else p50.figures[at]
        call = replace(mean[at], median_us=median_of(median)) if means[at] else stretched(typical[at], stretch[at])
        is_known = calls[:, at].sum() >= 2 * MIN_BEYOND and call.blocks >= MIN_BLOCKS - (along is not None)
        found[place] = PlaceTimes(
            replace(time, median_us=median_of(median)),
            call if is_known else None,
            None if is_between else p50.figures[at],
            None if is_between else p99.figures[at],
            a_step[at],
        )
    return found, pace


def _by_kind(
    places: PhasePlaces,
    amount: NDArray[np.float64],
    weight: NDArray[np.float64],
    along: NDArray[np.float64] | None,
    pace: NDArray[np.float64] | None,
) -> list[Figure]:
    """Return the figures of bricks, then of bricks in layers, then of layers.

    Each kind is computed by itself, because only figures of one kind are about equally noisy.
    """
    ends = np.cumsum([len(places.bricks), len(places.cells)])
    weights = np.split(weight, ends, axis=1) if weight.ndim == 2 else [weight] * 3
    parts = zip(np.split(amount, ends, axis=1), weights, strict=True)
    return [one for part, its_weight in parts for one in figures(part, its_weight, along, pace)]


@dataclass(frozen=True, slots=True)
class _NodePlaces:
    """Maps each node to its places (bricks and layers), one per column of `columns`.

    The columns are: the brick or layer, the brick in a layer, and the rest of the brick. The rest are its calls
    outside of layers, or in layers with too few calls for a median. Place `names + i` is the rest of brick i.
    `parts[i]` are the places that together contain all calls of brick i.
    """

    columns: list[Column]
    names: int
    parts: list[list[int]]

    @property
    def size(self) -> int:
        return self.names + len(self.parts)

    @staticmethod
    def of(places: PhasePlaces, totals: PhaseTotals, growths: Sequence[Growth]) -> _NodePlaces:
        size, names = len(totals.table) + 1, places.names
        counts = sum(_dense(growth, "count", size) for growth in growths)
        in_all, in_cell, rest = (np.full(size, -1) for _ in range(3))
        at_brick = {brick: at for at, brick in enumerate(places.bricks)}
        parts = [[len(names) + at] for at in range(len(places.bricks))]
        in_known = np.zeros(size, np.bool_)
        for at, (place, nodes) in enumerate(zip(names, places.nodes, strict=True)):
            if place[0] == BETWEEN_BRICKS:
                continue
            (in_cell if place[0] and place[1] else in_all)[nodes] = at
            if place[0] and place[1] and np.take(counts, nodes).sum() >= 2 * MIN_BEYOND:
                parts[at_brick[place[0]]].append(at)
                in_known[nodes] = True
        others = (in_all >= 0) & (in_all < len(places.bricks)) & ~in_known
        rest[others] = in_all[others] + len(names)
        return _NodePlaces([in_all, in_cell, rest], len(names), parts)

    def typical_us(self, p50: Quantile, calls: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return for each block and place the time of all calls if each took the typical time.

        `calls` is (blocks, places).
        """
        found = p50.typical_us[:, : self.names].copy()
        off_us = p50.typical_us - calls * p50.us
        total = calls.sum(axis=0)
        for at, parts in enumerate(self.parts[:-1]):  # Leave out the last one, which is the time between bricks.
            if total[parts].any():
                usual_us = np.average(p50.us[parts], weights=total[parts])
                found[:, at] = calls[:, at] * usual_us + off_us[:, parts].sum(axis=1)
        return found

    def stretch(self, p50: Quantile, calls: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return for each brick or layer the factor of its typical time's error. `calls` is its number of calls.

        It is about 1 if all calls are alike, as in most bricks. A layer has calls of several kinds if some of its
        bricks do not run in every step.
        """
        found = p50.stretch[: self.names].copy()
        own = p50.stretch.copy()
        own[own < _UNEVEN] = 1.0
        for at in itertools.chain.from_iterable(self.parts):
            if at < self.names:
                found[at] = own[at]
        for at, parts in enumerate(self.parts[:-1]):
            if calls[parts].any():
                found[at] = np.average(own[parts], weights=calls[parts])
        return found


def _calls_of(
    names: Sequence[Place], by_block: NDArray[np.float64], steps: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the calls of each place (brick or layer) in each block, as (blocks, places).

    The time between bricks gets the calls of its layer or step.
    """
    at_layer = {layer: at for at, (brick, layer) in enumerate(names) if brick is None}
    found = by_block[:, : len(names)].copy()
    for at, (brick, layer) in enumerate(names):
        if brick == BETWEEN_BRICKS:
            found[:, at] = by_block[:, at_layer[layer]] if layer else steps
    return found


def _pace(us: NDArray[np.float64], calls: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return the pace of each block: the time of a call divided by its usual time, as a mean over the columns.

    Only the middle half of the columns counts, because a pause affects few. None if too few columns have calls in
    every block.
    """
    is_called = (calls > 0).all(axis=0)
    rates = us[:, is_called] / calls[:, is_called]
    usual = np.median(rates, axis=0)
    is_known = usual > 0
    if np.count_nonzero(is_known) < MIN_SHARING:
        return None
    each = np.sort(rates[:, is_known] / usual[is_known], axis=1)
    quarter = each.shape[1] // 4
    found: NDArray[np.float64] = each[:, quarter : each.shape[1] - quarter].mean(axis=1)
    return found if found.min() > 0 else None


def _nested(places: PhasePlaces, totals: PhaseTotals) -> set[Brick]:
    """Return the bricks that contain other bricks. Their calls include the calls of the inner bricks."""
    found = set()
    for brick, nodes in zip(places.bricks, places.nodes, strict=False):
        whole_ns = totals.columns["closed_ns"][nodes].sum()
        if brick != BETWEEN_BRICKS and totals.closed_exclusive_ns[nodes].sum() < whole_ns:
            found.add(brick)
    return found


def median_of(figure: Figure | None) -> float | None:
    return None if figure is None else figure.mean


def _dense(growth: Growth, column: str, size: int) -> Column:
    found = np.zeros(size, np.int64)
    known = growth.node < size
    found[growth.node[known]] = growth.column(column)[known]
    return found


def _overlap_ns(growth: Growth, size: int) -> Column:
    found = np.zeros(size, np.int64)
    for (at, node), value in growth.rare.items():
        if at == _OVERLAP and node < size:
            found[node] = value
    return found
