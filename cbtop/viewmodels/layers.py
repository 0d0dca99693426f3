"""Compare the layers of a model by the time of each brick in each layer of a step.

A layer is compared with its peers: the layers with the same stack and bricks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.analysis.brick_stats import name_and_category
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.histograms import Column
from cbtop.profiler.analysis.layers import BETWEEN, MIN_PEERS, layer_of_nodes
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.protocol.vocabulary import BACKWARD, BrickCategory, NodeKind, is_training
from cbtop.viewmodels.on_demand import Lazy, LazyValue, with_parts

P50_OF_A_CALL = "p50 µs a call"  # title of the column with times per call; the other columns have µs per step
# A layer is odd (conspicuously slow) at this many times the median of its peers. Noise alone does not make it this
# slow.
ODD = 1.2
# How far the lower end of a confidence interval is from the median. The unit is the standard deviation of the number
# of calls below the median. One in 1,500 medians is then wrong. The interval is this wide because the slowest of many
# layers is judged.
Z = 3.0
MIN_STEPS = 20  # Fewer recorded steps than this have medians that vary too much.
MIN_LAYERS = 6  # The variation of fewer peers than this is unknown.
# The factor and the limit of the modified z-score: a layer is an outlier if 0.6745 (x - median) / MAD exceeds the
# limit. Source: Iglewicz and Hoaglin, "How to detect and handle outliers" (1993).
Z_OF_MAD, OUTLIER_Z = 0.6745, 3.5
# If a larger share of the layers would be odd, no layer counts as odd, because the model is then built that way.
ODD_PART = 0.1
# Each brick may take this many µs more in the first layer of a recorded step, because cbtop's own code is not in the
# cache yet.
FIRST_US = 15.0


@dataclass(frozen=True, slots=True)
class LayerBrick:
    """One brick in all layers that run it: a column of the table of layers."""

    name: str
    category: BrickCategory


@dataclass(frozen=True)
class LayerRow:
    """One layer in the mean step (derived). In a process without steps, one call of the layer."""

    id: int
    name: str  # The name of the layer, for example `Layer 3` or `Layer 3 (encoder)`.
    index: str  # the number in the layer's name as text, for example `3`
    stack: str
    us: float  # mean time of the layer, including the time between bricks
    p50_us: float | None  # median time of one call of the layer
    # Exclusive µs of each brick in this layer, in the order of LayersView.bricks. None: not in this layer.
    cells: tuple[float | None, ...]
    between_us: float  # the part of `us` outside of the layer's bricks
    calls: float  # mean calls of the layer per step; below 1 if only some steps run it
    # Median of `p50_us` over the peers (layers with the same stack and bricks). None with too few peers.
    median_us: float | None
    # What causes most of an odd layer's excess over its peers, as (brick or time between bricks, µs per step). Median
    # calls are compared, because rare delays do not change them. If they explain less than half of the excess, means
    # are compared. None for a layer that is not odd.
    excess: Lazy[tuple[str, float] | None] = Lazy(None)
    # Median call in µs of each brick in this layer, in the order of LayersView.bricks, as measured.
    p50_cells: Lazy[tuple[float | None, ...]] = Lazy(())
    low_us: float | None = None  # lower end of the confidence interval of `p50_us`; None if unknown

    @property
    def is_backward(self) -> bool:
        """Whether this is the backward pass of a layer."""
        return self.stack.endswith(BACKWARD.strip())

    @property
    def is_odd(self) -> bool:
        """Whether the layer is certainly slow: the lower end of its interval is at least ODD times the median of its
        peers.
        """
        us = self.p50_us if self.low_us is None else self.low_us
        return us is not None and bool(self.median_us) and us >= ODD * (self.median_us or 0.0)

    @property
    def to_median(self) -> float | None:
        """The layer's median call divided by the median of its peers. A single pause does not change it."""
        return self.p50_us / self.median_us if self.p50_us is not None and self.median_us else None


