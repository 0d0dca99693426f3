"""One GPU, through CuPy: arrays on it, modules in it, launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cbtop.compute.cuda.compiler import Compiled, compiled
from cbtop.compute.cuda.launches import CudaLaunch, CudaModule, LibraryCall
from cbtop.compute.errors import ComputeError
from cbtop.compute.kernels.base import Kernel

Launcher = Callable[..., None]
SHARED_BYTES = 48 * 1024  # dynamic, that every GPU gives without being asked for more


class Gpu:
    """The GPU of an index. ComputeError where CuPy is not installed, or finds none."""

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
        self._modules: dict[tuple[CudaModule, bool], tuple[Any, Compiled]] = {}
        self._functions: dict[tuple[CudaModule, str, bool], Any] = {}

    def array(self, values: Any) -> Any:
        """A copy of what lies on the host, on the device."""
        return self.cupy.asarray(values)

    def host(self, array: Any) -> Any:
        """A copy on the host; it waits for what was launched."""
        return self.cupy.asnumpy(array)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        """On the device."""
        return self.cupy.zeros(shape, dtype)

    def module(self, module: CudaModule, *, stamped: bool = False) -> Compiled:
        """What `module` was compiled to for this GPU; it is loaded with it."""
        return self._loaded(module, stamped)[1]

    def _loaded(self, module: CudaModule, stamped: bool) -> tuple[Any, Compiled]:
        key = module, stamped
        if key not in self._modules:
            made = compiled(module.source, self.architecture, stamped=stamped)
            loaded = self.cupy.cuda.function.Module()
            loaded.load(made.cubin)
            self._modules[key] = loaded, made
        return self._modules[key]

    def function(self, module: CudaModule, entry: str, *, stamped: bool = False) -> Any:
        """CuPy's function of an entry."""
        key = module, entry, stamped
        if key not in self._functions:
            self._functions[key] = self._loaded(module, stamped)[0].get_function(entry)
        return self._functions[key]

    def launch(self, one: CudaLaunch | LibraryCall) -> None:
        """On CuPy's current stream."""
        if isinstance(one, LibraryCall):
            one.call()
            return
        self.function(one.module, one.entry)(one.grid, one.block, one.arguments, shared_mem=one.shared_bytes)

    def run(self, kernel: Kernel, *arguments: Any) -> None:
        """One call of a kernel that has a CUDA version."""
        assert kernel.cuda is not None
        for one in kernel.cuda.launches(*arguments):
            self.launch(one)
