"""The common parts of all traces: their configuration, and the named numbers of a summary."""

# NumPy is not imported here, because code that only chooses traces should not load it.

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cbtop.protocol.messages import TraceNumber

HISTORY_FORWARDS = 32  # number of newest traced passes that are stored and summarised
MAX_ANOMALIES = 16  # number of newest anomalies that are stored for each trace
MAX_ROWS = 48  # at most this many rows of a summary; a model with more layers shows some at even distances

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The layers and heads to trace. None means all.

    A weight below `weight_threshold` is never among the top weights.
    """

    top_k: int = 10
    layers: frozenset[int] | None = None
    heads: tuple[int, ...] | None = None
    weight_threshold: float = 0.01


@dataclass(frozen=True, slots=True)
class TracerConfig:
    """The traces that are on.

    Without `tracked_tokens`, the logit trace follows the most likely tokens of each pass.
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
    """Return a number for a summary. A value that is not finite becomes None."""
    known = value is not None and math.isfinite(value)
    return TraceNumber(row, name, float(value) if known and value is not None else None)


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values, or None without any."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def spread(items: Sequence[Item], most: int = MAX_ROWS) -> list[Item]:
    """Return at most `most` of `items`: the first, the last, and evenly spread ones between them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]
