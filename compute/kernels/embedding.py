"""Embedding: one row of the embedding matrix a token, dequantised, and scaled where a model does.

reference    dequantises the rows with NumPy
numba        the row dequantiser of the weight's format, straight into the output
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.jit.compile import copy_of, jit
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats
from cbtop.compute.quantization import FORMATS, known
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.floats import F32
from cbtop.compute.quantization.interleaved import InterleavedMatrix, rows_of
from cbtop.compute.quantization.q6_k import Q6_K


def reference(code: int, weights: Any, tokens: Any, scale: float, out: Any) -> None:
    """out[t] = scale * W[tokens[t]]; W uint8 (vocabulary, row_bytes), tokens int64, out float32 (tokens, hidden)."""
    out[:] = scale * FORMATS[code].dequantize(weights[tokens]).astype(np.float64)


_dequantize_row = F32.dequantize_row  # in the copy of the code below that each format has it is the format's own


def _embedding(weights: Any, tokens: Any, out: Any) -> None:
    for t in range(tokens.shape[0]):
        _dequantize_row(weights, np.uint64(tokens[t]), out, np.uint64(t))


_COMPILED = {
    code: jit(copy_of(_embedding, f"_embedding_{one.name}", _dequantize_row=one.dequantize_row))
    for code, one in FORMATS.items()
}


@jit
def _scale(out: Any, scale: Any) -> None:
    columns = np.uint64(out.shape[1])
    for t in range(np.uint64(out.shape[0])):
        for i in range(columns):
            out[t, i] *= scale


def embedding(code: int, weights: Any, tokens: Any, scale: float, out: Any) -> None:
    """As `reference`. Raises ValueError for the code of a format that is not known."""
    _COMPILED[known(code)](weights, tokens, out)
    if scale != 1:
        _scale(out, np.float32(scale))


def work(matrix: QuantizedMatrix | InterleavedMatrix, is_scaled: bool) -> KernelWork:
    """Elements are outputs, tokens x hidden; a multiplication each by a block's scale, and by that of all."""
    return KernelWork(
        flops_per_element=float(matrix.format.block_elements > 1) + is_scaled,
        bytes_per_element=FLOAT_BYTES + matrix.format.block_bytes / matrix.format.block_elements,
    )


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    matrix = QuantizedMatrix.of(Q6_K, floats(rng, 50, 256 * (1 + size // 64)))
    tokens = rng.integers(0, 50, size)
    return Q6_K.code, matrix.data, tokens, _scale_of(size), np.zeros((size, matrix.columns), np.float32)


def _scale_of(size: int) -> float:
    return 1.0 + size % 2  # of some examples none


def interleaved_reference(code: int, weights: Any, tokens: Any, scale: float, out: Any) -> None:
    """As `reference`; `weights` are interleaved."""
    reference(code, rows_of(FORMATS[code], weights, tokens), np.arange(len(tokens)), scale, out)


def interleaved_embedding(code: int, weights: Any, tokens: Any, scale: float, out: Any) -> None:
    """As `interleaved_reference`."""
    embedding(code, rows_of(FORMATS[code], weights, tokens), np.arange(len(tokens)), scale, out)


def _interleaved_examples(rng: np.random.Generator, size: int) -> Arguments:
    matrix = InterleavedMatrix.of(QuantizedMatrix.of(Q6_K, floats(rng, 48, 256 * (1 + size // 64))))
    tokens = rng.integers(0, 48, size)
    return Q6_K.code, matrix.data, tokens, _scale_of(size), np.zeros((size, matrix.columns), np.float32)


INTERLEAVED_EMBEDDING = Kernel(
    "interleaved_embedding",
    interleaved_reference,
    interleaved_embedding,
    work,
    (4,),
    contract("embedding"),
    _interleaved_examples,
    by_token=(2, 4),
)
EMBEDDING = Kernel("embedding", reference, embedding, work, (4,), contract("embedding"), _examples, by_token=(2, 4))
