"""Trace MLT-01: the input, the contributions and the output of each layer, and whether values explode or vanish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cbtop.profiler.traces.base import mean, number, spread
from cbtop.profiler.traces.moments import TensorStats
from cbtop.protocol.messages import TraceNumber

ABOUT = "statistics of each layer's output, and the share of the residual stream in it"
EXPLOSION_MAGNITUDE = 1e6
MAX_STD = 1e4
VANISHING_STD = 1e-6
MAX_RESIDUAL_RATIO = 0.99


@dataclass(frozen=True, slots=True)
class LayerActivationTrace:
    """The activations of a layer in one forward pass.

    `post_norm` is the input of attention. `post_attn` and `post_ffn` are what attention and the FFN add to the
    residual stream.
    """

    layer: int
    input: TensorStats
    post_norm: TensorStats
    post_attn: TensorStats
    post_ffn: TensorStats
    output: TensorStats

    @property
    def residual_ratio(self) -> float | None:
        """The fraction of the residual stream that this layer leaves unchanged: |input| / (|input| + |attention| +
        |ffn|), in L2 norms.
        """
        norms = [stats.l2_norm for stats in (self.input, self.post_attn, self.post_ffn)]
        total = sum(norm for norm in norms if norm is not None)
        return norms[0] / total if norms[0] is not None and total > 0 else None

    @property
    def parts(self) -> tuple[tuple[str, TensorStats], ...]:
        """The names and statistics of the five tensors, in the order of computation."""
        return (
            ("input", self.input),
            ("post_norm", self.post_norm),
            ("post_attn", self.post_attn),
            ("post_ffn", self.post_ffn),
            ("output", self.output),
        )


def anomalies(trace: LayerActivationTrace) -> Iterator[str]:
    """Yield a sentence for each problem of a layer."""
    for name, stats in trace.parts:
        where = f"layer {trace.layer} {name}"
        if stats.nan_count:
            yield f"{where}: {stats.nan_count} NaN"
        if stats.inf_count:
            yield f"{where}: {stats.inf_count} infinite"
        if stats.largest > EXPLOSION_MAGNITUDE:
            yield f"{where}: magnitude {stats.largest:.3g} exceeds {EXPLOSION_MAGNITUDE:g} (explosion)"
        if stats.std is not None and stats.std > MAX_STD:
            yield f"{where}: std {stats.std:.3g} exceeds {MAX_STD:g}"
        if stats.std is not None and stats.std < VANISHING_STD:
            yield f"{where}: std {stats.std:.3g} is below {VANISHING_STD:g} (vanishing)"
    ratio = trace.residual_ratio
    if ratio is not None and ratio > MAX_RESIDUAL_RATIO:
        yield f"layer {trace.layer}: residual ratio {ratio:.4f} exceeds {MAX_RESIDUAL_RATIO:g} (it adds nothing)"


def numbers(passes: Sequence[Sequence[LayerActivationTrace]]) -> Iterator[TraceNumber]:
    """Yield one row per layer over all `passes`: the lowest min, the highest max, and means of the other values."""
    layers = sorted({trace.layer for one in passes for trace in one})
    for layer in spread(layers):
        traces = [trace for one in passes for trace in one if trace.layer == layer]
        outputs = [trace.output for trace in traces]
        row = f"layer {layer}"
        yield number(row, "min", min((s.min for s in outputs if s.min is not None), default=None))
        yield number(row, "max", max((s.max for s in outputs if s.max is not None), default=None))
        yield number(row, "mean", mean([stats.mean for stats in outputs]))
        yield number(row, "std", mean([stats.std for stats in outputs]))
        yield number(row, "l2", mean([stats.l2_norm for stats in outputs]))
        yield number(row, "attn l2", mean([trace.post_attn.l2_norm for trace in traces]))
        yield number(row, "ffn l2", mean([trace.post_ffn.l2_norm for trace in traces]))
        yield number(row, "residual ratio", mean([trace.residual_ratio for trace in traces]))
        yield number(row, "nan+inf", sum(stats.nan_count + stats.inf_count for stats in outputs))
