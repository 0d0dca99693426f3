"""The backward of Linear: the gradient of its input, d_x = d_out @ W with quantised W.

reference    dequantises all of W
numba        four rows at a time are dequantised into scratch rows, and added to every token in blocks of columns that
             stay in L1. With several threads, each thread has some of the tokens and dequantises all rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.jit.compile import copy_of, jit
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, check_floats, floats
from cbtop.compute.kernels.products import CompiledRows, multiply_one
from cbtop.compute.quantization import FORMATS, known
from cbtop.compute.quantization.base import BlockFormat, QuantizedMatrix
from cbtop.compute.quantization.floats import F32
from cbtop.compute.quantization.interleaved import Matrix

TOGETHER = 4  # number of rows of W that share a read and a write of d_x
# Number of columns that are processed together; for these columns, TOGETHER rows and a token take 20 KB of L1.
BLOCK = 1024
# A check reduces a model's gradient to this number of columns. Checking all columns would take seconds.
CHECKED_COLUMNS = 256
NO_BIAS = np.zeros(0, np.float32)


def reference(code: int, weights: Any, d_out: Any, adds: bool, d_x: Any, scratch: Any) -> None:
    """Set d_x[tokens, columns] = d_out[tokens, rows] @ W. If `adds`, add the product to d_x instead."""
    matrix = FORMATS[code].dequantize(weights).astype(np.float64)  # shape (rows, columns)
    d_x[:] = (d_x if adds else 0.0) + d_out.astype(np.float64) @ matrix


# Each format has a copy of `_tokens`. In the copy, the format's own function replaces this one, as in linear.py.
_dequantize_row = F32.dequantize_row


@jit
def _add_rows(scratch: Any, chunk: Any, d_out: Any, row: Any, d_x: Any, t: Any, begin: Any, end: Any) -> None:
    """Add four scratch rows, each times its gradient, to columns `begin` to `end` - 1 of token t's gradient.

    The scratch rows begin at row `chunk`.
    """
    one, two = chunk + np.uint64(1), chunk + np.uint64(2)
    three = chunk + np.uint64(3)
    a, b = d_out[t, row], d_out[t, row + np.uint64(1)]
    c, d = d_out[t, row + np.uint64(2)], d_out[t, row + np.uint64(3)]
    for i in range(begin, end):
        d_x[t, i] += a * scratch[chunk, i] + b * scratch[one, i] + c * scratch[two, i] + d * scratch[three, i]


def _tokens(weights: Any, bias: Any, d_out: Any, scratch: Any, d_x: Any, chunk: Any, chunks: Any) -> None:
    """For the tokens in chunk number `chunk` of `chunks`, add the product to d_x.

    `bias` is not used (see `CompiledRows`).
    """
    tokens, rows, columns = d_x.shape[0], np.uint64(weights.shape[0]), np.uint64(d_x.shape[1])
    first, last = np.uint64(chunk * tokens // chunks), np.uint64((chunk + 1) * tokens // chunks)
    whole, own = rows - rows % np.uint64(TOGETHER), np.uint64(chunk * TOGETHER)
    for row in range(np.uint64(0), whole, np.uint64(TOGETHER)):
        for n in range(np.uint64(TOGETHER)):
            _dequantize_row(weights, row + n, scratch, own + n)
        begin = np.uint64(0)
        while begin < columns:
            end = min(begin + np.uint64(BLOCK), columns)
            for t in range(first, last):
                _add_rows(scratch, own, d_out, row, d_x, t, begin, end)
            begin = end
    for row in range(whole, rows):
        _dequantize_row(weights, row, scratch, own)
        for t in range(first, last):
            for i in range(columns):
                d_x[t, i] += d_out[t, row] * scratch[own, i]


def _compiled(block_format: BlockFormat) -> CompiledRows:
    """Return `_tokens` for weights of one format. The first call compiles it."""
    name, dequantize_row = block_format.name, block_format.dequantize_row
    return CompiledRows(jit(copy_of(_tokens, f"_tokens_{name}", _dequantize_row=dequantize_row)))


TOKENS_OF: dict[int, CompiledRows] = {code: _compiled(block_format) for code, block_format in FORMATS.items()}


def linear_backward(code: int, weights: Any, d_out: Any, adds: bool, d_x: Any, scratch: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles.

    `scratch` is from `scratch_for`. Its size determines the number of threads. Raises ValueError for an unknown
    format code, or if d_out is not float32.
    """
    tokens_of = TOKENS_OF[known(code)]
    check_floats(d_out)
    if not adds:
        d_x[:] = 0
    multiply_one(tokens_of, weights, NO_BIAS, d_out, scratch, d_x, scratch.shape[0] // TOGETHER)


def scratch_for(threads: int, columns: int) -> Any:
    """Return scratch rows for a number of threads, and for matrices of up to `columns` columns."""
    return np.zeros((threads * TOGETHER, columns), np.float32)


def work(weights: Matrix) -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are the numbers of d_x, tokens x columns.

    Weights are read once per call, and d_out once per token.
    """
    return KernelWork(
        flops_per_element=2.0 * weights.rows,
        bytes_per_call=weights.size_bytes,
        bytes_per_element=FLOAT_BYTES + FLOAT_BYTES * weights.rows / weights.columns,
    )


def narrow(arguments: Arguments, turn: int) -> Arguments:
    """Return the arguments of the same product for only CHECKED_COLUMNS columns, in whole blocks.

    Each value of `turn` selects different columns.
    """
    code, weights, d_out, adds, d_x, scratch = arguments
    block_format, columns = FORMATS[code], d_x.shape[1]
    wide = max(CHECKED_COLUMNS, block_format.block_elements)
    first = turn * wide % columns // wide * wide
    bytes_of = block_format.row_bytes
    part = np.ascontiguousarray(weights[:, bytes_of(first) : bytes_of(min(first + wide, columns))])
    return code, part, d_out, adds, d_x[:, first : first + wide], scratch


def _examples(block_format: BlockFormat, tokens: int, threads: int) -> Any:
    def examples(rng: np.random.Generator, size: int) -> Arguments:
        rows, columns = 2 * size + 3, 256 * (1 + size // 64)
        if block_format.block_elements < 256:
            columns += 5 * block_format.block_elements
        matrix = QuantizedMatrix.of(block_format, floats(rng, rows, columns))
        d_out, d_x = floats(rng, tokens, rows), 100 * floats(rng, tokens, columns)
        return block_format.code, matrix.data, d_out, size % 2 == 1, d_x, scratch_for(threads, columns)

    return examples


def kernel_for(block_format: BlockFormat, tokens: int = 1, threads: int = 1) -> Kernel:
    """Return the kernel for weights of one format.

    Its examples have `tokens` tokens and use `threads` threads.
    """
    return Kernel(
        name=f"{block_format.name.lower()}_linear_backward",
        reference=reference,
        implementation=linear_backward,
        work=work,
        outputs=(4,),
        contract=contract("linear_backward"),
        examples=_examples(block_format, tokens, threads),
        narrow=narrow,
        parallel=True,
        by_token=(2, 4),
    )


LINEAR_BACKWARD: dict[int, Kernel] = {code: kernel_for(block_format) for code, block_format in FORMATS.items()}
