"""Expert gated: compute gate, up and their SwiGLU in one call, for each expert of a token.

reference    calls `gated` for one expert after another
numba        calls `gated` for one expert after another
cuda         one launch for all experts, as in expert_linear
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from cbtop.compute.contracts import contract
from cbtop.compute.cuda import turns
from cbtop.compute.cuda.launches import CudaKernel, CudaLaunch, CudaModule, Launch
from cbtop.compute.cuda.products import (
    EXPERTS,
    FLOATS_OF_EXPERT,
    FLOATS_PARAMETERS,
    block_of,
    blocks_of,
    expert_arguments,
    expert_matrix,
    expert_out,
    expert_parameters,
    source_of,
    space_of,
    ways_of,
)
from cbtop.compute.kernels import activation, expert_linear, gated, linear, linear_int8
from cbtop.compute.kernels.base import FLOAT_BYTES, Arguments, Kernel, KernelWork, Part, floats
from cbtop.compute.kernels.expert_linear import (
    NO_BIAS,
    PAIRS,
    example_matrices,
    example_scratch,
    example_sizes,
    row_of,
    rows_of,
    step_of,
)
from cbtop.compute.kernels.expert_linear import launches as launches_of_one
from cbtop.compute.kernels.linear_int8 import Int8Scratch
from cbtop.compute.kernels.quantize_rows import CUDA as QUANTIZE
from cbtop.compute.kernels.quantize_rows import launches as quantize_launches
from cbtop.compute.quantization import FORMATS, ON_GPU
from cbtop.compute.quantization.base import BlockFormat
from cbtop.compute.quantization.interleaved import Matrix


def reference(
    gate_code: int, gate_weights: Any, up_code: int, up_weights: Any, experts: Any, x: Any, gate: Any, up: Any,
    out: Any, scratch: Any,
) -> None:  # fmt: skip
    """Compute `gated` for each pair p of a token and an expert, with x[p] and the weights of experts[p].

    gate, up and out are float32 (pairs, rows). weights, experts and x are the same as in `expert_linear`.
    """
    for kernel, call in parts((gate_code, gate_weights, up_code, up_weights, experts, x, gate, up, out, scratch)):
        kernel.reference(*call)


def expert_gated(*arguments: Any) -> None:
    """Compute the same as the function `reference`, in code that Numba compiles.

    For float products, the formats of gate and up must prepare x in the same way (`can_share`).
    """
    for call in _calls(arguments):
        gated.gated(*call)


def _calls(arguments: Arguments) -> list[Arguments]:
    """Return the arguments of a call of `gated` for each pair of a token and an expert."""
    gate_code, gate_weights, up_code, up_weights, experts, x, *outs, scratch = arguments
    return [
        (
            *(gate_code, gate_weights[int(expert)], NO_BIAS, up_code, up_weights[int(expert)], NO_BIAS),
            *(row_of(x, pair), *(one[pair : pair + 1] for one in outs), scratch),
        )
        for pair, expert in enumerate(experts)
    ]


def parts(arguments: Arguments) -> tuple[Part, ...]:
    """Return the kernels that a call consists of, each with its arguments.

    Each pair of a token and an expert has three kernels: two products, then SwiGLU.
    """
    return tuple(part for call in _calls(arguments) for part in gated.parts(call))


def _entry(block_format: BlockFormat) -> str:
    rows, at_once = ways_of(block_format, 1, is_int8=False)
    return f"""
