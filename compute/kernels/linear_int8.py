"""Linear in int8: y = x @ W.T + bias with interleaved W, and x in int8 from quantize_rows.

reference    product in float64 of the dequantised weights and the same int8 activations
numba        sixteen rows at a time (int8_rows.py). One instruction multiplies four weights of each row by four codes
             and adds the products exactly (AVX-512 VNNI; AVX2 needs four or five). Then each row is scaled once. For
             one token, AVX2 has its own code (one_token_avx2). For four tokens, the columns of sixteen rows are
             unpacked once. With several threads, each thread computes some groups of rows. If the processor has AMX,
             linear_bf16 computes products of many tokens.
cuda         a block per row, from planes (quantization/planes.py), with the instruction dp4a

Because x is rounded to int8, y differs from the product with x itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.cuda import turns
from cbtop.compute.cuda.launches import CudaKernel, CudaLaunch, CudaModule, Launch
from cbtop.compute.cuda.products import (
    INT8,
    INT8_PARAMETERS,
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
from cbtop.compute.jit.cpu import HAS_TILES
from cbtop.compute.kernels import linear, linear_bf16
from cbtop.compute.kernels.base import Arguments, Kernel, check_floats, floats
from cbtop.compute.kernels.int8_rows import ROWS_OF
from cbtop.compute.kernels.linear import narrow_interleaved, work
from cbtop.compute.kernels.linear_bf16 import TileScratch
from cbtop.compute.kernels.products import CompiledRows, multiply_one
from cbtop.compute.kernels.quantize_rows import BLOCK, FACTORS, empty_codes, quantize_rows
from cbtop.compute.kernels.quantize_rows import CUDA as QUANTIZE
from cbtop.compute.kernels.quantize_rows import launches as quantize_launches
from cbtop.compute.kernels.quantize_rows import reference as quantize
from cbtop.compute.quantization import FORMATS, INTERLEAVABLE, ON_GPU
from cbtop.compute.quantization.base import BlockFormat, QuantizedMatrix
from cbtop.compute.quantization.interleaved import ROWS, InterleavedMatrix, Matrix, rows_of
from cbtop.compute.settings import crossovers


@dataclass(frozen=True, slots=True)
class Int8Scratch:
    """The buffers for a product's activations.

    `codes` and `factors`: the outputs of `quantize_rows`.
    `threads`: the number of threads, or of multiprocessors on a GPU.
    `tiles`: buffers for products of many tokens. A TileScratch if the processor has tiles, a CudaScratch on a GPU,
    otherwise None.
    `holds_codes`: whether `rms_norm_int8` has already written the codes of the activations.
    """

    codes: Any
    factors: Any
    threads: int
    tiles: Any
    holds_codes: bool = False

    @classmethod
    def of(cls, tokens: int, columns: int, threads: int) -> Int8Scratch:
        takes_tiles = HAS_TILES and tokens >= crossovers().bf16_tokens
        tiles = TileScratch.of(tokens, columns, threads) if takes_tiles else None
        return cls(*empty_codes(tokens, columns), threads, tiles)

    def first(self, tokens: int) -> Int8Scratch:
        """Return a scratch that has only the first `tokens` tokens of this one."""
        return replace(self, codes=self.codes[:tokens], factors=self.factors[:tokens])


def reference(code: int, weights: Any, bias: Any, x: Any, out: Any, scratch: Int8Scratch) -> None:
    """Set out[tokens, rows] = x'[tokens, columns] @ W.T + bias, where x' is x after rounding by `quantize_rows`.

    `weights` are interleaved. `bias` may be empty. If the scratch has tiles, products of at least `bf16_tokens`
    tokens (Crossovers) are computed by `linear_bf16`.
    """
    if scratch.tiles is not None and len(x) >= crossovers().bf16_tokens:
        linear_bf16.reference(code, weights, bias, x, out, scratch.tiles)
        return
    codes, factors = empty_codes(*x.shape)
    quantize(x, codes, factors)
    scales = np.repeat(factors[:, ::FACTORS].astype(np.float64), BLOCK, axis=1)
    block_format = FORMATS[code]
    matrix = block_format.dequantize(rows_of(block_format, weights, np.arange(len(weights))))
    out[:] = codes.view(np.int8) * scales @ matrix.astype(np.float64).T + (bias if bias.size else 0.0)


def prepared(code: int, x: Any, scratch: Any) -> tuple[Mapping[int, CompiledRows], Any, Any, int]:
    """Prepare activations once for all products that use them.

    If `scratch` is an Int8Scratch, the products are in int8. Otherwise they are those of `linear`.

    Returns the row functions by format, their arguments `x` and `beside`, and the number of threads. Raises
    ValueError if x is not float32, except in `linear` with several tokens.
    """
    if isinstance(scratch, Int8Scratch):
        check_floats(x)
        if scratch.tiles is not None and len(x) >= crossovers().bf16_tokens:
            return linear_bf16.ROWS_OF, *linear_bf16.prepared(x, scratch.tiles), scratch.threads
        if not scratch.holds_codes:
            quantize_rows(x, scratch.codes, scratch.factors)
        return ROWS_OF, scratch.codes, scratch.factors, scratch.threads
    linear.prepare(code, x, scratch)
    return linear.ROWS_OF, x, scratch, scratch.shape[0]


def can_share(matrices: Sequence[Matrix]) -> bool:
    """Return whether products with all these matrices prepare activations in the same way."""
    if all(matrix.takes_int8 for matrix in matrices):
        return True
    is_plain = not any(matrix.takes_int8 for matrix in matrices)
    return is_plain and len({matrix.format.prepare for matrix in matrices}) == 1


def linear_int8(code: int, weights: Any, bias: Any, x: Any, out: Any, scratch: Int8Scratch) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles."""
    rows, x, beside, threads = prepared(code, x, scratch)
    multiply_one(rows[code], weights, bias, x, beside, out, threads)


