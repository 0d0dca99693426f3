"""Find the library that launches kernels on a GPU: torch, or CuPy if torch cannot launch them.

Both compile kernels with NVRTC.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cbtop.compute.errors import ComputeError

Run = Callable[[], object]

# Precision -> (cudaDataType_t, cublasComputeType_t). CuPy has no names for the values of bfloat16.
_CUBLAS_TYPES = {"bfloat16": (14, 68), "float16": (2, 68), "tf32": (0, 77), "float32": (0, 68)}
_CUBLAS_TRANSPOSED, _CUBLAS_AS_IT_IS, _CUBLAS_DEFAULT_ALGORITHM = 1, 0, -1


@dataclass(frozen=True, slots=True)
class GpuProperties:
    """The name and the properties of a GPU.

    Measurements depend on the properties, and the uuid identifies the GPU.
    """

    name: str
    uuid: str
    multiprocessors: int
    l2_bytes: int
    free_bytes: int


class Library(Protocol):
    """The functions that the measurements need, from torch or CuPy.

    The functions act on the GPU that `use` selected last.
    """

    name: str

    def count(self) -> int: ...

    def use(self, index: int) -> GpuProperties: ...

    def buffer(self, size_bytes: int) -> Any:
        """Return a buffer of random bits on the GPU."""

    def kernel(self, source: str, name: str) -> Callable[[int, int, list[Any]], object]:
        """Return the kernel `name` of `source` as a function of its grid, its block and its arguments."""

    def product(self, precision: str, size: int) -> Run:
        """Return a function that multiplies two square matrices of random numbers with cuBLAS.

        The second matrix is transposed.
        """

    def seconds(self, run: Run, repeats: int) -> float:
        """Return how many seconds the GPU took for `repeats` runs, by its own clock."""


def gpu_library() -> Library:
    """Return torch if it can use a GPU and compile kernels, otherwise CuPy.

    If CuPy cannot use a GPU, returns torch even if it cannot compile kernels. Raises ComputeError if neither can use
    a GPU.
    """
    found: Library | None = None
    try:
        import torch

        if torch.version.cuda and torch.cuda.is_available():
            found = Torch(torch)
            if hasattr(torch.cuda, "_compile_kernel"):
                return found
    except (ImportError, OSError):
        pass  # try CuPy next
    try:
        import cupy

        if cupy.cuda.is_available():
            return Cupy(cupy)
    except (ImportError, OSError):
        pass
    if found is None:
        raise ComputeError("neither torch nor CuPy can use one here")
    return found


class Torch:  # pragma: no cover - gpu
    """A CUDA build of torch, as the library that launches kernels."""

    name = "torch"

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def count(self) -> int:
        return int(self._torch.cuda.device_count())

    def use(self, index: int) -> GpuProperties:
        cuda = self._torch.cuda
        cuda.set_device(index)
        found = cuda.get_device_properties(index)
        free_bytes, _ = cuda.mem_get_info(index)
        return GpuProperties(
            found.name, str(found.uuid), found.multi_processor_count, found.L2_cache_size, free_bytes
        )

    def buffer(self, size_bytes: int) -> Any:
        return self._torch.empty(size_bytes // 4, dtype=self._torch.int32, device="cuda").random_()

    def kernel(self, source: str, name: str) -> Callable[[int, int, list[Any]], object]:
        compiler = getattr(self._torch.cuda, "_compile_kernel", None)
        if compiler is None:
            raise ComputeError(f"torch {self._torch.__version__} compiles no kernel: install 2.8 or newer, or CuPy")
        compiled = compiler(source, name)
        return lambda grid, block, arguments: compiled((grid, 1, 1), (block, 1, 1), arguments)

    def product(self, precision: str, size: int) -> Run:
        torch = self._torch
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        dtype = getattr(torch, "float32" if precision == "tf32" else precision)
        left, right, out = (torch.randn(size, size, dtype=dtype, device="cuda") for _ in range(3))
        return lambda: torch.mm(left, right.t(), out=out)

    def seconds(self, run: Run, repeats: int) -> float:
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Cupy:  # pragma: no cover - gpu
    """CuPy."""

    name = "CuPy"

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def count(self) -> int:
        return int(self._cupy.cuda.runtime.getDeviceCount())

    def use(self, index: int) -> GpuProperties:
        device = self._cupy.cuda.Device(index)
        device.use()
        found = self._cupy.cuda.runtime.getDeviceProperties(index)
        free_bytes, _ = device.mem_info
        return GpuProperties(
            found["name"].decode("utf-8", "replace"),
            str(uuid.UUID(bytes=bytes(found["uuid"]))),
            found["multiProcessorCount"],
            found["l2CacheSize"],
            free_bytes,
        )

    def buffer(self, size_bytes: int) -> Any:
        return self._cupy.random.randint(0, 1 << 31, size_bytes // 4, dtype=self._cupy.int32)

    def kernel(self, source: str, name: str) -> Callable[[int, int, list[Any]], object]:
        compiled = self._cupy.RawModule(code=source).get_function(name)

        def launch(grid: int, block: int, arguments: list[Any]) -> object:
            # CuPy passes these integers to the kernel as C ints, as torch does.
            given = [self._cupy.int32(one) if isinstance(one, int) else one for one in arguments]
            return compiled((grid,), (block,), tuple(given))

        return launch

    def product(self, precision: str, size: int) -> Run:
        cupy = self._cupy
        from cupy.cuda import cublas, device

        left, right, out = (self._matrix(precision, size) for _ in range(3))
        one, zero = cupy.asnumpy(cupy.ones(1, cupy.float32)), cupy.asnumpy(cupy.zeros(1, cupy.float32))
        kind, computing = _CUBLAS_TYPES[precision]
        handle = device.get_cublas_handle()

        def run() -> object:
            return cublas.gemmEx(
                handle, _CUBLAS_TRANSPOSED, _CUBLAS_AS_IT_IS, size, size, size, one.ctypes.data,
                left.data.ptr, kind, size, right.data.ptr, kind, size, zero.ctypes.data,
                out.data.ptr, kind, size, computing, _CUBLAS_DEFAULT_ALGORITHM,
            )  # fmt: skip

        return run

    def _matrix(self, precision: str, size: int) -> Any:
        cupy = self._cupy
        numbers = cupy.random.standard_normal((size, size), dtype=cupy.float32)
        if precision == "bfloat16":  # the upper half of a float32 has the bits of a bfloat16
            return (numbers.view(cupy.uint32) >> cupy.uint32(16)).astype(cupy.uint16)
        return numbers.astype(cupy.float16) if precision == "float16" else numbers

    def seconds(self, run: Run, repeats: int) -> float:
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(begin, end)) / 1e3
