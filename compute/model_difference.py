"""Compare two GGUF files of one model: the error of each tensor, and the divergence of each layer's prediction."""

# Both passes are in float64 with the stored weights, so the result shows only the difference of the weights, and not
# the rounding of kernels.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import Model, read_model
from cbtop.compute.decoder.reference import Wide, layer_outputs, logits_of
from cbtop.compute.errors import ComputeError
from cbtop.compute.gguf import GgufFile
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.floats import BF16
from cbtop.profiler.traces.quantization import decibels, verdict_of

Progress = Callable[[str, float], None]

PIECE_ELEMENTS = 1 << 20  # number of weights that are compared at a time
TOKENS = 16  # number of positions in a pass; a pass of a large model in float64 takes minutes
SEED = 7
PROBE_SHAPE = (64, 256)  # number of weights that are used to measure the noise of a format
# The allowed noise, as a multiple of the noise of normally distributed weights. Weights with long tails (Student's t,
# 3 degrees of freedom) have up to 2.5 times the noise of normally distributed weights: Q8_0 41.5 dB instead of 45.4,
# Q4_0 18.2 dB instead of 21.8.
ROOM = 4.0
# Fields of a model that may differ between two files of the same model.
OF_FILE = frozenset({"name", "quantization", "weights_bytes"})


@dataclass(frozen=True, slots=True)
class TensorError:
    """The difference between one tensor and the same tensor of the other file, over all weights.

    `snr_db` compares two sums of squares, in decibels: of the other file's weights, and of the differences. It is
    None if one of the sums is zero. The tensor passes if its cosine and its SNR reach their limits.
    """

    name: str
    shape: tuple[int, ...]  # the number of columns comes first, as in the file
    format: str
    against_format: str
    max_abs_error: float
    snr_db: float | None
    cosine: float
    min_cosine: float

    @property
    def verdict(self) -> str:
        """The verdict on a tensor from its cosine: ok, warning or critical."""
        return verdict_of(self.cosine).value

    @property
    def min_snr_db(self) -> float | None:
        """The least SNR, or None if any is enough. It is the higher of two limits. At the first, independent noise
        leads to the cosine `min_cosine`. At the second, a least-squares fit would make weights half or 1.5 times as
        large.

        These limits reject tensors with a wrong scale, which the cosine does not detect. The second limit is for a
        format of one bit, because its noise is as large as the noise of a doubled scale.
        """
        if self.min_cosine <= 0:
            return None
        square = min(self.min_cosine, 1 - 1e-12) ** 2
        # Let r be the ratio of the norms: 1 / SNR = 1 - 2 * cosine * r + r². Least squares would make r the cosine.
        return decibels(max(square / (1 - square), 1 / (1 - 0.75 * self.cosine**2)), 1)

    @property
    def passed(self) -> bool:
        if not self.max_abs_error:
            return True
        limit = self.min_snr_db
        if self.cosine < self.min_cosine:
            return False
        return limit is None or (self.snr_db is not None and self.snr_db >= limit)


@dataclass(frozen=True, slots=True)
class LayerDivergence:
    """The Kullback-Leibler divergence of a layer's prediction from the other file's prediction, in nats.

    The prediction at a position is softmax(output matrix * final norm(output of the layer)). The divergence is sum(p
    * (ln p - ln q)) over the vocabulary, with p from the other file and q from this file. `mean` and `largest` are
    over positions.
    """

    layer: int
    mean: float
    largest: float


@dataclass(frozen=True, slots=True)
class ModelDifference:
    """The result of a comparison. The divergences were measured in a pass of `tokens` random tokens."""

    tokens: int
    tensors: tuple[TensorError, ...]
    layers: tuple[LayerDivergence, ...]


def model_difference(
    path: Path, against: Path, progress: Progress, min_cosine: float | None = None
) -> ModelDifference:
    """Compare the model at `path` with the original at `against`.

    `min_cosine` is the limit of each tensor. The default depends on the two formats (`min_cosine_of`). Only one whole
    model at a time is in memory. Raises ComputeError if the files are not of one model, or if a model cannot be run.
    """
    with GgufFile.open(path) as file, GgufFile.open(against) as other:
        _require_same_tensors(file, other)
        tensors = tuple(_tensor_errors(file, other, progress, min_cosine))
    model = read_model(path, FAMILIES)
    sizes = _sizes(model)
    tokens = _tokens(model)
    found = _predictions(model, tokens, path.name, progress)
    del model  # delete the model, to free its memory for the other one
    original = read_model(against, FAMILIES)
    for name, size in _sizes(original).items():
        if size != sizes[name]:
            raise ComputeError(f"{path} and {against} are not of one model: {name} is {sizes[name]} and {size}")
    expected = _predictions(original, tokens, against.name, progress)
    layers = [
        _divergence(layer, of_original, of_model)
        for layer, (of_original, of_model) in enumerate(zip(expected, found, strict=True))
    ]
    return ModelDifference(len(tokens), tensors, tuple(layers))