@dataclass(frozen=True, slots=True)
class BrickInLayers:
    """The median call of one brick in each layer, in the order of LayersView.rows."""

    # Median call in each layer (µs). None if unknown, or if the layer does not run the brick.
    p50_us: tuple[float | None, ...]
    odd: tuple[bool, ...]  # for each layer: whether its time is at least ODD times the median of its peers
    median_us: float | None  # median of the brick's time over all layers
    slowest: int  # index of the layer with the longest time of the brick


@dataclass(frozen=True, slots=True)
class BrickInLayer:
    """One brick in one layer of the mean step. All figures except `p50_us` are derived."""

    brick: LayerBrick
    us: float  # exclusive time
    p50_us: float | None  # median time of one call of the brick in this layer
    usual_p50_us: float | None  # median of `p50_us` over this layer's peers; None with too few peers
    percent: float | None  # the brick's share of the layer's time

    @property
    def to_usual(self) -> float | None:
        """`p50_us` divided by `usual_p50_us`, the median over the layer's peers."""
        return self.p50_us / self.usual_p50_us if self.p50_us is not None and self.usual_p50_us else None


@dataclass(frozen=True, slots=True)
class LayersView:
    """The layers of one phase, in execution order, with their bricks."""

    unit: str  # "step", or "call" in a process without steps; the unit of times in rows
    bricks: tuple[LayerBrick, ...]  # the columns: all bricks in layers, in execution order
    rows: tuple[LayerRow, ...]
    # Returns the median call (µs) of the brick with a given index, in each of `rows`. None: use `p50_cells`.
    p50_of: Callable[[int], Sequence[float | None]] | None = field(default=None, repr=False, compare=False)
    steps: int | None = None  # number of recorded steps; None if times are per call
    is_training: bool = False  # whether the steps are training steps

    @staticmethod
    def median(us: Sequence[float | None]) -> float | None:
        """Return the median of the known values, or None without any."""
        known = [value for value in us if value is not None]
        return median(known) if known else None

    def stands_out(self, row: LayerRow) -> int:
        """Return how many peers of `row` are odd (conspicuously slow), with `row` itself. 0 if `row` is not odd.

        A peer counts if its excess over the median is at least half the excess of `row`. If too many count, the
        result is 0, because the model is then built that way.

        The first layer of a stack runs with cold caches, so other layers are not compared with it. cbtop's code is
        cold there, too, so this layer must exceed the limit by FIRST_US for each brick. In a training step it is
        never odd, because it follows the optimizer, which has used all weights.
        """
        times_us = [other.p50_us for other in self.like(row) if other.p50_us is not None]
        too_few = self.steps is not None and self.steps < MIN_STEPS
        if too_few or not row.is_odd or not row.median_us or len(times_us) < MIN_LAYERS:
            return 0
        usual_us = row.median_us
        deviation_us = median(abs(us - usual_us) for us in times_us)
        far_us = max((row.p50_us or 0.0) - usual_us, 0.0) / 2
        least_us = usual_us + max((ODD - 1) * usual_us, far_us, OUTLIER_Z * deviation_us / Z_OF_MAD)
        first = self.like(row)[0]
        if self.is_training and first is row:
            return 0
        own_us = FIRST_US * sum(us is not None for us in row.cells) if first is row else 0.0
        if (row.p50_us or 0.0) - own_us < least_us:
            return 0
        odd = [other for other in self.like(row) if (other.p50_us or 0.0) >= least_us]
        many = len(odd) - (first in odd and first is not row)
        return many if many <= max(1, ODD_PART * len(times_us)) else 0

    @property
    def slowest(self) -> LayerRow | None:
        """The slowest layer relative to its peers. None if no layer has enough peers.

        In a training step, the first layer of each stack does not count, as in `stands_out`.
        """
        compared = [row for row in self.rows if row.to_median is not None]
        if self.is_training:
            compared = [row for row in compared if self.like(row)[0] is not row]
        return max(compared, key=lambda row: row.to_median or 0.0, default=None)

    def of_brick(self, brick: LayerBrick) -> BrickInLayers | None:
        """Return the median call of `brick` in each layer, or None if all are unknown."""
        if brick not in self.bricks:
            return None
        at = self.bricks.index(brick)
        p50_us = tuple(self.p50_of(at) if self.p50_of else [row.p50_cells[at] for row in self.rows if row.p50_cells])
        if len(p50_us) < len(self.rows):
            return None
        median_us = self.median(p50_us)
        if median_us is None:
            return None
        kinds = [_kind(row) for row in self.rows]
        like: dict[object, list[float]] = {}
        for kind, us in zip(kinds, p50_us, strict=True):
            if us is not None:
                like.setdefault(kind, []).append(us)
        usual = {kind: median(them) for kind, them in like.items() if len(them) >= MIN_PEERS}
        odd = tuple(
            us is not None and us >= ODD * usual.get(kind, float("inf"))
            for kind, us in zip(kinds, p50_us, strict=True)
        )
        return BrickInLayers(p50_us, odd, median_us, max(range(len(p50_us)), key=lambda layer: p50_us[layer] or 0.0))

    def inside(self, row: LayerRow) -> list[BrickInLayer]:
        """Return the bricks in the layer `row`, longest first."""
        like, p50_cells, found = self.like(row), row.p50_cells, []
        of_like = [cells for other in like if (cells := other.p50_cells)]
        for at, brick in enumerate(self.bricks):
            us = row.cells[at]
            if us is None:
                continue
            usual_us = self.median([cells[at] for cells in of_like])
            found.append(
                BrickInLayer(
                    brick,
                    us,
                    p50_cells[at] if p50_cells else None,
                    usual_us if len(like) >= MIN_PEERS else None,
                    100 * us / row.us if row.us else None,
                )
            )
        return sorted(found, key=lambda one: -one.us)

    def like(self, row: LayerRow) -> list[LayerRow]:
        """Return the peers of `row`, with itself: all layers with the same stack and bricks."""
        kind = _kind(row)
        return [other for other in self.rows if _kind(other) == kind]


