"""Every brick, layer, and brick in a layer of a phase, with their derived times in blocks of steps."""

# Rules
# - Other programs delay a few calls of a place. So a place is judged by its typical time, as if every call took as
#   long as the median call of its layer. Bricks that contain other bricks, and the time between bricks, are judged by
#   the mean.

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from cbtop.comparison.noise import Change, Figure, change, figures
from cbtop.comparison.quantiles import MEDIAN, P99, CallTimes
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
Place = tuple[Brick | None, str | None]  # (brick, None), (None, layer), (brick, layer), or WHOLE_STEP
WHOLE_STEP: Place = (None, None)
_OVERLAP = SPARSE_COLUMNS.index("overlap_ns")
MIN_SHARING = 8  # minimum number of bricks in layers; with fewer, one slow brick would move the shared ratio


@dataclass(frozen=True, slots=True)
class PlaceTimes:
    """The times of one place: µs per unit, typical µs per unit, µs per call (p50 and p99), and calls per step."""

    time: Figure
    typical: Figure | None = None
    p50: Figure | None = None
    p99: Figure | None = None
    calls: float = 0.0


def judged_change(before: PlaceTimes, now: PlaceTimes, compared: int, shared: float | None) -> Change:
    """Return the change of a place's typical time, or of its mean if the typical time is unknown.

    `compared` is the number of compared places. Together, these places take `shared` times as long as before.
    """
    if before.typical and now.typical:
        return change(before.typical, now.typical, compared, shared)
    return change(before.time, now.time, compared, shared)


def shared_ratio(befores: Mapping[Place, PlaceTimes], afters: Mapping[Place, PlaceTimes]) -> float | None:
    """Return the factor by which all bricks together became slower, which is the machine's effect.

    The factor is the median over places, weighted by time. With fewer than MIN_SHARING places, return None, because
    one slow brick would look like a slow machine.
    """
    ratios = sorted(
        (one.typical.mean / was.typical.mean, was.typical.mean)
        for place, one in afters.items()
        if (was := befores.get(place)) and _tells_pace(place) and one.typical and was.typical and was.typical.mean > 0
    )
    if len(ratios) < MIN_SHARING:
        return None
    # Without weights, the median would mislead: cache pollution slows many places that take little of the time.
    reached_us = list(accumulate(us for _, us in ratios))
    return ratios[bisect_left(reached_us, reached_us[-1] / 2)][0]


def _tells_pace(place: Place) -> bool:
    """Whether a place is a brick in one layer. Each call of a step is in at most one such place."""
    return place[0] is not None and place[0] != BETWEEN_BRICKS and place[1] is not None


class PhasePlaces:
    """Every brick, brick in a layer, and layer of a phase, with the nodes that make up their times."""

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
        self._around = ids[~totals.adopted[ids] & ~totals.held[ids]]  # layers and other nodes that may contain bricks
        self._around_in = row_of[layer_of[self._around]]
        at = (divmod(one, len(self.bricks)) for one in pairs.tolist())
        inside = [(self.bricks[brick], self.layers[layer]) for layer, brick in at]
        self.cells = [*inside, *((BETWEEN_BRICKS, name) for name in self.layers)]

    @property
    def nodes(self) -> list[Column]:
        """The nodes of the calls of each of `bricks`, `cells` and `layers`.

        The time between bricks has no calls. The layer or step around them is used instead.
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
        """Return the time in ns of each of `bricks`, `cells` and `layers` in `growth`."""
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
    """Return the times of every place, and the pace of all places in each block.

    Each argument has one entry per block. `steps` are recorded steps. `along` is a quantity such as the cached
    positions (see `noise.figures`).
    """
    rows = np.array([places.row(growth) for growth in growths]) / 1e3
    names: list[Place] = [
        *((brick, None) for brick in places.bricks),
        *places.cells,
        *((None, layer) for layer in places.layers),
    ]
    # Each kind of place is estimated separately, because places of a kind are about equally noisy.
    kinds = np.cumsum([len(places.bricks), len(places.cells)])
    pacers = np.array([_tells_pace(place) for place in names])
    pace = _pace(rows[:, pacers], units)
    times = [one for part in np.split(rows, kinds, axis=1) for one in figures(part, units, along, pace)]
    # The place of each node as a brick or layer, as a brick in a layer, and as a brick outside layers.
    size = len(totals.table) + 1
    in_all, in_cell, outside = (np.full(size, -1) for _ in range(3))
    for at, (place, nodes) in enumerate(zip(names, places.nodes, strict=True)):
        if place[0] != BETWEEN_BRICKS:
            (in_cell if place[0] and place[1] else in_all)[nodes] = at
    alone = (in_all >= 0) & (in_all < len(places.bricks)) & (in_cell < 0)
    outside[alone] = in_all[alone] + len(names)
    calls = CallTimes(growths, [in_all, in_cell, outside], len(names) + len(places.bricks), steps, along, pace)
    p50, p99 = (calls.quantile(fraction) for fraction in (MEDIAN, P99))
    typical_us = p50.typical_us[:, : len(names)]
    unknown = {at for at, one in enumerate(p50.figures) if one is None and calls.calls[at]}
    for at, brick in enumerate(places.bricks):  # a brick is the sum over its layers and the part outside
        own = [place for place, name in enumerate(names) if name[0] == brick and name[1]] + [at + len(names)]
        typical_us[:, at] = p50.typical_us[:, own].sum(axis=1)
        if unknown.intersection(own):
            unknown.add(at)
    beside = _pace(typical_us[:, pacers], units)
    typical = [one for part in np.split(typical_us, kinds, axis=1) for one in figures(part, units, along, beside)]
    nested = _nested(places, totals)
    each = (calls.calls / steps.sum()).tolist()
    of_layer = dict(zip(names, p50.figures, strict=False))
    found: dict[Place, PlaceTimes] = {}
    for at, (place, time) in enumerate(zip(names, times, strict=True)):
        is_between = place[0] == BETWEEN_BRICKS
        is_typical = not is_between and place[0] not in nested and at not in unknown and calls.calls[at]
        # The time between bricks has no calls, so take the median of the layer or step around it.
        median = of_layer.get((None, place[1])) if is_between else p50.figures[at]
        found[place] = PlaceTimes(
            replace(time, median_us=median_of(median)),
            typical[at] if is_typical else None,
            None if is_between else p50.figures[at],
            None if is_between else p99.figures[at],
            each[at],
        )
    return found, pace


def _pace(rows: NDArray[np.float64], units: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return the pace of each block (row): how many times as long as usual a unit took, over all columns.

    The pace is the mean of the middle half of the columns, because a pause hits few columns. None if there are too
    few columns.
    """
    rates = rows / units[:, None]
    usual = np.median(rates, axis=0)
    is_known = np.isfinite(usual) & (usual > 0)
    if np.count_nonzero(is_known) < MIN_SHARING:
        return None
    each = np.sort(rates[:, is_known] / usual[is_known], axis=1)
    quarter = each.shape[1] // 4
    found: NDArray[np.float64] = each[:, quarter : each.shape[1] - quarter].mean(axis=1)
    return found if found.min() > 0 else None


def _nested(places: PhasePlaces, totals: PhaseTotals) -> set[Brick]:
    """Return the bricks that contain other bricks. Calls of such a brick are longer than the brick's own time."""
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
