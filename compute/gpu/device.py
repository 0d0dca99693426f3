"""Use one GPU through CuPy: its arrays, its modules and its launches."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from cbtop.compute.cuda.compiler import CompiledModule, compiled
from cbtop.compute.cuda.launches import CudaLaunch, CudaModule, Launch, LibraryCall
from cbtop.compute.errors import ComputeError
from cbtop.compute.gpu.prepared import PreparedLaunch, driver
from cbtop.compute.kernels.base import Arguments, Kernel
from cbtop.compute.kernels.linear_bf16 import ROUND_ROWS
from cbtop.compute.kernels.linear_int8 import Int8Scratch, takes_tiles
from cbtop.compute.kernels.quantize_rows import CUDA as QUANTIZE
from cbtop.compute.ptx_registry import PtxRegistry
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.profiler.definitions import KernelDefinition
from cbtop.profiler.device.cuda_calls import DriverError
from cbtop.profiler.device.launch_times import LaunchTimes

BACKEND = "cuda"
WEIGHTS_TOGETHER = 1 << 24  # number of weights that are converted to planes at a time
_log = logging.getLogger("cbtop")

STATIC_SHARED_BYTES, LOCAL_BYTES, REGISTERS = 1, 3, 4  # numbers of CUfunction_attribute


class Gpu:
    """The GPU with number `index`. Raises ComputeError if CuPy is not installed or the GPU does not exist."""

    def __init__(self, index: int = 0) -> None:
        try:
            import cupy
        except (ImportError, OSError) as error:
            raise ComputeError(f"no CuPy ({str(error).partition(chr(10))[0]}): pip install 'cbtop[cuda]'") from error
        self.cupy: Any = cupy
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise ComputeError(f"no GPU: {error}") from error
        if index >= count:
            raise ComputeError(f"no GPU {index}: there are {count}, from 0 on")
        self.device = cupy.cuda.Device(index)
        self.device.use()
        found = cupy.cuda.runtime.getDeviceProperties(index)
        self.name: str = found["name"].decode("utf-8", "replace")
        self.multiprocessors: int = found["multiProcessorCount"]
        self.architecture = f"sm_{found['major']}{found['minor']}"
        self._most_threads: int = found["maxThreadsPerMultiProcessor"]
        # kernels on older GPUs cannot wait for the previous launch by themselves (prelude.py)
        self._can_launch_early: bool = found["major"] >= 9
        self._turn = threading.RLock()
        self._times: LaunchTimes | None = None
        self._process = os.getpid()
        self._modules: dict[tuple[CudaModule, bool], tuple[Any, CompiledModule]] = {}
        self._functions: dict[tuple[CudaModule, str, bool], Any] = {}
        self._definitions: dict[tuple[Any, ...], KernelDefinition] = {}

    @cached_property
    def _driver(self) -> Any:
        return driver()

    @property
    def label(self) -> str:
        """The GPU's name on screens."""
        return f"{BACKEND}:{self.device.id}"

    @property
    def is_of_parent(self) -> bool:
        """Whether this process is a fork of the process that initialised CUDA. CUDA does not work in such a fork."""
        return os.getpid() != self._process

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Enter this context to use the GPU in this thread. Only one pass runs at a time.

        Between launches, the sampling module keeps values that another pass would overwrite.
        """
        with self._turn, self.device:
            yield

    def offset_ns(self, device_ns: int) -> int | None:
        """Return the host's clock minus the GPU's clock in ns (see `LaunchTimes.offset_ns`).

        Returns None if the difference is not known, or if the driver refuses to read its own clock.
        """
        try:
            with self.turn():
                if self._times is None:
                    self._times = LaunchTimes()
                return self._times.offset_ns(device_ns)
        except DriverError as error:
            _log.warning("cbtop: what ran in a step on %s is not known: %s", self.label, error)
            return None

    def check(self) -> None:
        """Raise ComputeError in a fork, where CUDA does not work."""
        if self.is_of_parent:
            raise ComputeError('a fork cannot use the GPU of its parent: start it by "spawn" or "forkserver"')

    def synchronize(self) -> None:
        """Wait until all launches have ended."""
        self.cupy.cuda.runtime.deviceSynchronize()

    def require_room(self, size_bytes: int, what: str) -> None:
        """Raise ComputeError if fewer than `size_bytes` bytes of the GPU's memory are free.

        `what` is the name of the data in the message.
        """
        self.cupy.get_default_memory_pool().free_all_blocks()
        free_bytes, all_bytes = self.device.mem_info
        if size_bytes > free_bytes:
            wanted, free, there = (f"{size / 1e9:.2f} GB" for size in (size_bytes, free_bytes, all_bytes))
            raise ComputeError(f"{what} take {wanted}; of {there} {free} are free on {self.name}")

    def array(self, values: Any) -> Any:
        """Return a copy of a host array on the device. Raises ComputeError if the copy does not fit."""
        try:
            return self.cupy.asarray(values)
        except self.cupy.cuda.memory.OutOfMemoryError as error:
            raise self._no_room(values.nbytes) from error

    def host(self, array: Any) -> Any:
        """Return a copy of a device array on the host, after waiting for all launches."""
        return self.cupy.asnumpy(array)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        """Return zeros on the device. Raises ComputeError if the zeros do not fit."""
        try:
            return self.cupy.zeros(shape, dtype)
        except self.cupy.cuda.memory.OutOfMemoryError as error:
            raise self._no_room(int(np.prod(shape)) * np.dtype(dtype).itemsize) from error

    def planes(self, layout: PlaneLayout, matrix: QuantizedMatrix, experts: int | None = None) -> Any:
        """Return the planes of a host matrix on the device, uint8 (size of all planes,).

        With `experts`, the matrix holds that number of experts with equal numbers of rows. The planes are then uint8
        (experts, size of one expert's planes). The conversion needs at most 0.2 GB of extra memory. Raises
        ComputeError if the planes do not fit.
        """
        block_format = matrix.format
        blocks = matrix.data.reshape(experts or 1, -1, block_format.block_bytes)
        count, together = blocks.shape[1], max(WEIGHTS_TOGETHER // block_format.block_elements, 1)
        planes = self.zeros((len(blocks), layout.size_bytes(count, block_format.block_elements)), np.uint8)
        for of_one, own in zip(blocks, planes, strict=True):
            for first in range(0, count, together):
                part = of_one[first : first + together]
                try:
                    layout.fill(self.cupy.asarray(part), own, first, count)
                except self.cupy.cuda.memory.OutOfMemoryError as error:
                    raise self._no_room(part.nbytes) from error
        return planes[0] if experts is None else planes

    def _no_room(self, size_bytes: int) -> ComputeError:
        self.cupy.get_default_memory_pool().free_all_blocks()
        free_bytes, all_bytes = self.device.mem_info
        wanted, free, there = (f"{size / 1e9:.2f} GB" for size in (size_bytes, free_bytes, all_bytes))
        return ComputeError(f"{wanted} more are wanted; of {there} {free} are free on {self.name}")

    def module(self, module: CudaModule, *, stamped: bool = False) -> CompiledModule:
        """Load `module` and return its compiled form for this GPU."""
        return self._loaded(module, stamped)[1]

    def _loaded(self, module: CudaModule, stamped: bool) -> tuple[Any, CompiledModule]:
        key = module, stamped
        if key not in self._modules:
            made = compiled(module.source, self.architecture, stamped=stamped)
            loaded = self.cupy.cuda.function.Module()
            loaded.load(made.cubin)
            PtxRegistry().register(module.name, made.ptx)
            self._modules[key] = loaded, made
        return self._modules[key]

    def function(self, module: CudaModule, entry: str, *, stamped: bool = False) -> Any:
        """Return the CuPy function of a module's entry."""
        key = module, entry, stamped
        if key not in self._functions:
            self._functions[key] = self._loaded(module, stamped)[0].get_function(entry)
        return self._functions[key]

    def launch(self, one: CudaLaunch | LibraryCall, *, is_early: bool = False) -> None:
        """Launch a kernel or a library call once, without stamps. See `prepared` for `is_early`."""
        self.prepared(one, is_early=is_early)()

    def prepared(
        self, one: CudaLaunch | LibraryCall, stamp: int | None = None, *, is_early: bool = False
    ) -> Callable[[], object]:
        """Return a function that launches `one` on CuPy's current stream.

        `stamp` is the address of two words, into which the kernel writes the times of its begin and its end.

        `is_early`: whether the kernel may be scheduled before the previous launch ends. The kernel itself then waits
        for that end (prelude.py).
        """
        if isinstance(one, LibraryCall):
            return one.call
        arguments = one.arguments if stamp is None else (*one.arguments, np.uint64(stamp))
        return self._prepared(one, arguments, stamped=stamp is not None, is_early=is_early and self._can_launch_early)

    def _prepared(
        self, one: CudaLaunch, arguments: tuple[Any, ...], *, stamped: bool, is_early: bool
    ) -> PreparedLaunch:
        function = self.function(one.module, one.entry, stamped=stamped)
        stream = self.cupy.cuda.get_current_stream().ptr
        return PreparedLaunch(self._driver, function.ptr, one, arguments, stream, is_early=is_early)

    def mark(self, module: CudaModule, address: int) -> Callable[[], object]:
        """Return a function that writes the time into the word at `address`.

        The kernel that writes the time waits for all earlier launches.
        """
        one = CudaLaunch(module, module.name, (1, 1, 1), (1, 1, 1), (np.uint64(address),))
        return self._prepared(one, one.arguments, stamped=True, is_early=False)

    def copy(self, target: Any, source: Any, kind: int) -> None:
        """Copy an array to or from the device, on the current stream. Host arrays must be in pinned memory."""
        ends = [one.ctypes.data if isinstance(one, np.ndarray) else one.data.ptr for one in (target, source)]
        stream = self.cupy.cuda.get_current_stream()
        self.cupy.cuda.runtime.memcpyAsync(*ends, source.nbytes, kind, stream.ptr)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a host array of zeros in pinned memory, so that copies on a stream do not block the host."""
        count, kind = int(np.prod(shape)), np.dtype(dtype)
        array = np.frombuffer(self.cupy.cuda.alloc_pinned_memory(count * kind.itemsize), kind, count).reshape(shape)
        array[...] = 0
        return array

    def definition(self, one: CudaLaunch) -> KernelDefinition:
        """Return the definition of a launch's kernel, with the attributes that the driver reports."""
        key = one.module, one.entry, one.grid, one.block, one.shared_bytes
        found = self._definitions.get(key)
        if found is None:
            function, ask = self.function(one.module, one.entry), self.cupy.cuda.driver.funcGetAttribute
            found = self._definitions[key] = KernelDefinition(
                one.entry,
                BACKEND,
                grid=one.grid,
                block=one.block,
                shared_memory_bytes=one.shared_bytes,
                ptx_hash=self.module(one.module).ptx_hash,
                static_shared_memory_bytes=ask(STATIC_SHARED_BYTES, function.ptr),
                registers=ask(REGISTERS, function.ptr),
                local_memory_bytes=ask(LOCAL_BYTES, function.ptr),
                occupancy_percent=_occupancy_percent(self.cupy, function, one, self._most_threads),
            )
        return found

    def run(self, kernel: Kernel, *arguments: Any) -> None:
        """Call a kernel once on the GPU. The kernel, or each of its parts, must have a CUDA version."""
        for one in launches_of(kernel, arguments):
            self.launch(one)


def _occupancy_percent(cupy: Any, function: Any, one: CudaLaunch, most_threads: int) -> int:
    """Return the percentage of a multiprocessor's threads that the launch can occupy at once."""
    threads = int(np.prod(one.block))
    blocks = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, threads, one.shared_bytes)
    return round(100 * int(blocks) * threads / most_threads)


