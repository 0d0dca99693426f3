"""Linear: y = x @ W.T + bias with quantised W. Most of a decoder's time is spent here.

reference    dequantises all of W, which takes 10-100x as long
numba        one token: weights are dequantised inside the dot product, so only quantised bytes are read.
             Several tokens: one row at a time is dequantised into a scratch row, which stays in L1. Then four tokens
             at a time are multiplied by this row. With several threads, each thread computes a chunk of the rows.
cuda         a block does some rows, from planes (quantization/planes.py); eight tokens share a read of weights
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.cuda.launches import CudaKernel, CudaLaunch, CudaModule
from cbtop.compute.cuda.products import (
    FLOATS,
    FLOATS_PARAMETERS,
    TOKENS,
    block_of,
    blocks_of,
    matrix,
    matrix_arguments,
    matrix_parameters,
    source_of,
    space_of,
    together,
    ways_of,
)
from cbtop.compute.jit.compile import copy_of, jit
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, check_floats, floats
from cbtop.compute.kernels.products import CompiledRows, multiply_one
from cbtop.compute.quantization import FORMATS, ON_GPU, known
from cbtop.compute.quantization.base import BlockFormat, QuantizedMatrix
from cbtop.compute.quantization.floats import F32
from cbtop.compute.quantization.interleaved import ROWS, Matrix

# A check reduces a model's matrix to this number of rows. Dequantising a whole output matrix would take seconds.
CHECKED_ROWS = 64


def reference(code: int, weights: Any, bias: Any, x: Any, out: Any, scratch: Any) -> None:
    """Set out[tokens, rows] = x[tokens, columns] @ W.T + bias. `bias` may be empty."""
    matrix = FORMATS[code].dequantize(weights).astype(np.float64)  # shape (rows, columns)
    out[:] = x.astype(np.float64) @ matrix.T + (bias if bias.size else 0.0)


# The row functions that the code below calls. Each format has a copy of this code that calls the format's row
# functions. Only the copies for the formats of a model are compiled.
_dequantize_row, _dot_row = F32.dequantize_row, F32.dot_row


@jit
def _dot_tokens(scratch: Any, chunk: Any, x: Any, out: Any, row: Any, bias: Any) -> None:
    """Set out[:, row] = x @ scratch[chunk] + bias: multiply all tokens by a dequantised row. Four tokens share each
    read of the row.
    """
    tokens = np.uint64(x.shape[0])
    columns = np.uint64(x.shape[1])
    whole = tokens - tokens % np.uint64(4)
    t = np.uint64(0)
    while t < whole:
        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(columns):
            weight = scratch[chunk, i]
            a += weight * x[t, i]
            b += weight * x[t + np.uint64(1), i]
            c += weight * x[t + np.uint64(2), i]
            d += weight * x[t + np.uint64(3), i]
        out[t, row] = a + bias
        out[t + np.uint64(1), row] = b + bias
        out[t + np.uint64(2), row] = c + bias
        out[t + np.uint64(3), row] = d + bias
        t += np.uint64(4)
    while t < tokens:
        a = np.float32(0)
        for i in range(columns):
            a += scratch[chunk, i] * x[t, i]
        out[t, row] = a + bias
        t += np.uint64(1)


def _rows(weights: Any, bias: Any, x: Any, scratch: Any, out: Any, chunk: Any, chunks: Any) -> None:
    """Compute the rows of the product that belong to chunk number `chunk` of `chunks`."""
    rows = weights.shape[0]
    for row in range(np.uint64(chunk * rows // chunks), np.uint64((chunk + 1) * rows // chunks)):
        offset = bias[row] if bias.shape[0] else np.float32(0)
        if x.shape[0] == 1:
            out[np.uint64(0), row] = _dot_row(weights, row, x, scratch) + offset
        else:
            _dequantize_row(weights, row, scratch, np.uint64(chunk))
            _dot_tokens(scratch, np.uint64(chunk), x, out, row, offset)


def _compiled(block_format: BlockFormat) -> CompiledRows:
    """Return `_rows` for weights of one format. The first call compiles it."""
    name, dequantize_row, dot_row = block_format.name, block_format.dequantize_row, block_format.dot_row
    return CompiledRows(jit(copy_of(_rows, f"_rows_{name}", _dequantize_row=dequantize_row, _dot_row=dot_row)))


ROWS_OF: dict[int, CompiledRows] = {code: _compiled(block_format) for code, block_format in FORMATS.items()}


def prepare(code: int, x: Any, scratch: Any) -> None:
    """Fill `scratch` with the values that the row functions of a format need besides x.

    Raises ValueError for an unknown code, or if x is one token and not float32.
    """
    prepare_format = FORMATS[known(code)].prepare
    if x.shape[0] == 1:
        check_floats(x)
        if prepare_format is not None:
            prepare_format(x, scratch)


def linear(code: int, weights: Any, bias: Any, x: Any, out: Any, scratch: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles.

    `scratch` is float32 (threads, columns or more), one row for each thread to use. Raises ValueError for an unknown
    format code, or if x is one token and not float32.
    """
    prepare(code, x, scratch)
    multiply_one(ROWS_OF[code], weights, bias, x, scratch, out, scratch.shape[0])