KERNEL expert_gated({expert_parameters("gate")},
    {expert_parameters("up")},
    float* out, {EXPERTS}, {FLOATS_PARAMETERS}, int columns STAMP)
{{
    ENTER
    {space_of([block_format], is_int8=False)}
    write_gated<{block_format.name}, {rows}, 1, {at_once}>(
        {expert_matrix("gate")},
        {expert_matrix("up")},
        {expert_out("out", "gate")}, {FLOATS_OF_EXPERT}, columns, 1, space);
    LEAVE
}}
"""


@cache
def module_of(code: int) -> CudaModule:
    """Return the CUDA C++ of gate and up for unrounded activations. The weights have the format `code`."""
    block_format = FORMATS[code]
    name = f"expert_gated_{block_format.name.lower()}"
    return CudaModule(name, source_of([block_format], [_entry(block_format)]))


@cache
def module_in_turn(codes: tuple[int, int], shape: turns.ThreadShape) -> CudaModule:
    """Return the CUDA C++ for activations in int8."""
    formats = [FORMATS[code] for code in codes]
    return turns.module("gated_in_turn", formats, shape, ["gate", "up"], "out", of_experts=True)


def launches(*arguments: Any) -> Sequence[Launch]:
    """Return one launch for all pairs. For int8, return two launches: the first one quantises x.

    If activations are unrounded and the weights have two formats, returns two products and SwiGLU.
    """
    gate_code, gate_weights, up_code, up_weights, experts, x, gate, up, out, scratch = arguments
    (pairs, rows), columns = out.shape, x.shape[1]
    both = *expert_arguments(gate_weights, gate), *expert_arguments(up_weights, up)
    own = *both, out, experts, step_of(x)
    if isinstance(scratch, Int8Scratch):
        shape = turns.shape_of(columns)
        assert shape is not None, "model_on lets no such matrix take int8"
        given = *own, scratch.codes, scratch.factors, np.int32(columns)
        grid = shape.blocks(rows, -(-scratch.threads // pairs)), 1, pairs
        module = module_in_turn((gate_code, up_code), shape)
        turn = CudaLaunch(module, "expert_gated_in_turn", grid, shape.block, given)
        return *quantize_launches(x, scratch.codes, scratch.factors), turn
    if gate_code != up_code:
        after = activation.SWIGLU.cuda
        assert after is not None
        products = (gate_code, gate_weights, gate), (up_code, up_weights, up)
        apart = [one for code, w, found in products for one in launches_of_one(code, w, experts, x, found, scratch)]
        return *apart, *after.launches(gate, up, out)
    threads, deep, _ = block_of(FORMATS[gate_code], columns, is_int8=False)
    block = threads, max(deep, 2), 1
    grid = blocks_of(2 * rows, block, ways_of(FORMATS[gate_code], 1, is_int8=False)[0]), 1, pairs
    return (CudaLaunch(module_of(gate_code), "expert_gated", grid, block, (*own, x, np.int32(columns))),)


def narrow(arguments: Arguments, turn: int) -> Arguments:
    """Reduce a call to a few rows, and return its arguments. The selected rows are the same in all matrices."""
    gate_code, gate_weights, up_code, up_weights, experts, x, *outs, scratch = arguments
    rows = rows_of((gate_code, gate_weights, experts, x, outs[0], scratch), turn)
    gate_weights, up_weights = (np.ascontiguousarray(one[:, rows]) for one in (gate_weights, up_weights))
    return (*(gate_code, gate_weights, up_code, up_weights), experts, x, *(one[:, rows] for one in outs), scratch)


def work(gate: Matrix, up: Matrix, pairs: int) -> KernelWork:
    """Return the work of a call: its FLOP and bytes. The elements of a call are outputs, pairs x rows.

    `gate` and `up` are the matrices of one expert. A call reads both matrices of each pair and one row of
    activations.
    """
    after = activation.work()
    return KernelWork(
        flops_per_element=4.0 * gate.columns + after.flops_per_element,
        bytes_per_call=float(pairs * (gate.size_bytes + up.size_bytes)),
        bytes_per_element=(2.0 + gate.columns / (pairs * gate.rows)) * FLOAT_BYTES + after.bytes_per_element,
        dtype=linear.dtype_of(gate),
    )


def _examples(codes: Sequence[int], threads: int, is_int8: bool) -> Callable[..., Arguments]:
    def examples(rng: np.random.Generator, size: int) -> Arguments:
        rows, columns = example_sizes(codes, size, is_int8)
        matrices: list[Any] = []
        for code in codes:
            matrices += [code, example_matrices(FORMATS[code], rng, (rows, columns), is_int8)]
        experts = np.sort(rng.permutation(expert_linear.COUNT)[:PAIRS])
        # With this factor, the products in the examples are about 1.
        x = floats(rng, PAIRS, columns) * np.float32(columns**-0.5)
        outs = [np.zeros((PAIRS, rows), np.float32) for _ in range(3)]
        return (*matrices, experts, x, *outs, example_scratch(columns, threads, is_int8))

    return examples


def kernel_for(codes: tuple[int, int], threads: int = 1, is_int8: bool = False) -> Kernel:
    """Return the kernel for weights of two formats. It uses `threads` threads in its examples."""
    formats = dict.fromkeys(FORMATS[code].name.lower() for code in codes)
    return Kernel(
        name=f"{'_'.join(formats)}_expert_gated{'_int8' * is_int8}",
        reference=reference,
        implementation=expert_gated,
        work=work,
        outputs=(6, 7, 8),
        contract=contract("expert_gated"),
        examples=_examples(codes, threads, is_int8),
        narrow=narrow,
        parallel=True,
        parts=parts,
        by_token=(4, 5, 6, 7, 8),
        cuda=CudaKernel(_modules(codes, is_int8), launches) if ON_GPU.issuperset(codes) else None,
    )


def _modules(codes: tuple[int, int], is_int8: bool) -> tuple[CudaModule, ...]:
    gate, up = codes
    if is_int8:
        return QUANTIZE, module_in_turn(codes, turns.ThreadShape(4, 1))
    if gate == up:
        return (module_of(gate),)
    assert activation.SWIGLU.cuda is not None
    return (*(expert_linear.MODULES[code] for code in codes), *activation.SWIGLU.cuda.modules)


EXPERT_GATED: dict[int, Kernel] = {code: kernel_for((code, code)) for code in linear.LINEAR}
EXPERT_GATED_INT8: dict[int, Kernel] = {
    code: kernel_for((code, code), is_int8=True) for code in linear_int8.LINEAR_INT8
}
