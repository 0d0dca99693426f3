"""The few necessary calls of the CUDA driver, on `libcuda.so.1` by ctypes: no headers, no toolkit.

Rules
- The current context is the host's. None is made here, and no stream of the host's is waited for.
- Calls during a possible capture of a graph by the host are made `relaxed`: in any other mode the driver would refuse
  them and break the capture.
- Other modules use only `Driver`, so that a test can replace the device.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_int, c_uint, c_uint64, c_void_p
from typing import NamedTuple, Protocol

from cbtop.profiler.device.cuda_calls import SUCCESS, DriverError
from cbtop.profiler.device.graph_driver import CudaGraphs, GraphDriver

NOT_READY = 600  # a result of cuStreamQuery
_PORTABLE, _DEVICE_MAP = 1, 2  # of cuMemHostAlloc
_NON_BLOCKING = 1  # flag of cuStreamCreate: the stream does not wait for a legacy stream
_RELAXED = 2  # of a stream's capture


class Words(Protocol):
    """Words of 64 bits in the host's memory that a device sees, too."""

    host: int  # their address
    address: int  # as the device sees them

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...

    def __len__(self) -> int: ...

    def first(self, count: int, /) -> list[int]:
        """Return the first `count`."""

    def clear(self, count: int, /) -> None:
        """Set the first `count` to 0."""


Launch = Callable[[int], None]  # the address of the kernel's arguments, as `Arguments` lays them out


class DriverFunctions(NamedTuple):
    """Addresses of a driver's functions, for launches from C; `error` makes the exception of a name and a result."""

    launch: int  # cuLaunchKernelEx
    is_capturing: int  # cuStreamIsCapturing
    context: int  # cuCtxGetCurrent
    error: Callable[[str, int], DriverError]


class Driver(GraphDriver, Protocol):
    """The interface to a driver; each method raises DriverError if it is refused."""

    def context(self) -> int:
        """Return the current context, or 0 if there is none."""

    def within(self, context: int) -> contextlib.AbstractContextManager[None]:
        """`with driver.within(context):` makes it current on the calling thread, whatever was current."""

    def load(self, ptx: bytes, kernels: Sequence[str]) -> tuple[int, list[int]]:
        """Load the module `ptx` into the current context, and return it with its kernels."""

    def unload(self, module: int) -> None:
        """Undo `load`."""

    def map_words(self, count: int) -> Words:
        """Return `count` words, all 0."""

    def free_words(self, words: Words) -> None:
        """Undo `map_words`. Nothing may write them any longer."""

    def launcher(self, kernel: int, stream: int) -> Launch:
        """Return a function that launches `kernel` as a single thread on `stream`."""

    def functions(self) -> DriverFunctions:
        """Return the functions that a launch from C needs."""

    def is_capturing(self, stream: int) -> bool:
        """Whether work enqueued on `stream` is captured."""

    def new_stream(self) -> int:
        """Return a stream that does not wait for others."""

    def end_stream(self, stream: int) -> None:
        """Undo `new_stream`."""

    def is_done(self, stream: int) -> bool:
        """Whether `stream` has done all that was enqueued."""

    def relaxed(self) -> contextlib.AbstractContextManager[None]:
        """`with driver.relaxed():` calls do not end a capture of the host's."""


class Arguments:
    """The arguments of launches: `launch(arguments.at(3))` passes the fourth row.

    A kernel reads them when it is launched. Each row has its own memory, so that threads may launch at the same time.
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        width = len(rows[0])
        self._values = (c_uint64 * (len(rows) * width))(*(value for row in rows for value in row))
        first = ctypes.addressof(self._values)
        self._pointers = (c_uint64 * len(self._values))(*range(first, first + 8 * len(self._values), 8))
        self._first = ctypes.addressof(self._pointers)
        self._step = 8 * width

    def at(self, row: int) -> int:
        """Return the address of a row's pointers."""
        return self._first + self._step * row


class LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("attributes_count", c_uint),
    )


class MappedWords:
    """Pinned words of the host's, mapped into every context."""

    def __init__(self, host: int, address: int, count: int) -> None:
        self.host = host
        self.address = address
        self._count = count
        self._words = (c_uint64 * count).from_address(host)
        ctypes.memset(host, 0, 8 * count)

    def __getitem__(self, index: int, /) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int, /) -> None:
        self._words[index] = value

    def __len__(self) -> int:
        return self._count

    def first(self, count: int, /) -> list[int]:
        return self._words[:count]

    def clear(self, count: int, /) -> None:
        ctypes.memset(self.host, 0, 8 * count)


class CudaDriver(CudaGraphs):  # pragma: no cover - gpu
    """The driver of this machine. Raises DriverError if there is none, or if it is too old."""

    def context(self) -> int:
        found = c_void_p()
        self._call("cuCtxGetCurrent", byref(found))
        return found.value or 0

    @contextlib.contextmanager
    def within(self, context: int) -> Iterator[None]:
        if self.context() == context:
            yield
            return
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def load(self, ptx: bytes, kernels: Sequence[str]) -> tuple[int, list[int]]:
        module = c_void_p()
        self._call("cuModuleLoadData", byref(module), ptx)
        found = []
        for name in kernels:
            kernel = c_void_p()
            self._call("cuModuleGetFunction", byref(kernel), module, name.encode())
            found.append(kernel.value or 0)
        return module.value or 0, found

    def unload(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def map_words(self, count: int) -> Words:
        host, address = c_void_p(), c_uint64()
        self._call("cuMemHostAlloc", byref(host), 8 * count, _PORTABLE | _DEVICE_MAP)
        self._call("cuMemHostGetDevicePointer_v2", byref(address), host, 0)
        return MappedWords(host.value or 0, address.value, count)

    def free_words(self, words: Words) -> None:
        assert isinstance(words, MappedWords)
        self._call("cuMemFreeHost", words.host)

    def launcher(self, kernel: int, stream: int) -> Launch:
        one = (c_uint * 3)(1, 1, 1)
        config = LaunchConfig(one, one, 0, stream, None, 0)
        at, launch = ctypes.addressof(config), self._functions["cuLaunchKernelEx"]

        def launch_it(arguments: int, config: LaunchConfig = config) -> None:  # kept alive by this
            result = launch(at, kernel, arguments, None)
            if result:
                raise self._error("cuLaunchKernelEx", result)

        return launch_it

    def functions(self) -> DriverFunctions:
        names = ("cuLaunchKernelEx", "cuStreamIsCapturing", "cuCtxGetCurrent")
        launch, is_capturing, context = [ctypes.cast(self._functions[name], c_void_p).value or 0 for name in names]
        return DriverFunctions(launch, is_capturing, context, self._error)

    def is_capturing(self, stream: int) -> bool:
        status = c_int()
        self._call("cuStreamIsCapturing", stream, byref(status))
        return bool(status.value)

    def new_stream(self) -> int:
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), _NON_BLOCKING)
        return stream.value or 0

    def end_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def is_done(self, stream: int) -> bool:
        result = self._functions["cuStreamQuery"](stream)
        if result not in (SUCCESS, NOT_READY):
            raise self._error("cuStreamQuery", result)
        return bool(result == SUCCESS)

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        mode = c_int(_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", byref(mode))
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", byref(mode))