class BrickLaunches:
    """Yields the launches of the bricks of a pass, in order.

    `space` holds the activations of products as int8 codes, or in bfloat16 if there are many tokens. `space` is None
    if no product takes int8.
    """

    def __init__(self, space: Int8Scratch | None = None) -> None:
        self._space = space
        self._coded: Any = None  # `space` holds the int8 codes of this array at present

    def of(self, kernels: Sequence[Kernel], calls: tuple[Arguments, ...]) -> Iterator[tuple[Kernel, Launch]]:
        """Yield each launch with its kernel.

        Two calls become one launch if they can be joined. If a kernel's output is the input of a product, the kernel
        also writes it as int8 codes (one token) or in bfloat16 (many tokens). The product then needs no conversion.
        """
        first = kernels[0]
        for kernel, arguments in zip(kernels, calls, strict=True):
            if any(arguments[place] is self._coded for place in kernel.outputs):
                self._coded = None  # the array has changed, so its int8 codes in `space` are old
        if len(calls) == 2 and kernels[1] is first and first.cuda is not None and first.cuda.together is not None:
            yield from ((first, one) for one in first.cuda.together(*calls))
            return
        for kernel, arguments in zip(kernels, calls, strict=True):
            output = arguments[kernel.outputs[-1]]
            # a brick that normalises the heads of queries and keys has two calls
            coded = self._coded_with(kernel, arguments, output) if len(calls) == 1 else None
            for one in launches_of(kernel, arguments) if coded is None else coded:
                if isinstance(one, CudaLaunch) and (one.module is QUANTIZE or one.entry == ROUND_ROWS):
                    if one.arguments[0] is self._coded:
                        continue
                    self._coded = None
                yield kernel, one
            if coded is not None:
                self._coded = output

    def _coded_with(self, kernel: Kernel, arguments: Arguments, output: Any) -> Sequence[Launch] | None:
        """Return launches of `kernel` that also write `output` in the form that the next product takes.

        The form is bfloat16 if the next product uses tiles (`takes_tiles`), otherwise int8 codes. Returns None if the
        kernel has no such launches.
        """
        cuda, space = kernel.cuda, self._space
        if cuda is None or space is None:
            return None
        if takes_tiles(output, space):
            return None if cuda.with_bf16 is None else cuda.with_bf16(*arguments, space.tiles.x)
        if cuda.with_codes is not None and len(output) == 1:
            return cuda.with_codes(*arguments, space.codes, space.factors)
        return None


def launches_of(kernel: Kernel, arguments: Arguments) -> Iterator[CudaLaunch | LibraryCall]:
    """Yield the launches of a call. If a fused kernel has no CUDA version, its parts are launched.

    Raises ComputeError if a part has no CUDA version either.
    """
    if kernel.cuda is not None:
        yield from kernel.cuda.launches(*arguments)
        return
    if kernel.parts is None:
        raise ComputeError(f"{kernel.name} runs on no GPU yet: take --backend cpu")
    for part, call in kernel.parts(arguments):
        yield from launches_of(part, call)
