"""A model whose products take int8 activations: its matrices interleaved in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import LayerWeights, Model, Projection, read_model
from cbtop.compute.jit.cpu import TIER
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.interleaved import ROWS, InterleavedMatrix, Matrix, can_interleave
from cbtop.compute.settings import crossovers
from cbtop.protocol.crossovers import NEVER

Reorder = Callable[[QuantizedMatrix], InterleavedMatrix]
OF_EXPERTS = ("gate", "up", "down")  # of a layer: they hold the matrices of all experts


def model_to_run(path: Path, *, is_exact: bool = False) -> Model:
    """The model at `path`, its products as fast as this processor can; `is_exact`: with activations as they are.

    ModelError where it cannot be run.
    """
    model = read_model(path, FAMILIES)
    return model if is_exact else interleaved(model, exact_bytes=exact_bytes())


def exact_bytes() -> int:
    """Of how many bytes and more a matrix is read as it lies here: what was measured, or set. By default none; all
    where the processor has no instructions for products of integers: those of floats are faster there."""
    found = crossovers()
    is_known = found.exact_bytes != NEVER or "exact_bytes" in found.measured
    return 1 if TIER == "generic" and not is_known else found.exact_bytes


def interleaved(model: Model, reorder: Reorder = InterleavedMatrix.of, exact_bytes: int = NEVER) -> Model:
    """`model` with every matrix interleaved that can be, but those of `exact_bytes` and more; the one given is not to
    be used any more.

    The embedding is where it is the output matrix, too: else its rows are looked up one by one.
    `reorder` makes a matrix interleaved.
    """

    def reordered(matrix: Matrix, parts: int = 1) -> Matrix:
        """`matrix` interleaved, if each of its `parts` can be."""
        rows, size_bytes = matrix.rows // parts, matrix.size_bytes // parts
        if not isinstance(matrix, QuantizedMatrix) or rows % ROWS or not can_interleave(matrix):
            return matrix
        return reorder(matrix) if size_bytes < exact_bytes else matrix

    lm_head = reordered(model.lm_head)
    is_tied = model.embedding is model.lm_head
    experts = 1 if model.experts is None else model.experts.count
    layers = tuple(_layer(layer, experts, reordered) for layer in model.layers)
    return replace(model, layers=layers, lm_head=lm_head, embedding=lm_head if is_tied else model.embedding)


def _layer(layer: LayerWeights, experts: int, reordered: Callable[[Matrix, int], Matrix]) -> LayerWeights:
    products = {
        field.name: replace(product, weight=reordered(product.weight, experts if field.name in OF_EXPERTS else 1))
        for field in fields(layer)
        if isinstance(product := getattr(layer, field.name), Projection)
    }
    return replace(layer, **products)  # type: ignore[arg-type]