def layers_view(totals: PhaseTotals) -> LayersView | None:
    """Return the outermost layers of a phase. None without layers, or before a step has ended."""
    table, inside = totals.table, totals.inside
    steps = int(totals.columns["count"][totals.step.id]) if totals.step else None
    ids = inside.ids[(table.column("kind_of")[inside.ids] == NodeKind.BRICK) & ~totals.adopted[inside.ids]]
    ids = ids[totals.columns["count"][ids] > 0]
    places = table.made_of("layers", totals.step.id if totals.step else None, ids, lambda: _Places(totals, ids))
    layers, ids, place, runs_in = places.layers, places.ids, places.place, places.runs_in
    if not layers or steps == 0:
        return None
    time_ns = totals.columns["closed_ns" if totals.step else "total_ns"]
    own_ns = totals.closed_exclusive_ns if totals.step else totals.exclusive_ns
    layer_ids = places.layer_ids
    times = np.maximum(totals.columns["count"][layer_ids], 1) if steps is None else steps
    layer_us = time_ns[layer_ids] / times / 1e3
    calls = totals.columns["count"][layer_ids] / times
    per_ns = np.reshape(np.broadcast_to(times, len(layers)) * 1e3, (-1, 1))
    cells_us = _sums(own_ns[ids], place, runs_in.shape) / per_ns
    p50_us = [None if ns != ns else ns / 1e3 for ns in totals.stats.medians_ns(layer_ids).tolist()]
    lowest = max(0.01, 0.5 - Z / (2 * math.sqrt(int(np.max(times))))) if layers else 0.5
    low_us = [None if ns != ns else ns / 1e3 for ns in totals.stats.medians_ns(layer_ids, lowest).tolist()]
    medians = _medians(places.kinds, p50_us)
    bricks = places.bricks
    cells = _cells(cells_us, runs_in)
    between_us = (layer_us - cells_us.sum(axis=1)).tolist()
    medians_ns = LazyValue(partial(totals.stats.medians_ns, ids))
    p50_cells = LazyValue(lambda: _p50_cells(totals, places, medians_ns.value()))
    excess = LazyValue(lambda: _excesses(found, usual_us()))

    def usual_us() -> dict[int, NDArray[np.float64]]:
        us = _sums(_usual(totals, own_ns, ids, medians_ns.value()), place, runs_in.shape) / per_ns
        return {layer.id: row for layer, row in zip(layers, us, strict=True)}

    rows = tuple(
        LayerRow(
            id=layer.id,
            name=places.names[at],
            index=layer.name,
            stack=layer.label,
            us=float(layer_us[at]),
            p50_us=p50_us[at],
            cells=cells[at],
            between_us=between_us[at],
            calls=float(calls[at]),
            median_us=medians[at],
            p50_cells=LazyValue(partial(_of_layer, p50_cells, at)),
            low_us=low_us[at],
        )
        for at, layer in enumerate(layers)
        if totals.columns["count"][layer.id]
    )
    p50_of = partial(_p50_of, totals, places, p50_cells)
    trains = totals.step is not None and is_training(totals.step.name)
    found = LayersView("step" if totals.step else "call", bricks, rows, p50_of, steps, trains)
    # The lazy excess refers to `found`, so setting it in the rows of `found` would form a reference cycle. Set it in
    # copies.
    odd = tuple(
        with_parts(row, excess=LazyValue(partial(_of_id, excess, row.id))) if row.is_odd else row for row in rows
    )
    return replace(found, rows=odd) if rows else None


