"""A model whose products take int8 activations: its matrices interleaved where they lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import LayerWeights, Model, Projection, read_model
from cbtop.compute.jit.cpu import TIER
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.interleaved import ROWS, InterleavedMatrix, Matrix, can_interleave

Reorder = Callable[[QuantizedMatrix], InterleavedMatrix]
OF_EXPERTS = ("gate", "up", "down")  # of a layer: they hold the matrices of all experts


def model_to_run(path: Path, *, is_exact: bool = False) -> Model:
    """The model at `path`, its products as fast as this processor can; `is_exact`: with activations as they are.

    ModelError where it cannot be run.
    """
    model = read_model(path, FAMILIES)
    # Without instructions for products of integers those of floats are faster.
    return model if is_exact or TIER == "generic" else interleaved(model)


def interleaved(model: Model, reorder: Reorder = InterleavedMatrix.of) -> Model:
    """`model` with every matrix interleaved that can be; the one given is not to be used any more.

    The embedding is where it is the output matrix, too: else its rows are looked up one by one.
    `reorder` makes a matrix interleaved.
    """
    lm_head = _reordered(model.lm_head, reorder)
    is_tied = model.embedding is model.lm_head
    experts = 1 if model.experts is None else model.experts.count
    layers = tuple(_layer(layer, experts, reorder) for layer in model.layers)
    return replace(model, layers=layers, lm_head=lm_head, embedding=lm_head if is_tied else model.embedding)


def _layer(layer: LayerWeights, experts: int, reorder: Reorder) -> LayerWeights:
    products = {
        field.name: replace(
            product, weight=_reordered(product.weight, reorder, experts if field.name in OF_EXPERTS else 1)
        )
        for field in fields(layer)
        if isinstance(product := getattr(layer, field.name), Projection)
    }
    return replace(layer, **products)  # type: ignore[arg-type]


def _reordered(matrix: Matrix, reorder: Reorder, parts: int = 1) -> Matrix:
    """`matrix` interleaved, if each of its `parts` can be."""
    if isinstance(matrix, QuantizedMatrix) and can_interleave(matrix) and matrix.rows // parts % ROWS == 0:
        return reorder(matrix)
    return matrix
