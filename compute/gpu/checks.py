"""Check a brick on a GPU.

Its launches run there, and the references of its kernels run on the host with the same input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from cbtop.compute.brick import ComputeBrick
from cbtop.compute.checks import AssertionResult
from cbtop.compute.gpu.device import BrickLaunches, Gpu
from cbtop.compute.jit.halves import from_bits
from cbtop.compute.kernels.base import Arguments, Kernel
from cbtop.compute.kernels.linear import CHECKED_ROWS
from cbtop.compute.kernels.linear_int8 import Int8Scratch
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.interleaved import interleave

Matrices = Mapping[int, QuantizedMatrix]  # device address of a matrix's planes -> the same matrix on the host


def checked(
    gpu: Gpu, matrices: Matrices, launches: BrickLaunches, brick: ComputeBrick, calls: tuple[Arguments, ...]
) -> Iterator[tuple[str, str, AssertionResult]]:
    """Launch a brick as in a pass of `launches`, then compare each kernel with its reference.

    Yields (brick, assertion, finding).
    """
    every = [{place: gpu.host(call[place]) for place in kernel.outputs} for kernel, call in _pairs(brick, calls)]
    for _, one in launches.of(brick.kernels, calls):
        gpu.launch(one)
    for (kernel, arguments), before in zip(_pairs(brick, calls), every, strict=True):
        after = {place: gpu.host(arguments[place]) for place in kernel.outputs}
        for output, rows, expected in _compared(gpu, matrices, kernel, arguments, before, after):
            for assertion in brick.spec.assertions:
                met = rows if assertion.needs_reference else output
                yield brick.spec.name, assertion.name, assertion.evaluate(from_bits(met), from_bits(expected))


def _pairs(brick: ComputeBrick, calls: tuple[Arguments, ...]) -> Iterator[tuple[Kernel, Arguments]]:
    return zip(brick.kernels, calls, strict=True)


def _compared(
    gpu: Gpu,
    matrices: Matrices,
    kernel: Kernel,
    arguments: Arguments,
    before: Mapping[int, Any],
    after: Mapping[int, Any],
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield three arrays for each output of a kernel.

    The arrays are the whole output, the rows of the output that are compared, and the same rows of the reference's
    output.
    """
    if kernel.parts is not None:
        # Compare a few rows of each product. Other outputs of the fused kernel are compared completely.
        for part, call in kernel.parts(arguments):
            own = {place: gpu.host(call[place]) for place in part.outputs}
            yield from _compared(gpu, matrices, part, call, own, own)
        return
    given = [before[place] if place in before else on_host(gpu, one) for place, one in enumerate(arguments)]
    names = kernel.contract.arguments
    if "start" in names:
        given[names.index("start")] = int(given[names.index("start")][0])
    shown = dict(after)
    if "code" in names:  # the kernel multiplies by a matrix or looks up its rows, so only a few rows are compared
        matrix = matrices[arguments[names.index("weights")].data.ptr]
        given[names.index("weights")] = matrix.data
        if "bias" in names:
            given, shown = _of_some_rows(given, shown, names)
    kernel.reference(*given)
    for place in kernel.outputs:
        yield after[place], shown[place], given[place]


def _of_some_rows(
    given: list[Any], after: dict[int, Any], names: tuple[str, ...]
) -> tuple[list[Any], dict[int, Any]]:
    """Reduce a product to CHECKED_ROWS rows, spread over the matrix, and return its arguments and outputs.

    For an int8 product, the rows are interleaved.
    """
    code, weights, bias, out = (names.index(name) for name in ("code", "weights", "bias", "out"))
    count = len(given[weights])
    rows = np.linspace(0, count - 1, min(CHECKED_ROWS, count)).astype(np.int64)
    some, taken = list(given), np.ascontiguousarray(given[weights][rows])
    if any(isinstance(one, Int8Scratch) for one in given):
        interleave(FORMATS[given[code]], taken)
    some[weights] = taken
    some[bias] = given[bias][rows] if given[bias].size else given[bias]
    some[out] = given[out][:, rows]
    return some, {place: values[:, rows] for place, values in after.items()}


def on_host(gpu: Gpu, one: Any) -> Any:
    """Return an argument in the form that the reference of a kernel takes."""
    if isinstance(one, gpu.cupy.ndarray):
        return gpu.host(one)
    if is_dataclass(one) and not isinstance(one, type):
        values = {field.name: getattr(one, field.name) for field in fields(one)}
        return replace(one, **{name: on_host(gpu, value) for name, value in values.items()})
    return one
