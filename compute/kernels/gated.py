"""Gated: compute gate, up and their SwiGLU in one call. gate and up are products of the same activations.

reference    two calls of `linear`, and `swiglu`
numba        prepares the activations once (int8: their codes). One loop over threads computes the rows and SwiGLU.
             0.99x the time of three calls on one thread, 0.74x on two (2 vCPU Zen, 2 x 3,840 rows of 768
             columns, int8)
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
from cbtop.compute.kernels import activation, linear, linear_bf16, linear_int8
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, Part
from cbtop.compute.kernels.linear_int8 import Int8Scratch, prepared
from cbtop.compute.kernels.products import multiply_gated
from cbtop.compute.kernels.quantize_rows import CUDA as QUANTIZE
from cbtop.compute.kernels.quantize_rows import launches as quantize_launches
from cbtop.compute.quantization import FORMATS, ON_GPU
from cbtop.compute.quantization.base import BlockFormat
from cbtop.compute.quantization.interleaved import Matrix


def reference(
    gate_code: int, gate_weights: Any, gate_bias: Any, up_code: int, up_weights: Any, up_bias: Any, x: Any, gate: Any,
    up: Any, out: Any, scratch: Any,
) -> None:  # fmt: skip
    """Set `gate` and `up` to products of x, and `out` to the SwiGLU of `gate` and `up`.

    The products are computed as in `linear`, or as in `linear_int8` if the scratch is an Int8Scratch. x is float32
    (tokens, columns). Both matrices have the same number of rows.
    """
    gate_part, up_part = (gate_code, gate_weights, gate_bias), (up_code, up_weights, up_bias)
    for kernel, call in parts((*gate_part, *up_part, x, gate, up, out, scratch)):
        kernel.reference(*call)


def gated(*arguments: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles.

    For float products, the formats of gate and up must prepare x in the same way (`can_share`).
    """
    gate_code, gate_weights, gate_bias, up_code, up_weights, up_bias, x, gate, up, out, scratch = arguments
    rows, x, beside, threads = prepared(gate_code, x, scratch)
    multiply_gated(
        (rows[gate_code], gate_weights, gate_bias, gate),
        (rows[up_code], up_weights, up_bias, up),
        x,
        beside,
        out,
        threads,
    )


def _entry(block_format: BlockFormat, tokens: int, is_int8: bool) -> str:
    rows, at_once = ways_of(block_format, tokens, is_int8)
    parameters, x = (INT8_PARAMETERS, INT8) if is_int8 else (FLOATS_PARAMETERS, FLOATS)
    return f"""
KERNEL gated_{tokens}({matrix_parameters("gate")},
    {matrix_parameters("up")},
    float* out, {parameters}, int columns, int tokens STAMP)
{{
    ENTER
    {space_of([block_format], is_int8)}
    write_gated<{block_format.name}, {rows}, {tokens}, {at_once}>(
        {matrix("gate")}, {matrix("up")},
        out, {x}, columns, tokens, space);
    LEAVE
}}
"""


@cache
def module_in_turn(codes: tuple[int, int], shape: turns.ThreadShape) -> CudaModule:
    """Return the CUDA C++ for one token in int8."""
    formats = [FORMATS[code] for code in codes]
    return turns.module("gated_in_turn", formats, shape, ["gate", "up"], "out")


@cache
def module_of(code: int, is_int8: bool) -> CudaModule:
    """Return the CUDA C++ for gate and up of a format."""
    block_format = FORMATS[code]
    entries = [_entry(block_format, tokens, is_int8) for tokens in TOKENS]
    name = f"gated{'_int8' * is_int8}_{block_format.name.lower()}"
    return CudaModule(name, source_of([block_format], entries))


