"""Expert linear: y = W x for each of a token's experts, with the weights of the experts that a router has chosen.

reference    calls `linear` for one expert after another
numba        calls `linear` for one expert after another
cuda         one launch for all experts. Each block reads its expert's number, so a graph can run with other experts

A pair is a token and one of its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.cuda import turns
from cbtop.compute.cuda.launches import CudaKernel, CudaLaunch, CudaModule
from cbtop.compute.cuda.products import (
    EXPERTS,
    FLOATS_OF_EXPERT,
    FLOATS_PARAMETERS,
    block_of,
    blocks_of,
    expert_arguments,
    expert_matrix,
    expert_parameters,
    source_of,
    space_of,
    ways_of,
)
from cbtop.compute.kernels import linear, linear_int8
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, Part, floats
from cbtop.compute.kernels.linear_int8 import Int8Scratch
from cbtop.compute.kernels.quantize_rows import CUDA as QUANTIZE
from cbtop.compute.kernels.quantize_rows import launches as quantize_launches
from cbtop.compute.quantization import FORMATS, ON_GPU
from cbtop.compute.quantization.base import BlockFormat, QuantizedMatrix
from cbtop.compute.quantization.interleaved import ROWS, InterleavedMatrix, Matrix

NO_BIAS = np.zeros(0, np.float32)
COUNT, PAIRS = 5, 3


def reference(code: int, weights: Any, experts: Any, x: Any, out: Any, scratch: Any) -> None:
    """Set out[p] to the product of x[p] and weights[experts[p]] for each pair p of a token and an expert.

    The product is computed by `linear`, or by `linear_int8` if the scratch is an Int8Scratch.

    weights: uint8 (all experts, rows, row_bytes). experts: int64 (pairs,). x: float32 (pairs, columns), or one row
    for all pairs. out: float32 (pairs, rows).
    """
    for kernel, call in parts((code, weights, experts, x, out, scratch)):
        kernel.reference(*call)


def expert_linear(code: int, weights: Any, experts: Any, x: Any, out: Any, scratch: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles."""
    for kernel, call in parts((code, weights, experts, x, out, scratch)):
        kernel.implementation(*call)


def parts(arguments: Arguments) -> tuple[Part, ...]:
    """Return the kernels of a call with their arguments: one product for each pair of a token and an expert."""
    code, weights, experts, x, out, scratch = arguments
    kernel = (linear_int8.LINEAR_INT8 if isinstance(scratch, Int8Scratch) else linear.LINEAR)[code]
    return tuple(
        (kernel, (code, weights[int(expert)], NO_BIAS, row_of(x, pair), out[pair : pair + 1], scratch))
        for pair, expert in enumerate(experts)
    )


def row_of(x: Any, pair: int) -> Any:
    """Return the activations of a pair of a token and an expert, as an array (1, columns)."""
    return x[pair : pair + 1] if len(x) > 1 else x


def _entry(block_format: BlockFormat) -> str:
    rows, at_once = ways_of(block_format, 1, is_int8=False)
    return f"""
KERNEL expert_linear({expert_parameters("out")}, {EXPERTS}, {FLOATS_PARAMETERS}, int columns STAMP)
{{
    ENTER
    {space_of([block_format], is_int8=False)}
    write_product<{block_format.name}, {rows}, 1, {at_once}>(
        {expert_matrix("out")}, {FLOATS_OF_EXPERT}, columns, 1, blockIdx.x, space);
    LEAVE
}}
"""


def _module(block_format: BlockFormat) -> CudaModule:
    return CudaModule(f"expert_linear_{block_format.name.lower()}", source_of([block_format], [_entry(block_format)]))


MODULES = {code: _module(one) for code, one in FORMATS.items() if code in ON_GPU}


@cache
def module_in_turn(code: int, shape: turns.ThreadShape) -> CudaModule:
    """Return the CUDA C++ for activations in int8."""
    return turns.module("linear_in_turn", [FORMATS[code]], shape, ["out"], of_experts=True)


def step_of(x: Any) -> Any:
    """Return the distance between the activations of two neighbouring pairs, in elements."""
    return np.int32(x.shape[1] if len(x) > 1 else 0)


