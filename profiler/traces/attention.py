"""Trace MLT-02: the attention of one query in each head, as top positions, entropy, sinks, and the sum of the
weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.traces.base import AttentionConfig, number, spread
from cbtop.protocol.messages import TraceNumber

ABOUT = "weights of the last query, over all its heads; sink, uniform and recent are shares of the heads"
# Rounding gives a float32 softmax over 100,000 positions an error below 1e-5. A larger error has another cause.
SUM_TOLERANCE = 1e-4
SINK_WEIGHT = 0.5  # a head has a sink if the first position weighs more than all others together
# A head with more entropy than this fraction of the entropy of equal weights attends to everything alike.
UNIFORM_ENTROPY_SHARE = 0.95
RECENCY_WINDOW = 4
RECENCY_MASS = 0.5
NO_POSITION = -1


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeightTrace:
    """All traced heads of a layer for the query at `query_pos`. Each array has one entry or row per head.

    `top_positions` (int64) and `top_weights` (float64) are (heads, top_k), largest weight first. Entries below the
    threshold are NO_POSITION and 0. `tail_mass` is the weight outside of the top entries. `entropy` is in nats.
    """

    layer: int
    query_pos: int
    heads: tuple[int, ...]
    top_positions: NDArray[np.int64]
    top_weights: NDArray[np.float64]
    tail_mass: NDArray[np.float64]
    entropy: NDArray[np.float64]
    total: NDArray[np.float64]  # the sum of all weights of a head, which should be 1
    is_attention_sink: NDArray[np.bool_]
    is_uniform: NDArray[np.bool_]
    has_recency_bias: NDArray[np.bool_]


def attention_weights(layer: int, weights: NDArray[Any], config: AttentionConfig) -> AttentionWeightTrace:
    """Measure the attention weights of the last position's query. `weights` is (heads, positions)."""
    heads = tuple(range(len(weights))) if config.heads is None else config.heads
    wide = weights[list(heads)].astype(np.float64)
    positions = wide.shape[1]
    kept = min(config.top_k, positions)
    # The lower of two positions with equal weights comes first.
    top = np.argsort(-wide, axis=1, kind="stable")[:, :kept]
    top_weights = np.take_along_axis(wide, top, axis=1)
    below = top_weights < config.weight_threshold
    total = wide.sum(axis=1)
    tail_mass = total - np.where(below, 0.0, top_weights).sum(axis=1)
    logs = np.log(wide, out=np.zeros_like(wide), where=wide > 0)
    entropy = -(wide * logs).sum(axis=1)
    recent = wide[:, -RECENCY_WINDOW:].sum(axis=1)
    return AttentionWeightTrace(
        layer=layer,
        query_pos=positions - 1,
        heads=heads,
        top_positions=np.where(below, NO_POSITION, top),
        top_weights=np.where(below, 0.0, top_weights),
        tail_mass=np.maximum(tail_mass, 0.0),
        entropy=entropy,
        total=total,
        is_attention_sink=(top[:, 0] == 0) & (top_weights[:, 0] > SINK_WEIGHT) & (positions > 1),
        is_uniform=(entropy > UNIFORM_ENTROPY_SHARE * math.log(positions)) & (positions > 1),
        # In a sequence not much longer than the window, all positions are recent.
        has_recency_bias=(recent > RECENCY_MASS) & (positions > 2 * RECENCY_WINDOW),
    )


def anomalies(trace: AttentionWeightTrace) -> Iterator[str]:
    """Yield a sentence for each head with weights that do not sum to 1."""
    # NaN is an anomaly, too. Comparisons with NaN are false, so the condition is negated with `~`.
    for place in np.flatnonzero(~(np.abs(trace.total - 1.0) <= SUM_TOLERANCE)):
        yield (
            f"layer {trace.layer} head {trace.heads[place]}: weights of position {trace.query_pos} sum to "
            f"{trace.total[place]:.6g}, not to 1"
        )


def numbers(passes: Sequence[Sequence[AttentionWeightTrace]]) -> Iterator[TraceNumber]:
    """Yield one row per layer: means over heads and passes, and the weight sum farthest from 1."""
    layers = sorted({trace.layer for one in passes for trace in one})
    for layer in spread(layers):
        traces = [trace for one in passes for trace in one if trace.layer == layer]
        row = f"layer {layer}"
        yield number(row, "entropy", _mean([trace.entropy for trace in traces]))
        yield number(row, "top weight", _mean([trace.top_weights[:, 0] for trace in traces]))
        yield number(row, "tail mass", _mean([trace.tail_mass for trace in traces]))
        yield number(row, "sink", _mean([trace.is_attention_sink for trace in traces]))
        yield number(row, "uniform", _mean([trace.is_uniform for trace in traces]))
        yield number(row, "recent", _mean([trace.has_recency_bias for trace in traces]))
        yield number(row, "|sum-1|", max(float(np.abs(trace.total - 1.0).max()) for trace in traces))


def _mean(columns: Sequence[NDArray[Any]]) -> float:
    return float(np.concatenate(columns).astype(np.float64).mean())
