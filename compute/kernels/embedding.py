"""Embedding: look up the row of each token in the embedding matrix, and dequantise it.

Scale the row if the model scales embeddings.

reference    dequantises the rows with NumPy
numba        the row dequantiser of the weight's format writes directly to the output
cuda         reads planes, eight weights per thread
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.cuda.launches import CudaKernel, CudaLaunch, CudaModule
from cbtop.compute.cuda.units import UNITS
from cbtop.compute.jit.compile import copy_of, jit
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, floats
from cbtop.compute.quantization import FORMATS, ON_GPU, known
from cbtop.compute.quantization.base import BlockFormat, QuantizedMatrix
from cbtop.compute.quantization.floats import F32
from cbtop.compute.quantization.interleaved import InterleavedMatrix, rows_of
from cbtop.compute.quantization.q6_k import Q6_K


def reference(code: int, weights: Any, tokens: Any, scale: float, out: Any) -> None:
    """Set out[t] = scale * W[tokens[t]].

    weights (W): uint8 (vocabulary, row_bytes); tokens: int64; out: float32 (tokens, hidden).
    """
    out[:] = scale * FORMATS[code].dequantize(weights[tokens]).astype(np.float64)


# Each format has a copy of the code below that uses the format's own `_dequantize_row`.
_dequantize_row = F32.dequantize_row


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
    """Compute the same as the function `reference`, in code that Numba compiles.

    Raises ValueError for an unknown format code.
    """
    _COMPILED[known(code)](weights, tokens, out)
    if scale != 1:
        _scale(out, np.float32(scale))


OF_BLOCKS = r"""
        float w[8];
        eight_weights(NAME(planes, weights), (row * columns + column) / 32, column % 32 / 8, w);
        float4* to = (float4*)(out + (int64_t)blockIdx.y * columns + column);
        to[0] = make_float4(scale * w[0], scale * w[1], scale * w[2], scale * w[3]);
        to[1] = make_float4(scale * w[4], scale * w[5], scale * w[6], scale * w[7]);
"""
OF_FLOATS = r"""
        out[(int64_t)blockIdx.y * columns + column] = scale * NAME(planes, weights).one(row * columns + column);
"""
ENTRY = r"""
KERNEL embedding_BITS(
    const uint8_t* planes, int64_t weights, const INTEGER* tokens, float scale, float* out, int columns STAMP)
{
    ENTER
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * TOGETHER;
    const int64_t row = tokens[blockIdx.y];
    if (column < columns) {BODY    }
    LEAVE
}
"""
CUDA_THREADS = 128


def _together(block_format: BlockFormat) -> int:
    """Return the number of weights that each thread dequantises."""
    return 8 if block_format.block_elements > 1 else 1


def _module(block_format: BlockFormat) -> CudaModule:
    assert block_format.planes is not None
    body = (OF_BLOCKS if block_format.block_elements > 1 else OF_FLOATS).replace("NAME", block_format.name)
    entry = ENTRY.replace("BODY", body).replace("TOGETHER", str(_together(block_format)))
    entries = [entry.replace("BITS", bits).replace("INTEGER", of) for bits, of in (("32", "int"), ("64", "int64_t"))]
    source = UNITS + block_format.planes.source + "".join(entries)
    return CudaModule(f"embedding_{block_format.name.lower()}", source)


MODULES = {code: _module(one) for code, one in FORMATS.items() if code in ON_GPU}


@cache
def _weights_in(code: int, size_bytes: int) -> int:
    """Return the number of weights in planes of `size_bytes` bytes."""
    one = FORMATS[code]
    assert one.planes is not None
    return one.planes.blocks_in(size_bytes, one.block_elements) * one.block_elements


def launches(code: int, weights: Any, tokens: Any, scale: float, out: Any) -> Sequence[CudaLaunch]:
    """Return one launch with a row of blocks for each token. Tokens are int32 or int64."""
    count, columns = out.shape
    blocks = -(-columns // (CUDA_THREADS * _together(FORMATS[code])))
    entry = f"embedding_{8 * tokens.dtype.itemsize}"
    size = np.int64(_weights_in(code, weights.size))
    arguments = weights, size, tokens, np.float32(scale), out, np.int32(columns)
    return (CudaLaunch(MODULES[code], entry, (blocks, count, 1), (CUDA_THREADS, 1, 1), arguments),)


def work(matrix: QuantizedMatrix | InterleavedMatrix, is_scaled: bool) -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are outputs, tokens x hidden.

    An output takes a multiplication by a block's scale. If `is_scaled`, it also takes a multiplication by the scale
    of embeddings.
    """
    return KernelWork(
        flops_per_element=float(matrix.format.block_elements > 1) + is_scaled,
        bytes_per_element=FLOAT_BYTES + matrix.format.block_bytes / matrix.format.block_elements,
    )


def _examples(rng: np.random.Generator, size: int) -> Arguments:
    matrix = QuantizedMatrix.of(Q6_K, floats(rng, 50, 256 * (1 + size // 64)))
    tokens = rng.integers(0, 50, size)
    return Q6_K.code, matrix.data, tokens, _scale_of(size), np.zeros((size, matrix.columns), np.float32)


def _scale_of(size: int) -> float:
    return 1.0 + size % 2  # a factor of 1 means no scaling


def interleaved_reference(code: int, weights: Any, tokens: Any, scale: float, out: Any) -> None:
    """Compute `reference` for interleaved weights."""
    reference(code, rows_of(FORMATS[code], weights, tokens), np.arange(len(tokens)), scale, out)


def interleaved_embedding(code: int, weights: Any, tokens: Any, scale: float, out: Any) -> None:
    """Compute the same as the function `interleaved_reference`, in code that Numba compiles."""
    embedding(code, rows_of(FORMATS[code], weights, tokens), np.arange(len(tokens)), scale, out)


def _interleaved_examples(rng: np.random.Generator, size: int) -> Arguments:
    matrix = InterleavedMatrix.of(QuantizedMatrix.of(Q6_K, floats(rng, 48, 256 * (1 + size // 64))))
    tokens = rng.integers(0, 48, size)
    return Q6_K.code, matrix.data, tokens, _scale_of(size), np.zeros((size, matrix.columns), np.float32)


CUDA = CudaKernel(tuple(MODULES.values()), launches)
INTERLEAVED_EMBEDDING = Kernel(
    "interleaved_embedding",
    interleaved_reference,
    interleaved_embedding,
    work,
    (4,),
    contract("embedding"),
    _interleaved_examples,
    by_token=(2, 4),
    cuda=CUDA,
)
EMBEDDING = Kernel(
    "embedding", reference, embedding, work, (4,), contract("embedding"), _examples, by_token=(2, 4), cuda=CUDA
)