def launches(*arguments: Any) -> Sequence[Launch]:
    """Return one launch. For int8, return two launches: the first one quantises x.

    If products use tiles, or if the weights have two formats, returns the launches of two products and SwiGLU.
    """
    gate_code, gate_weights, gate_bias, up_code, up_weights, up_bias, x, gate, up, out, scratch = arguments
    matrices = (gate_code, gate_weights, gate_bias, gate), (up_code, up_weights, up_bias, up)
    (tokens, columns), is_int8 = x.shape, isinstance(scratch, Int8Scratch)
    after = activation.SWIGLU.cuda
    assert after is not None
    if linear_int8.takes_tiles(x, scratch):
        return *linear_bf16.launches_of_several(matrices, x, scratch.tiles), *after.launches(gate, up, out)
    shape = turns.shape_of(columns) if is_int8 and tokens == 1 else None
    if shape is not None:
        grid = shape.blocks(out.shape[1], scratch.threads), 1, 1
        own = [one for _, *matrix in matrices for one in matrix_arguments(*matrix)]
        given = *own, out, scratch.codes, scratch.factors, np.int32(columns)
        module = module_in_turn((gate_code, up_code), shape)
        turn = CudaLaunch(module, "gated_in_turn", grid, shape.block, given)
        return *quantize_launches(x, scratch.codes, scratch.factors), turn
    if gate_code != up_code:
        product = linear_int8.launches if is_int8 else linear.launches
        both = [product(code, weights, bias, x, found, scratch) for code, weights, bias, found in matrices]
        return *both[0], *both[1], *after.launches(gate, up, out)
    own = [one for _, *matrix in matrices for one in matrix_arguments(*matrix)]
    activations = (scratch.codes, scratch.factors) if is_int8 else (x,)
    before = quantize_launches(x, scratch.codes, scratch.factors) if is_int8 else ()
    block_format, several = FORMATS[gate_code], together(tokens)
    threads, deep, _ = block_of(block_format, columns, is_int8)
    block = threads, max(deep, 2), 1
    in_thread, _ = ways_of(block_format, several, is_int8)
    one = CudaLaunch(
        module_of(gate_code, is_int8),
        f"gated_{several}",
        (blocks_of(2 * out.shape[1], block, in_thread), -(-tokens // several), 1),
        block,
        (*own, out, *activations, np.int32(columns), np.int32(tokens)),
    )
    return *before, one


def with_bf16(*arguments: Any) -> Sequence[Launch]:
    """Return the launches for many tokens that also write `out` as bfloat16.

    They write the bfloat16 numbers to the beginning of the last argument, `rounded`.
    """
    *matrices, x, gate, up, out, scratch, rounded = arguments
    both = (*matrices[:3], gate), (*matrices[3:], up)
    after = activation.SWIGLU.cuda
    assert after is not None
    assert after.with_bf16 is not None
    return *linear_bf16.launches_of_several(both, x, scratch.tiles), *after.with_bf16(gate, up, out, rounded)


def cuda_for(codes: tuple[int, int], is_int8: bool) -> CudaKernel | None:
    """Return the CUDA version for weights of two formats, or None if one of them does not run on a GPU."""
    if not ON_GPU.issuperset(codes):
        return None
    gate, up = codes
    assert activation.SWIGLU.cuda is not None
    modules = list(activation.SWIGLU.cuda.modules)
    for code in dict.fromkeys(codes):
        if gate != up:
            modules.append(linear_int8.MODULES[code] if is_int8 else linear.MODULES[code])
        if is_int8:
            modules += [QUANTIZE, *linear_bf16.cuda_modules(code)]
    if is_int8:
        modules.append(module_in_turn(codes, turns.ThreadShape(4, 1)))
    if gate == up:
        modules.append(module_of(gate, is_int8))
    return CudaKernel(tuple(dict.fromkeys(modules)), launches, with_bf16=with_bf16 if is_int8 else None)


def parts(arguments: Arguments) -> tuple[Part, ...]:
    """Return the kernels of a call with their arguments: both products, then SwiGLU."""
    *matrices, x, gate, up, out, scratch = arguments
    kernels = linear_int8.LINEAR_INT8 if isinstance(scratch, Int8Scratch) else linear.LINEAR
    calls = [(*matrices[at : at + 3], x, product, scratch) for at, product in ((0, gate), (3, up))]
    return (*((kernels[call[0]], call) for call in calls), (activation.SWIGLU, (gate, up, out)))


def narrow(arguments: Arguments, turn: int) -> Arguments:
    """Reduce a call to a few rows, and return its arguments. The selected rows are the same in both matrices."""
    (gate_kernel, gate_call), (up_kernel, up_call), _ = parts(arguments)
    gate, up = gate_kernel.narrow(gate_call, turn), up_kernel.narrow(up_call, turn)
    with_out = gate_kernel.narrow((*gate_call[:4], arguments[9], gate_call[5]), turn)
    return (*gate[:3], *up[:3], arguments[6], gate[4], up[4], with_out[4], arguments[10])


def work(gate: Matrix, up: Matrix, biases: int) -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are outputs, tokens x rows.

    `biases` is the number of matrices with a bias. Weights are read once per call, and x once per token.
    """
    after = activation.work()
    return KernelWork(
        flops_per_element=4.0 * gate.columns + biases + after.flops_per_element,
        bytes_per_call=gate.size_bytes + up.size_bytes + biases * gate.rows * FLOAT_BYTES,
        bytes_per_element=(2.0 + gate.columns / gate.rows) * FLOAT_BYTES + after.bytes_per_element,
        dtype=linear.dtype_of(gate),
    )


def _examples(codes: Sequence[int], tokens: int, threads: int, is_int8: bool) -> Any:
    kernel_for = linear_int8.kernel_for if is_int8 else linear.kernel_for

    def examples(rng: np.random.Generator, size: int) -> Arguments:
        gate, up = (kernel_for(FORMATS[code], tokens, threads).examples(rng, size) for code in codes)
        # With this factor, the products in the examples are about 1, so that the gate is neither fully open nor
        # closed.
        gate[3][:] *= np.float32(gate[3].shape[1] ** -0.5)
        return (*gate[:3], *up[:3], gate[3], gate[4], up[4], np.zeros_like(gate[4]), gate[5])

    return examples


def kernel_for(codes: Sequence[int], tokens: int = 1, threads: int = 1, is_int8: bool = False) -> Kernel:
    """Return the kernel for weights of two formats. Its examples have `tokens` tokens and use `threads` threads."""
    formats = dict.fromkeys(FORMATS[code].name.lower() for code in codes)
    return Kernel(
        name=f"{'_'.join(formats)}_gated{'_int8' * is_int8}",
        reference=reference,
        implementation=gated,
        work=work,
        outputs=(7, 8, 9),
        contract=contract("gated"),
        examples=_examples(codes, tokens, threads, is_int8),
        narrow=narrow,
        parallel=True,
        parts=parts,
        by_token=(6, 7, 8, 9),
        cuda=cuda_for((codes[0], codes[1]), is_int8),
    )


GATED: dict[int, Kernel] = {code: kernel_for((code,) * 2) for code in linear.LINEAR}
GATED_INT8: dict[int, Kernel] = {code: kernel_for((code,) * 2, is_int8=True) for code in linear_int8.LINEAR_INT8}