def launches(code: int, weights: Any, experts: Any, x: Any, out: Any, scratch: Any) -> Sequence[CudaLaunch]:
    """Return one launch for all pairs. For int8, return two launches: the first one quantises x."""
    (pairs, rows), columns = out.shape, x.shape[1]
    own = *expert_arguments(weights, out), experts, step_of(x)
    if not isinstance(scratch, Int8Scratch):
        block = block_of(FORMATS[code], columns, is_int8=False)
        grid = blocks_of(rows, block, ways_of(FORMATS[code], 1, is_int8=False)[0]), 1, pairs
        return (CudaLaunch(MODULES[code], "expert_linear", grid, block, (*own, x, np.int32(columns))),)
    shape = turns.shape_of(columns)
    assert shape is not None, "model_on lets no such matrix take int8"
    arguments = *own, scratch.codes, scratch.factors, np.int32(columns)
    grid = shape.blocks(-(-rows // 2), -(-scratch.threads // pairs)), 1, pairs
    turn = CudaLaunch(module_in_turn(code, shape), "expert_linear_in_turn", grid, shape.block, arguments)
    return *quantize_launches(x, scratch.codes, scratch.factors), turn


def work(weight: Matrix, pairs: int, rows_of_x: int) -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are outputs, pairs x rows. `weight` is
    the matrix of one expert.

    The weights and the activations of each pair are read once per call.
    """
    return KernelWork(
        flops_per_element=2.0 * weight.columns,
        bytes_per_call=float(pairs * weight.size_bytes),
        bytes_per_element=FLOAT_BYTES * (1.0 + rows_of_x * weight.columns / (pairs * weight.rows)),
        dtype=linear.dtype_of(weight),
    )


def narrow(arguments: Arguments, turn: int) -> Arguments:
    """Reduce a call to a few rows, and return its arguments. The selected rows are the same for all experts."""
    code, weights, experts, x, out, scratch = arguments
    rows = rows_of(arguments, turn)
    return code, np.ascontiguousarray(weights[:, rows]), experts, x, out[:, rows], scratch


def rows_of(arguments: Arguments, turn: int) -> Any:
    """Return the numbers of the rows that `narrow` keeps."""
    code, weights, _, x, out, scratch = arguments
    kernel = (linear_int8.LINEAR_INT8 if isinstance(scratch, Int8Scratch) else linear.LINEAR)[code]
    return kernel.narrow((code, np.arange(weights.shape[1]), NO_BIAS, x, out, scratch), turn)[1]


def example_matrices(
    block_format: BlockFormat, rng: np.random.Generator, shape: tuple[int, int], is_int8: bool
) -> Any:
    """Return weights of COUNT experts, uint8 (experts, rows, row_bytes), interleaved for int8.

    `shape` is rows, columns.
    """
    rows, columns = shape
    matrix = QuantizedMatrix.of(block_format, floats(rng, COUNT * rows, columns))
    return (InterleavedMatrix.of(matrix) if is_int8 else matrix).data.reshape(COUNT, rows, -1)


def example_sizes(codes: Sequence[int], size: int, is_int8: bool) -> tuple[int, int]:
    """Return numbers of rows and columns that are valid in all of the given formats."""
    rows = ROWS * (1 + size // 16) if is_int8 else size + 3
    columns = 256 * (1 + size // 128)
    longest = max(32, *(FORMATS[code].block_elements for code in codes))
    if longest < 256:
        columns += 5 * longest  # the number of columns must not be divisible by a large power of two
    return rows, columns


def _examples(block_format: BlockFormat, threads: int, is_int8: bool) -> Callable[..., Arguments]:
    def examples(rng: np.random.Generator, size: int) -> Arguments:
        rows, columns = example_sizes([block_format.code], size, is_int8)
        weights = example_matrices(block_format, rng, (rows, columns), is_int8)
        experts = np.sort(rng.permutation(COUNT)[:PAIRS])
        x, out = floats(rng, PAIRS, columns), np.zeros((PAIRS, rows), np.float32)
        return block_format.code, weights, experts, x, out, example_scratch(columns, threads, is_int8)

    return examples


def example_scratch(columns: int, threads: int, is_int8: bool) -> Any:
    """Return the scratch memory that products in examples use for activations."""
    return Int8Scratch.of(PAIRS, columns, threads) if is_int8 else np.zeros((threads, columns), np.float32)


def kernel_for(block_format: BlockFormat, threads: int = 1, is_int8: bool = False) -> Kernel:
    """Return the kernel for weights of one format. It uses `threads` threads in its examples."""
    code = block_format.code
    cuda = None
    if code in ON_GPU:
        modules = (QUANTIZE, module_in_turn(code, turns.ThreadShape(4, 1))) if is_int8 else (MODULES[code],)
        cuda = CudaKernel(modules, launches)
    return Kernel(
        name=f"{block_format.name.lower()}_expert_linear{'_int8' * is_int8}",
        reference=reference,
        implementation=expert_linear,
        work=work,
        outputs=(4,),
        contract=contract("expert_linear"),
        examples=_examples(block_format, threads, is_int8),
        narrow=narrow,
        parallel=True,
        parts=parts,
        by_token=(2, 3, 4),
        cuda=cuda,
    )


EXPERT_LINEAR: dict[int, Kernel] = {code: kernel_for(FORMATS[code]) for code in linear.LINEAR}
EXPERT_LINEAR_INT8: dict[int, Kernel] = {
    code: kernel_for(FORMATS[code], is_int8=True) for code in linear_int8.LINEAR_INT8
}
