"""Interleave the rows of a model's matrices in place, so that the model's products can use int8 activations."""

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
OF_EXPERTS = ("gate", "up", "down")  # names of the projections that hold the matrices of all experts of a layer


def model_to_run(path: Path, *, is_exact: bool = False) -> Model:
    """Read the model at `path`, and arrange its weights in the layout that is fastest on this processor.

    With `is_exact`, activations are not rounded. Raises ModelError if the model cannot be run.
    """
    model = read_model(path, FAMILIES)
    return model if is_exact else interleaved(model, exact_bytes=exact_bytes())


def exact_bytes() -> int:
    """Return a size in bytes. Matrices of this size or larger are not interleaved.

    The size was measured or set. By default it exceeds the size of every matrix, so all are interleaved. On a
    processor without instructions for integer products, the default is to interleave none, because float products are
    faster there.
    """
    found = crossovers()
    is_known = found.exact_bytes != NEVER or "exact_bytes" in found.measured
    return 1 if TIER == "generic" and not is_known else found.exact_bytes


def interleaved(model: Model, reorder: Reorder = InterleavedMatrix.of, exact_bytes: int = NEVER) -> Model:
    """Interleave every matrix of `model` that can be interleaved and has fewer than `exact_bytes` bytes.

    Do not use `model` afterwards. An embedding is interleaved only if it is also the output matrix. Otherwise its
    rows are looked up one by one. `reorder` is the function that interleaves a matrix.
    """

    def reordered(matrix: Matrix, parts: int = 1) -> Matrix:
        """Return `matrix` with interleaved rows if all of its `parts` allow that, else unchanged."""
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
