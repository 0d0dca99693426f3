"""Trace MLT-04: the error that quantisation causes in a brick's output, compared with exact arithmetic."""

# A quantised model file has no float weights, so the error of quantising them is unknown. A trace's `source` says
# which outputs were compared.

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.traces.base import number, spread
from cbtop.protocol.messages import TraceNumber

ABOUT = (
    "sampled outputs against a float64 product of the same stored weights; "
    "the file holds no float weights, so the error of quantising them is unknown"
)
OK_COSINE = 0.995
WARNING_COSINE = 0.99


class ErrorSource(Enum):
    """What is compared with the exact product of the stored weights and float activations."""

    KERNEL = "kernel as it ran"  # the output of the kernel itself, as the model used it
    ACTIVATIONS = (
        # the exact product with activations in Q8_0, which the model itself does not use
        "if activations were Q8_0"
    )
    # the exact product with the quantised weights, compared with the product of the float weights
    WEIGHTS = "weights"


class QuantizationVerdict(Enum):
    """The verdict on an output, by its cosine with the exact output: ok above 0.995, a warning from 0.99 on, critical
    below.
    """

    OK = "ok"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class QuantizationErrorTrace:
    """The error of one output of a brick. `snr_db` is None without any error."""

    brick: str
    layer: int | None  # number of the layer; None outside of layers
    source: ErrorSource
    quant_type: str
    bits_per_weight: float
    mse: float
    max_abs_error: float
    cosine: float
    snr_db: float | None

    @property
    def verdict(self) -> QuantizationVerdict:
        return verdict_of(self.cosine)


def verdict_of(cosine: float) -> QuantizationVerdict:
    """Return the verdict on the cosine between an output and the exact output. A cosine of NaN is critical."""
    if cosine > OK_COSINE:
        return QuantizationVerdict.OK
    return QuantizationVerdict.WARNING if cosine >= WARNING_COSINE else QuantizationVerdict.CRITICAL


def quantization_error(
    brick: str,
    layer: int | None,
    source: ErrorSource,
    quant_type: str,
    bits_per_weight: float,
    expected: NDArray[Any],
    actual: NDArray[Any],
) -> QuantizationErrorTrace:
    """Compare the output `actual` of a brick with the exact output `expected`, an array of the same shape."""
    wanted, found = expected.astype(np.float64).reshape(-1), actual.astype(np.float64).reshape(-1)
    # If a value is infinite, the error is undefined. The cosine becomes NaN, and the verdict is critical.
    with np.errstate(invalid="ignore", over="ignore"):
        error = found - wanted
        signal, noise = float(wanted @ wanted), float(error @ error)
        cosine = _cosine(wanted, found)
    return QuantizationErrorTrace(
        brick=brick,
        layer=layer,
        source=source,
        quant_type=quant_type,
        bits_per_weight=bits_per_weight,
        mse=noise / error.size,
        max_abs_error=float(np.abs(error).max()),
        cosine=cosine,
        snr_db=decibels(signal, noise),
    )


def anomalies(trace: QuantizationErrorTrace) -> Iterator[str]:
    """Yield a sentence for each output with a warning or critical verdict."""
    if trace.verdict is not QuantizationVerdict.OK:
        place = "" if trace.layer is None else f"layer {trace.layer} "
        yield (
            f"{place}{trace.brick} ({trace.quant_type}, {trace.source.value}): cosine {trace.cosine:.6f} "
            f"is {trace.verdict.value}"
        )


def numbers(passes: Sequence[Sequence[QuantizationErrorTrace]]) -> Iterator[TraceNumber]:
    """Yield one row for each source, brick and format, with the worst values over the sampled layers."""
    traces = [trace for one in passes for trace in one]
    for verdict in QuantizationVerdict:
        yield number("", verdict.value, sum(trace.verdict is verdict for trace in traces))
    groups: dict[tuple[str, str, str], list[QuantizationErrorTrace]] = {}
    for source in ErrorSource:
        for trace in traces:
            if trace.source is source:
                groups.setdefault((source.value, trace.brick, trace.quant_type), []).append(trace)
    for key in spread(list(groups)):
        group = groups[key]
        worst = min(group, key=lambda trace: -math.inf if math.isnan(trace.cosine) else trace.cosine)
        source_name, brick, quant_type = key
        row = f"{brick} {quant_type}, {source_name}"
        yield number(row, "samples", len(group))
        yield number(row, "bits/weight", worst.bits_per_weight)
        yield number(row, "mse", max(trace.mse for trace in group))
        yield number(row, "max error", max(trace.max_abs_error for trace in group))
        yield number(row, "1-cosine", 1 - worst.cosine)
        yield number(row, "SNR dB", min((t.snr_db for t in group if t.snr_db is not None), default=None))
        yield number(row, "worst layer", worst.layer)


def decibels(signal: float, noise: float) -> float | None:
    """Return the ratio of signal and noise (sums of squares) in dB. None without noise."""
    if noise == 0:
        return None
    ratio = signal / noise  # the ratio is NaN if signal and noise are infinite
    return -math.inf if ratio == 0 else 10 * math.log10(ratio)


def _cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    sizes = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    if 0 in sizes:
        return 1.0 if sizes[0] == sizes[1] else 0.0
    return float((a / sizes[0]) @ (b / sizes[1]))
