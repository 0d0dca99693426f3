"""Plan a decoder's pass: list every brick in order with the kernels that it would launch. No kernel runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from cbtop.compute.brick import ComputeBrick
from cbtop.compute.cuda.launches import CudaLaunch, Dimensions
from cbtop.compute.decoder import FAMILIES
from cbtop.compute.decoder.base import read_model
from cbtop.compute.decoder.decoder import Decoder
from cbtop.compute.decoder.int8 import exact_bytes, interleaved
from cbtop.compute.decoder.machine import Host
from cbtop.compute.decoder.on_gpu import GpuMachine, model_on
from cbtop.compute.errors import ComputeError
from cbtop.compute.gpu.device import BrickLaunches
from cbtop.compute.kernels.base import Arguments, Kernel
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.interleaved import InterleavedMatrix
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.profiler.profiler import BrickProfiler

CONTEXT = 2048
SMALL = 1 << 13  # In a plan, only arrays of at most this many elements are really allocated
PACKAGE = Path(__file__).resolve().parents[2]
# Number of multiprocessors of an H100. It determines into how many parts an attention context is split.
MULTIPROCESSORS = 132


@dataclass(frozen=True, slots=True)
class Planned:
    """A kernel of a brick. A pass launches the kernel `launches` times.

    `layer` is None outside the layers. `file` and `line` are the place of the kernel's source, relative to the
    repository. `grid` and `block` are set only on GPUs.
    """

    layer: int | None
    brick: str
    kernel: str
    file: str
    line: int
    grid: Dimensions | None = None
    block: Dimensions | None = None
    launches: int = 1


class ShapedArrays:
    """Replaces the GPU in a plan.

    A large array consists of a single zero that is broadcast to the array's shape.
    """

    multiprocessors = MULTIPROCESSORS

    def zeros(self, shape: Any, dtype: Any) -> Any:
        """Return zeros."""
        if int(np.prod(shape)) <= SMALL:
            return np.zeros(shape, dtype)
        return np.broadcast_to(np.zeros((), dtype), shape)

    def array(self, values: Any) -> Any:
        """Return zeros with the shape of `values`."""
        return self.zeros(values.shape, values.dtype)

    def pinned(self, shape: Any, dtype: Any) -> Any:
        """Return zeros."""
        return self.zeros(shape, dtype)

    def host(self, array: Any) -> Any:
        """Return `array`."""
        return array

    def planes(self, layout: PlaneLayout, matrix: QuantizedMatrix, experts: int | None = None) -> Any:
        """Return zeros that have the size of the matrix's planes."""
        blocks = matrix.data.size // matrix.format.block_bytes // (experts or 1)
        size = layout.size_bytes(blocks, matrix.format.block_elements)
        return self.zeros((size,) if experts is None else (experts, size), np.uint8)

    def require_room(self, size_bytes: int, what: str) -> None:
        """Do nothing, because a plan needs no memory."""

    def check(self) -> None:
        """Do nothing, because a plan runs no kernel."""


class _PlannedMachine(GpuMachine):
    def position(self, value: int) -> Any:
        return self._start

    def put(self, array: Any, values: Any) -> Any:
        """Return `array` unchanged, because no kernel reads it."""
        return array


def planned(path: Path, backend: str, tokens: int = 1) -> list[Planned]:
    """Return the launches of a pass of `tokens` tokens, in order, for the model at `path`.

    `backend` is one of BACKENDS. Raises ModelError if the model cannot run on that backend.
    """
    model = read_model(path, FAMILIES)
    profiler, context = BrickProfiler(enabled=False), min(CONTEXT, model.context_length)
    if tokens > context:
        raise ComputeError(f"{tokens} tokens do not fit a context of {context}")
    if backend == "cpu":
        model = interleaved(model, lambda one: InterleavedMatrix(one.format, one.data, one.columns), exact_bytes())
        decoder = Decoder(model, "numba", 1, profiler, context, machine=Host(1))
        launched: Callable[..., Iterator[tuple[Any, ...]]] = _numba_launches
    else:
        arrays: Any = ShapedArrays()
        machine = _PlannedMachine(arrays, context)
        decoder = Decoder(model_on(arrays, model, is_exact=False), "cuda", 1, profiler, context, machine=machine)
        launched = partial(_cuda_launches, BrickLaunches(decoder.int8_scratch))
    found: list[Planned] = []
    layers: list[int | None] = [None]

    @contextmanager
    def layer(index: int) -> Iterator[None]:
        layers.append(index)
        yield
        layers.pop()

    def run(brick: ComputeBrick, elements: int, *calls: Arguments) -> None:
        counts = Counter(Planned(layers[-1], brick.spec.name, *one) for one in launched(brick.kernels, calls))
        found.extend(_with_count(one, count) for one, count in counts.items())

    decoder.plan([0] * tokens, run, layer)
    return found


def _with_count(one: Planned, launches: int) -> Planned:
    return replace(one, launches=launches)


def _numba_launches(kernels: Sequence[Kernel], calls: Sequence[Arguments]) -> Iterator[tuple[str, str, int]]:
    for kernel in kernels:
        function: Any = kernel.implementation
        code = getattr(function, "py_func", function).__code__
        yield kernel.name, _file(code.co_filename), code.co_firstlineno


def _cuda_launches(
    launches: BrickLaunches, kernels: Sequence[Kernel], calls: tuple[Arguments, ...]
) -> Iterator[tuple[Any, ...]]:
    for kernel, one in launches.of(kernels, calls):
        assert kernel.cuda is not None
        code = kernel.cuda.launches.__code__
        if isinstance(one, CudaLaunch):
            yield one.entry, *_written(code.co_filename, code.co_firstlineno, one.entry), one.grid, one.block
        else:
            yield one.name, _file(code.co_filename), code.co_firstlineno


@cache
def _written(file: str, line: int, entry: str) -> tuple[str, int]:
    """Return the file and the line that define an entry. If the entry is made from a template, the line is `line`."""
    for number, text in enumerate(Path(file).read_text("utf-8").splitlines(), 1):
        if f"KERNEL {entry}(" in text:
            return _file(file), number
    return _file(file), line


@cache
def _file(path: str) -> str:
    whole = Path(path).resolve()
    return str(whole.relative_to(PACKAGE)) if whole.is_relative_to(PACKAGE) else whole.name