def _entry(block_format: BlockFormat, tokens: int) -> str:
    rows, at_once = ways_of(block_format, tokens, is_int8=True)
    return f"""
KERNEL linear_{tokens}({matrix_parameters("out")}, {INT8_PARAMETERS}, int columns, int tokens STAMP)
{{
    ENTER
    {space_of([], is_int8=True)}
    write_product<{block_format.name}, {rows}, {tokens}, {at_once}>(
        {matrix("out")}, {INT8}, columns, tokens, blockIdx.x, space);
    LEAVE
}}
"""


def _module(block_format: BlockFormat) -> CudaModule:
    entries = [_entry(block_format, tokens) for tokens in TOKENS]
    return CudaModule(f"linear_int8_{block_format.name.lower()}", source_of([block_format], entries))


@cache
def module_in_turn(code: int, shape: turns.ThreadShape) -> CudaModule:
    """Return the CUDA C++ code of the product for one token."""
    return turns.module("linear_in_turn", [FORMATS[code]], shape, ["out"])


MODULES = {code: _module(one) for code, one in FORMATS.items() if code in ON_GPU and one.block_elements > 1}


def takes_tiles(x: Any, scratch: Any) -> bool:
    """Return whether `linear_bf16` computes a product of `x` with this scratch."""
    return isinstance(scratch, Int8Scratch) and scratch.tiles is not None and len(x) >= crossovers().bf16_tokens


def launches(code: int, weights: Any, bias: Any, x: Any, out: Any, scratch: Int8Scratch) -> Sequence[Launch]:
    """Return the launches that quantise the activations, then multiply up to eight tokens at a time.

    If `takes_tiles`, returns the launches of `linear_bf16`.
    """
    tokens, columns = x.shape
    if takes_tiles(x, scratch):
        return linear_bf16.launches(code, weights, bias, x, out, scratch.tiles)
    arguments = (
        *matrix_arguments(weights, bias, out),
        scratch.codes,
        scratch.factors,
        np.int32(columns),
        np.int32(tokens),
    )
    quantized = quantize_launches(x, scratch.codes, scratch.factors)
    shape = turns.shape_of(columns) if tokens == 1 else None
    if shape is not None:
        grid = shape.blocks(-(-out.shape[1] // 2), scratch.threads), 1, 1
        module = module_in_turn(code, shape)
        return *quantized, CudaLaunch(module, "linear_in_turn", grid, shape.block, arguments[:-1])
    block, several = block_of(FORMATS[code], columns, is_int8=True), together(tokens)
    grid = blocks_of(out.shape[1], block, ways_of(FORMATS[code], several, is_int8=True)[0]), -(-tokens // several), 1
    return *quantized, CudaLaunch(MODULES[code], f"linear_{several}", grid, block, arguments)


def cuda_for(code: int) -> CudaKernel:
    """Return the CUDA version for weights of a format."""
    own = QUANTIZE, MODULES[code], module_in_turn(code, turns.ThreadShape(4, 1))
    return CudaKernel((*own, *linear_bf16.cuda_modules(code)), launches)


def _examples(block_format: BlockFormat, tokens: int, threads: int) -> Any:
    def examples(rng: np.random.Generator, size: int) -> Arguments:
        # The smaller examples are processed in one stretch of columns, and the largest in two.
        rows, columns = ROWS * (1 + size // 8), 256 * (1 + size // 40)
        if block_format.block_elements < 256:
            # The number of columns in examples must not be divisible by a large power of two.
            columns += 5 * block_format.block_elements
        matrix = InterleavedMatrix.of(QuantizedMatrix.of(block_format, floats(rng, rows, columns)))
        bias = floats(rng, rows if size % 2 or tokens == 1 else 0)
        x, out = floats(rng, tokens, columns), np.zeros((tokens, rows), np.float32)
        x[0, :BLOCK] = 0  # a block of zeros in the examples, because such a block has no scale
        return block_format.code, matrix.data, bias, x, out, Int8Scratch.of(tokens, columns, threads)

    return examples


def kernel_for(block_format: BlockFormat, tokens: int = 1, threads: int = 1) -> Kernel:
    """Return the kernel for interleaved weights of one format.

    Its examples have `tokens` tokens and use `threads` threads.
    """
    return Kernel(
        name=f"{block_format.name.lower()}_linear_int8",
        reference=reference,
        implementation=linear_int8,
        work=work,
        outputs=(4,),
        contract=contract("linear_int8"),
        examples=_examples(block_format, tokens, threads),
        narrow=narrow_interleaved,
        parallel=True,
        by_token=(3, 4),
        cuda=cuda_for(block_format.code),
    )


LINEAR_INT8: dict[int, Kernel] = {code: kernel_for(FORMATS[code]) for code in INTERLEAVABLE}
