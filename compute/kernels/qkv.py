"""QKV: compute queries, keys and values in one call. They are three products of the same activations.

reference    three calls of `linear`
numba        prepares the activations once (int8: their codes). One loop over threads computes the rows of all
             three. 2 vCPU Zen, 768 columns, int8: 0.84x of the time of three calls on one thread, 0.67x on two
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.cuda import turns
from cbtop.compute.cuda.launches import CudaKernel, CudaLaunch, CudaModule, Launch
from cbtop.compute.cuda.products import (
    FLOATS,
    FLOATS_PARAMETERS,
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
from cbtop.compute.kernels import linear, linear_bf16, linear_int8
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, Part
from cbtop.compute.kernels.linear_int8 import Int8Scratch, prepared
from cbtop.compute.kernels.products import multiply_three
from cbtop.compute.kernels.quantize_rows import CUDA as QUANTIZE
from cbtop.compute.kernels.quantize_rows import launches as quantize_launches
from cbtop.compute.quantization import FORMATS, ON_GPU
from cbtop.compute.quantization.interleaved import ROWS, Matrix


def reference(
    q_code: int, q_weights: Any, q_bias: Any, k_code: int, k_weights: Any, k_bias: Any, v_code: int, v_weights: Any,
    v_bias: Any, x: Any, q: Any, k: Any, v: Any, scratch: Any,
) -> None:  # fmt: skip
    """Set q, k and v to products of x.

    They are the results of `linear`, or of `linear_int8` if the scratch is an Int8Scratch. x is float32 (tokens,
    columns), and each result is float32 (tokens, rows).
    """
    q_part, k_part, v_part = (q_code, q_weights, q_bias), (k_code, k_weights, k_bias), (v_code, v_weights, v_bias)
    for kernel, call in parts((*q_part, *k_part, *v_part, x, q, k, v, scratch)):
        kernel.reference(*call)


def qkv(*arguments: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles.

    For float products, the formats of all three matrices must prepare x in the same way (`can_share`).
    """
    q_code, q_weights, q_bias, k_code, k_weights, k_bias, v_code, v_weights, v_bias, x, q, k, v, scratch = arguments
    rows, x, beside, threads = prepared(q_code, x, scratch)
    multiply_three(
        (rows[q_code], q_weights, q_bias, q),
        (rows[k_code], k_weights, k_bias, k),
        (rows[v_code], v_weights, v_bias, v),
        x,
        beside,
        threads,
    )


def _rows(code: int, tokens: int, is_int8: bool) -> int:
    """Return the number of rows that a thread computes."""
    return ways_of(FORMATS[code], tokens, is_int8, is_beside_others=True)[0]


def _entry(codes: Sequence[int], tokens: int, is_int8: bool) -> str:
    parameters, x = (INT8_PARAMETERS, INT8) if is_int8 else (FLOATS_PARAMETERS, FLOATS)
    formats, cases = [FORMATS[code] for code in dict.fromkeys(codes)], ""
    for block_format in formats:
        places = [str(place) for place, code in enumerate(codes) if code == block_format.code]
        rows, at_once = ways_of(block_format, tokens, is_int8, is_beside_others=True)
        of = f"{block_format.name}, {rows}, {tokens}, {at_once}"
        cases += f"""
    if ({" || ".join(f"part == {place}" for place in places)})
        write_product<{of}>(matrix, {x}, columns, tokens, block, space);"""
    every = ", ".join(str(_rows(code, tokens, is_int8)) for code in codes)
    return f"""
KERNEL qkv_{tokens}({matrix_parameters("q")},
    {matrix_parameters("k")},
    {matrix_parameters("v")},
    {parameters}, int columns, int tokens STAMP)
{{
    ENTER
    {space_of(formats, is_int8)}
    const Matrix all[3] = {{{matrix("q")}, {matrix("k")}, {matrix("v")}}};
    const int rows[3] = {{{every}}};  // for each thread along y
    Matrix matrix = all[0];
    int block = blockIdx.x, part = 0;
#pragma unroll
    for (int next = 1; next < 3; next++) {{
        int in_block = rows[next - 1] * blockDim.y, blocks = (all[next - 1].rows + in_block - 1) / in_block;
        if (part == next - 1 && block >= blocks) {{
            block -= blocks;
            matrix = all[next];
            part = next;
        }}
    }}{cases}
    LEAVE
}}
"""


@cache
def module_of(codes: tuple[int, int, int], is_int8: bool) -> CudaModule:
    """Return the CUDA C++ code for queries, keys and values of these formats."""
    formats = [FORMATS[code] for code in dict.fromkeys(codes)]
    name = "_".join(FORMATS[code].name.lower() for code in codes)
    entries = [_entry(codes, tokens, is_int8) for tokens in TOKENS]
    return CudaModule(f"qkv{'_int8' * is_int8}_{name}", source_of(formats, entries))


@cache
def module_in_turn(codes: tuple[int, int, int], shape: turns.ThreadShape) -> CudaModule:
    """Return the CUDA C++ code for one token in int8."""
    return turns.module("qkv_in_turn", [FORMATS[code] for code in codes], shape, ["q", "k", "v"])