class _Places:
    """The outermost layers of a phase as a table.

    `place` has the table row and column of each brick node in `ids` that ran.
    """

    def __init__(self, totals: PhaseTotals, ids: Column) -> None:
        table, layer_of = totals.table, layer_of_nodes(totals)
        self.layers = [node for node in totals.inside.nodes if layer_of[node.id] == node.id]
        self.layer_ids = np.array([layer.id for layer in self.layers], np.int64)
        self.names = [display_name(layer) for layer in self.layers]
        self.ids = ids[layer_of[ids] > 0]
        firsts, column = np.unique(table.column("first_of")[self.ids], return_inverse=True)
        self.bricks = tuple(LayerBrick(*name_and_category(table[first])) for first in firsts.tolist())
        row_of = np.zeros(len(layer_of), np.int64)
        row_of[self.layer_ids] = np.arange(len(self.layers))
        self.place = row_of[layer_of[self.ids]], column
        self.runs_in = np.zeros((len(self.layers), len(firsts)), bool)
        self.runs_in[self.place] = True
        self.kinds = [(layer.label, self.runs_in[at].tobytes()) for at, layer in enumerate(self.layers)]
        self.cells = self.place[0] * len(firsts) + column
        # Indices of table cells with several nodes: the brick runs more than once in the layer.
        self.several = np.flatnonzero(np.bincount(self.cells, minlength=self.runs_in.size) > 1)
        self.of_several = [self.ids[self.cells == one].tolist() for one in self.several]


def _p50_of(
    totals: PhaseTotals, places: _Places, cells: LazyValue[list[tuple[float | None, ...]]], brick: int
) -> list[float | None]:
    """Return the median calls of brick number `brick`, for `LayersView.p50_of`.

    If `cells` exists, its values are returned, so that all values are of the same time. Otherwise only this brick is
    computed.
    """
    ran = totals.columns["count"][places.layer_ids].tolist()
    if cells.is_made or len(places.several):
        us = [row[brick] for row in cells.value()]
    else:
        ns = np.full(len(places.layers), np.nan)
        here = places.place[1] == brick
        ns[places.place[0][here]] = totals.stats.medians_ns(places.ids[here])
        us = [None if one != one else one / 1e3 for one in ns.tolist()]
    return [one for one, calls in zip(us, ran, strict=True) if calls]


def _of_id(excess: LazyValue[dict[int, tuple[str, float]]], layer: int) -> tuple[str, float] | None:
    return excess.value().get(layer)


def _of_layer(cells: LazyValue[list[tuple[float | None, ...]]], at: int) -> tuple[float | None, ...]:
    return cells.value()[at]


