"""The common part of all traces: their configuration, and named numbers in a summary."""

# No numpy here: code that only chooses traces should not load it.

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cbtop.protocol.messages import TraceNumber

HISTORY_FORWARDS = 32  # traced passes that are kept, and that a summary's rows cover
MAX_ANOMALIES = 16  # the latest ones, of each trace
MAX_ROWS = 48  # per summary; a model with more layers is shown at places spread over all of them

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """`layers` and `heads` choose what is traced; None is all. A weight below the threshold is never a top one."""

    top_k: int = 10
    layers: frozenset[int] | None = None
    heads: tuple[int, ...] | None = None
    weight_threshold: float = 0.01


@dataclass(frozen=True, slots=True)
class TracerConfig:
    """Which traces are on. `tracked_tokens` of the logit trace: None follows the most likely ones of each pass."""

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
        """Return a config with these traces on, by their names in `cbtop.profiler.traces.TRACES`."""
        return cls(
            trace_activations="activations" in names,
            trace_attention="attention" in names,
            trace_logits="logits" in names,
            trace_quant_error="quant" in names,
            trace_kv_cache="kv" in names,
        )


def number(row: str, name: str, value: float | None) -> TraceNumber:
    """Return a number for a summary: a value that is not finite is not known."""
    known = value is not None and math.isfinite(value)
    return TraceNumber(row, name, float(value) if known and value is not None else None)


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values, or None if there are none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def spread(items: Sequence[Item], most: int = MAX_ROWS) -> list[Item]:
    """Return at most `most` of `items`, evenly spread, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]