def _require_same_tensors(file: GgufFile, other: GgufFile) -> None:
    names = f"{file.path} and {other.path} are not of one model"
    for one, two in ((file, other), (other, file)):
        missing = [name for name in one.shapes if name not in two.shapes]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ComputeError(f"{names}: {two.path} has no tensor {missing[0]!r}{more}")
    for name, shape in file.shapes.items():
        if shape != other.shapes[name]:
            raise ComputeError(f"{names}: tensor {name!r} has shape {list(shape)} and {list(other.shapes[name])}")


def min_cosine_of(*formats: str) -> float:
    """Return the smallest cosine of correct tensors in these formats, if their noise is `ROOM` times the usual noise.

    The noise of BF16 is added, because either file may come from a different float format.
    """
    noise = ROOM * (_noise_of(BF16.name) + sum(map(_noise_of, formats)))
    return 1 / math.sqrt(1 + noise)


@cache
def _noise_of(name: str) -> float:
    """Return the squared error of a format on normally distributed weights, divided by the sum of squares of the
    weights.
    """
    block_format = next(one for one in FORMATS.values() if one.name == name)
    weights = np.random.default_rng(SEED).standard_normal(PROBE_SHAPE, np.float32)
    errors = block_format.dequantize(block_format.quantize(weights)) - weights
    return float((errors.astype(np.float64) ** 2).sum() / (weights.astype(np.float64) ** 2).sum())


def _tensor_errors(
    file: GgufFile, other: GgufFile, progress: Progress, min_cosine: float | None
) -> Iterator[TensorError]:
    done, total = 0, file.elements()
    for name, shape in file.shapes.items():
        largest = signal = noise = power = product = 0.0
        together = max(PIECE_ELEMENTS // shape[0], 1)
        for narrow, narrow_original in zip(file.rows(name, together), other.rows(name, together), strict=True):
            weights = narrow.astype(np.float64).reshape(-1)
            original = narrow_original.astype(np.float64).reshape(-1)
            error = weights - original
            largest = max(largest, float(np.abs(error).max()))
            noise += float(error @ error)
            signal += float(original @ original)
            power += float(weights @ weights)
            product += float(weights @ original)
            done += weights.size
            progress("comparing tensors", done / total)
        formats = file.format_of(name).name, other.format_of(name).name
        yield TensorError(
            name=name,
            shape=shape,
            format=formats[0],
            against_format=formats[1],
            max_abs_error=largest,
            snr_db=decibels(signal, noise) if signal else None,
            cosine=_cosine(product, power, signal),
            min_cosine=min_cosine_of(*formats) if min_cosine is None else min_cosine,
        )


def _cosine(product: float, power: float, other_power: float) -> float:
    """Return the cosine between two tensors from their sums of squares.

    Two zero tensors have the cosine 1. A zero tensor and any other tensor have the cosine 0.
    """
    if not power or not other_power:
        return 1.0 if power == other_power else 0.0
    return min(max(product / (math.sqrt(power) * math.sqrt(other_power)), -1.0), 1.0)


def _sizes(model: Model) -> dict[str, object]:
    """Return the sizes and settings of a model that must be the same in two files of the same model."""
    values = {one.name: getattr(model, one.name) for one in fields(model) if one.name not in OF_FILE}
    values |= {f"rope {one.name}": getattr(model.rope, one.name) for one in fields(model.rope)}
    return {name: value for name, value in values.items() if isinstance(value, int | float | str)}


def _tokens(model: Model) -> NDArray[np.int64]:
    count = min(TOKENS, model.context_length)
    return np.random.default_rng(SEED).integers(0, model.vocabulary, count)


def _predictions(model: Model, tokens: NDArray[np.int64], name: str, progress: Progress) -> Wide:
    """Return the logarithms of each layer's predictions, float64 (layers, tokens, vocabulary)."""
    outputs = []
    steps = len(model.layers) + 1
    for layer, output in enumerate(layer_outputs(model, tokens.tolist())):
        progress(f"a pass in float64: {name}", layer / steps)
        outputs.append(output)
    # Use one product for all layers, because the output matrix is large and would be dequantised for each layer.
    logits = logits_of(model, np.concatenate(outputs[1:])).reshape(len(model.layers), len(tokens), -1)
    if not np.isfinite(logits).all():
        raise ComputeError(f"{name}: a pass in float64 gives logits that are not finite, so nothing can be compared")
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    progress(f"a pass in float64: {name}", 1.0)
    return logits


def _divergence(layer: int, expected: Wide, found: Wide) -> LayerDivergence:
    of_positions = (np.exp(expected) * (expected - found)).sum(axis=-1)
    return LayerDivergence(layer, float(of_positions.mean()), float(of_positions.max()))