def _entry(block_format: BlockFormat, tokens: int) -> str:
    rows, at_once = ways_of(block_format, tokens, is_int8=False)
    return f"""
KERNEL linear_{tokens}({matrix_parameters("out")}, {FLOATS_PARAMETERS}, int columns, int tokens STAMP)
{{
    ENTER
    {space_of([block_format], is_int8=False)}
    write_product<{block_format.name}, {rows}, {tokens}, {at_once}>(
        {matrix("out")}, {FLOATS}, columns, tokens, blockIdx.x, space);
    LEAVE
}}
"""


def _module(block_format: BlockFormat) -> CudaModule:
    entries = [_entry(block_format, tokens) for tokens in TOKENS]
    return CudaModule(f"linear_{block_format.name.lower()}", source_of([block_format], entries))


MODULES = {code: _module(one) for code, one in FORMATS.items() if code in ON_GPU}


def launches(code: int, weights: Any, bias: Any, x: Any, out: Any, scratch: Any) -> Sequence[CudaLaunch]:
    """Return one launch. It processes up to eight tokens at a time, and does not use `scratch`."""
    tokens, columns = x.shape
    arguments = *matrix_arguments(weights, bias, out), x, np.int32(columns), np.int32(tokens)
    block, several = block_of(FORMATS[code], columns, is_int8=False), together(tokens)
    grid = blocks_of(out.shape[1], block, ways_of(FORMATS[code], several, is_int8=False)[0]), -(-tokens // several), 1
    return (CudaLaunch(MODULES[code], f"linear_{several}", grid, block, arguments),)


def dtype_of(weights: Matrix) -> str:
    """Return the number type that a product with these weights multiplies: int8 or float32."""
    return "int8" if weights.takes_int8 else "float32"


def work(weights: Matrix, has_bias: bool) -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are outputs, tokens x rows.

    Weights are read once per call, and x once per token.
    """
    return KernelWork(
        flops_per_element=2.0 * weights.columns + has_bias,
        bytes_per_call=weights.size_bytes + has_bias * weights.rows * FLOAT_BYTES,
        bytes_per_element=FLOAT_BYTES + FLOAT_BYTES * weights.columns / weights.rows,
        dtype=dtype_of(weights),
    )


def narrow(arguments: Arguments, turn: int) -> Arguments:
    """Return the arguments of the same product for only CHECKED_ROWS rows, spread over the matrix.

    Each value of `turn` selects different rows.
    """
    code, weights, bias, x, out, scratch = arguments
    rows = spread(weights.shape[0], CHECKED_ROWS, turn)
    return code, weights[rows], bias[rows] if bias.size else bias, x, out[:, rows], scratch


def narrow_interleaved(arguments: Arguments, turn: int) -> Arguments:
    """Return the arguments of the same product for only CHECKED_ROWS rows: groups of interleaved rows, spread over
    the matrix.

    Each value of `turn` selects different groups.
    """
    code, weights, bias, x, out, scratch = arguments
    groups = spread(len(weights) // ROWS, CHECKED_ROWS // ROWS, turn)
    rows = (groups[:, None] * ROWS + np.arange(ROWS)).reshape(-1)
    return code, weights[rows], bias[rows] if bias.size else bias, x, out[:, rows], scratch


def spread(number: int, at_most: int, turn: int) -> Any:
    """Return at most `at_most` indices below `number`, int64, as far apart as possible.

    If `turn` is 0, the first and the last index are among them.
    """
    return np.unique((np.linspace(0, number - 1, at_most).astype(np.int64) + turn) % number)


def _examples(block_format: BlockFormat, tokens: int, threads: int) -> Any:
    def examples(rng: np.random.Generator, size: int) -> Arguments:
        # The largest example has enough work for two threads, in every format.
        rows, columns = 2 * size + 3, 256 * (1 + size // 64)
        if block_format.block_elements < 256:
            # The number of columns in examples must not be divisible by a large power of two.
            columns += 5 * block_format.block_elements
        matrix = QuantizedMatrix.of(block_format, floats(rng, rows, columns))
        bias = floats(rng, rows if size % 2 or tokens == 1 else 0)
        x, out = floats(rng, tokens, columns), np.zeros((tokens, rows), np.float32)
        return block_format.code, matrix.data, bias, x, out, np.zeros((threads, columns), np.float32)

    return examples


def kernel_for(block_format: BlockFormat, tokens: int = 1, threads: int = 1) -> Kernel:
    """Return the linear kernel for weights of one format.

    Its examples have `tokens` tokens and use `threads` threads.
    """
    return Kernel(
        name=f"{block_format.name.lower()}_linear",
        reference=reference,
        implementation=linear,
        work=work,
        outputs=(4,),
        contract=contract("linear"),
        examples=_examples(block_format, tokens, threads),
        narrow=narrow,
        parallel=True,
        by_token=(3, 4),
        cuda=CudaKernel((MODULES[block_format.code],), launches) if block_format.code in ON_GPU else None,
    )


LINEAR: dict[int, Kernel] = {code: kernel_for(block_format) for code, block_format in FORMATS.items()}
