"""What all traces have in common: their configuration, and the named numbers of a summary."""

# Do not import NumPy here. Code that only chooses traces should not load it.

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cbtop.protocol.messages import TraceNumber

HISTORY_FORWARDS = 32  # number of latest traced passes that are kept; a summary covers these passes
MAX_ANOMALIES = 16  # most anomalies that are kept for each trace; the latest anomalies are kept
MAX_ROWS = 48  # most rows of a summary; if a model has more layers, the rows show some of them at even distances

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The layers and heads whose attention is traced. None means all layers or all heads.

    A weight below `weight_threshold` is never among the top weights.
    """

    top_k: int = 10
    layers: frozenset[int] | None = None
    heads: tuple[int, ...] | None = None
    weight_threshold: float = 0.01


@dataclass(frozen=True, slots=True)
class TracerConfig:
    """The traces that are on.

    If `tracked_tokens` is not given, the logit trace follows the most likely tokens of each pass.
    """

    trace_activations: bool = False
    trace_attention: bool = False
    trace_logits: bool = False
    trace_quant_error: bool = False
    trace_kv_cache: bool = False
    attention_config: AttentionConfig = AttentionConfig()
    tracked_tokens: tuple[int, ...] | None = None

    @classmethod
    def full(cls) -> TracerConfig:
        """Return a config with all traces on."""
        return cls(True, True, True, True, True)

    @classmethod
    def lightweight(cls) -> TracerConfig:
        """Return a config with the cheapest traces: activations and the KV cache."""
        return cls(trace_activations=True, trace_kv_cache=True)

    @classmethod
    def of(cls, names: Collection[str]) -> TracerConfig:
        """Return a config with the named traces on. `names` are keys of `cbtop.profiler.traces.TRACES`."""
        return cls(
            trace_activations="activations" in names,
            trace_attention="attention" in names,
            trace_logits="logits" in names,
            trace_quant_error="quant" in names,
            trace_kv_cache="kv" in names,
        )


def number(row: str, name: str, value: float | None) -> TraceNumber:
    """Return a number that fits into a summary. A value that is not finite becomes None."""
    known = value is not None and math.isfinite(value)
    return TraceNumber(row, name, float(value) if known and value is not None else None)


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values, or None if all are None."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def spread(items: Sequence[Item], most: int = MAX_ROWS) -> list[Item]:
    """Return at most `most` of `items`.

    Returns the first item, the last item, and evenly spread items between these two.
    """
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]