def _excesses(layers: LayersView, usual_by_layer: Mapping[int, NDArray[np.float64]]) -> dict[int, tuple[str, float]]:
    """Return the main cause of each odd layer (see LayerRow.excess), by layer id.

    `usual_by_layer` has the usual times of each layer's bricks.
    """
    names = [*(brick.name for brick in layers.bricks), BETWEEN]
    alike: dict[object, list[LayerRow]] = {}
    for row in layers.rows:
        alike.setdefault(_kind(row), []).append(row)
    found = {}
    for rows in alike.values():
        if not any(row.is_odd for row in rows):
            continue
        calls = np.array([[row.calls] for row in rows])
        us = np.array([usual_by_layer[row.id] for row in rows]) / calls
        whole_us = np.array([row.p50_us or row.us / row.calls for row in rows])
        mean_us = np.array([(*(us or 0.0 for us in row.cells), row.between_us) for row in rows]) / calls
        # The sum of medians is not the median of the sum. The time between bricks may come out too long, so limit it
        # to its mean.
        between_us = np.minimum(whole_us - us.sum(axis=1), mean_us[:, -1])
        over_us, over_mean_us = (_over(each) * calls for each in (np.column_stack((us, between_us)), mean_us))
        all_over_us = _over(whole_us[:, np.newaxis]) * calls
        for at, row in enumerate(rows):
            if row.is_odd:
                over = over_us[at]
                if (
                    np.maximum(over, 0.0).sum() < all_over_us[at] / 2
                ):  # A different brick was slow in each call. Compare means, because they add up.
                    over = np.minimum(over_mean_us[at], all_over_us[at])
                most = int(over.argmax())
                found[row.id] = names[most], float(over[most])
    return found


def _over(us: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the difference between each value and the median of its column."""
    # NumPy's median would import masked arrays, which takes as long as three frames.
    over: NDArray[np.float64] = us - [median(column) for column in us.T.tolist()]
    return over


def _sums(
    ns: Column | NDArray[np.float64], place: tuple[Column, Column], shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Return for each cell (layer and brick) the summed times of its nodes."""
    found = np.zeros(shape)
    np.add.at(found, place, ns)
    return found


def _p50_cells(
    totals: PhaseTotals, places: _Places, medians_ns: NDArray[np.float64]
) -> list[tuple[float | None, ...]]:
    """Return for each layer the median call of each brick, as measured."""
    layers, bricks = places.runs_in.shape
    ns = np.full(layers * bricks, np.nan)
    ns[places.cells] = medians_ns
    for cell, calls in zip(places.several, totals.stats.calls_of(places.of_several), strict=True):
        ns[cell] = np.nan if calls is None or calls.p50_ns is None else calls.p50_ns
    us = [None if one != one else one / 1e3 for one in ns.tolist()]
    return [tuple(us[begin : begin + bricks]) for begin in range(0, len(us), bricks)] if us else [()] * layers


def _usual(totals: PhaseTotals, own_ns: Column, ids: Column, p50_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each brick's exclusive time if every call took the median. If it is unknown, the measured time."""
    mean_ns: NDArray[np.float64] = totals.columns["total_ns"][ids] / totals.columns["count"][ids]
    known = ~np.isnan(p50_ns) & (mean_ns > 0)
    ratio = np.divide(p50_ns, mean_ns, out=np.ones(len(ids)), where=known)
    return np.asarray(own_ns[ids] * ratio, np.float64)


def _cells(us: NDArray[np.float64], runs: NDArray[np.bool_]) -> list[tuple[float | None, ...]]:
    """Return the cells of the table, one row per layer. None: the layer does not run the brick."""
    if runs.all():
        return [tuple(row) for row in us.tolist()]
    rows = zip(us.tolist(), runs.tolist(), strict=True)
    return [tuple([one if there else None for one, there in zip(*row, strict=True)]) for row in rows]


def _medians(kinds: Sequence[Hashable], p50_us: Sequence[float | None]) -> list[float | None]:
    """Return for each layer the median over its peers, with itself."""
    like: dict[Hashable, list[float]] = {}
    for kind, us in zip(kinds, p50_us, strict=True):
        if us is not None:
            like.setdefault(kind, []).append(us)
    medians = {kind: median(times) for kind, times in like.items() if len(times) >= MIN_PEERS}
    return [medians.get(kind) for kind in kinds]


def _kind(row: LayerRow) -> tuple[str, tuple[bool, ...]]:
    """Return what the peers of a layer have in common: their stack, and which bricks they run."""
    return row.stack, tuple([us is not None for us in row.cells])
