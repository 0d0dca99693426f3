"""The trained weights of a fine-tuned model: small matrices next to frozen projections, as in LoRA (Hu et al.
2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.decoder.base import Model, Projection
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.floats import F32

Floats = NDArray[np.float32]
NO_BIAS = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Factor:
    """A trained matrix and its gradient, both float32 (rows, columns)."""

    weights: Floats
    gradient: Floats

    @property
    def projection(self) -> Projection:
        """The matrix in the form that products take. It shares the memory of `weights`."""
        return Projection(QuantizedMatrix(F32, self.weights.view(np.uint8), self.weights.shape[1]), NO_BIAS)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a projection. It consists of the factors `down` and `up`.

    The adapter adds (x @ down.T) @ up.T to the projection's output for x.
    """

    down: Factor  # (rank, columns)
    up: Factor  # (rows, rank)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The adapters of the queries and values of each layer.

    The optimizer reads all weights as one row, float32 (1, number of weights). Each field except `layers` is one row
    of this shape: weights, gradients, means of the gradients, and means of the squared gradients.
    """

    layers: tuple[tuple[Adapter, Adapter], ...]
    weights: Floats
    gradient: Floats
    mean: Floats
    square: Floats

    @classmethod
    def of(cls, model: Model, rank: int, seed: int) -> Parameters:
        """Make adapters that do not change the model yet. `down` is random and `up` is 0."""
        projections = [one.weight for layer in model.layers for one in (layer.q, layer.v)]
        shapes = [shape for one in projections for shape in ((rank, one.columns), (one.rows, rank))]
        count = sum(rows * columns for rows, columns in shapes)
        weights, gradient, mean, square = np.zeros((4, 1, count), np.float32)
        factors = [Factor(*two) for two in zip(_views(weights, shapes), _views(gradient, shapes), strict=True)]
        rng = np.random.default_rng(seed)
        adapters = [Adapter(*two) for two in zip(factors[::2], factors[1::2], strict=True)]
        for one in adapters:
            down = one.down.weights
            down[:] = rng.standard_normal(down.shape, np.float32) / np.float32(down.shape[1] ** 0.5)
        return cls(tuple(zip(adapters[::2], adapters[1::2], strict=True)), weights, gradient, mean, square)


def _views(row: Floats, shapes: Sequence[tuple[int, int]]) -> list[Floats]:
    """Return consecutive parts of a row of weights as matrices of the given shapes."""
    ends = np.cumsum([rows * columns for rows, columns in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(row[0], ends[:-1]), shapes, strict=True)]