def launches(*arguments: Any) -> Sequence[Launch]:
    """Return one launch. For int8, return two launches: the first one quantises x.

    If products use tiles, return the launches of one bfloat16 product for all three matrices, and the launches that
    separate its sums.
    """
    x, q, k, v, scratch = arguments[9:]
    matrices = (*arguments[:3], q), (*arguments[3:6], k), (*arguments[6:9], v)
    if linear_int8.takes_tiles(x, scratch):
        return linear_bf16.launches_of_three(matrices, x, scratch.tiles)
    codes: tuple[int, int, int] = (arguments[0], arguments[3], arguments[6])
    (tokens, columns), is_int8 = x.shape, isinstance(scratch, Int8Scratch)
    own = [one for _, *matrix in matrices for one in matrix_arguments(*matrix)]
    activations = (scratch.codes, scratch.factors) if is_int8 else (x,)
    before = quantize_launches(x, scratch.codes, scratch.factors) if is_int8 else ()
    shape = turns.shape_of(columns) if is_int8 and tokens == 1 else None
    if shape is not None:
        grid = shape.blocks(sum(-(-out.shape[1] // 2) for *_, out in matrices), scratch.threads), 1, 1
        module, given = module_in_turn(codes, shape), (*own, *activations, np.int32(columns))
        return *before, CudaLaunch(module, "qkv_in_turn", grid, shape.block, given)
    block, several = block_of(FORMATS[codes[0]], columns, is_int8, is_beside_others=True), together(tokens)
    blocks = [blocks_of(out.shape[1], block, _rows(code, several, is_int8)) for code, *_, out in matrices]
    one = CudaLaunch(
        module_of(codes, is_int8),
        f"qkv_{several}",
        (sum(blocks), -(-tokens // several), 1),
        block,
        (*own, *activations, np.int32(columns), np.int32(tokens)),
    )
    return *before, one


def cuda_for(codes: tuple[int, int, int], is_int8: bool) -> CudaKernel | None:
    """Return the CUDA version for weights of three formats, or None if one of them does not run on a GPU."""
    if not ON_GPU.issuperset(codes):
        return None
    many = [module for code in codes for module in linear_bf16.cuda_modules(code)] if is_int8 else []
    own = (QUANTIZE, module_in_turn(codes, turns.ThreadShape(4, 1))) if is_int8 else ()
    return CudaKernel((*own, module_of(codes, is_int8), *many), launches)


def parts(arguments: Arguments) -> tuple[Part, ...]:
    """Return the kernels that a call consists of, each with its arguments. They are three products."""
    *matrices, x, q, k, v, scratch = arguments
    kernels = linear_int8.LINEAR_INT8 if isinstance(scratch, Int8Scratch) else linear.LINEAR
    calls = [(*matrices[at : at + 3], x, out, scratch) for at, out in ((0, q), (3, k), (6, v))]
    return tuple((kernels[call[0]], call) for call in calls)


def narrow(arguments: Arguments, turn: int) -> Arguments:
    """Return the arguments of the same call for only a few rows of each matrix."""
    calls = [kernel.narrow(call, turn) for kernel, call in parts(arguments)]
    matrices = [one for call in calls for one in call[:3]]
    return (*matrices, arguments[9], *(call[4] for call in calls), arguments[13])


def work(matrices: Sequence[Matrix], biased_rows: int) -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are outputs, tokens x rows of all three
    matrices.

    Weights are read once per call, and x once per token.
    """
    columns, rows = matrices[0].columns, sum(matrix.rows for matrix in matrices)
    return KernelWork(
        flops_per_element=2.0 * columns + biased_rows / rows,
        bytes_per_call=sum(matrix.size_bytes for matrix in matrices) + biased_rows * FLOAT_BYTES,
        bytes_per_element=FLOAT_BYTES + FLOAT_BYTES * columns / rows,
        dtype=linear.dtype_of(matrices[0]),
    )


def _examples(codes: Sequence[int], tokens: int, threads: int, is_int8: bool) -> Any:
    kernel_for = linear_int8.kernel_for if is_int8 else linear.kernel_for

    def examples(rng: np.random.Generator, size: int) -> Arguments:
        calls = [kernel_for(FORMATS[code], tokens, threads).examples(rng, size) for code in codes]
        rows = len(calls[0][1])
        fewer = max(rows // 3 // ROWS, 1) * ROWS
        matrices, outs = [], []
        for (code, weights, bias, _, out, _), count in zip(calls, (rows, fewer, fewer), strict=True):
            matrices += [code, weights[:count], bias[:count]]
            outs.append(np.ascontiguousarray(out[:, :count]))
        return (*matrices, calls[0][3], *outs, calls[0][5])

    return examples


def kernel_for(codes: Sequence[int], tokens: int = 1, threads: int = 1, is_int8: bool = False) -> Kernel:
    """Return the kernel for weights of three formats. Its examples have `tokens` tokens and use `threads` threads."""
    formats = dict.fromkeys(FORMATS[code].name.lower() for code in codes)
    return Kernel(
        name=f"{'_'.join(formats)}_qkv{'_int8' * is_int8}",
        reference=reference,
        implementation=qkv,
        work=work,
        outputs=(10, 11, 12),
        contract=contract("qkv"),
        examples=_examples(codes, tokens, threads, is_int8),
        narrow=narrow,
        parallel=True,
        parts=parts,
        by_token=(9, 10, 11, 12),
        cuda=cuda_for((codes[0], codes[1], codes[2]), is_int8),
    )


QKV: dict[int, Kernel] = {code: kernel_for((code,) * 3) for code in linear.LINEAR}
QKV_INT8: dict[int, Kernel] = {code: kernel_for((code,) * 3, is_int8=True) for code in linear_int8.LINEAR_INT8}
