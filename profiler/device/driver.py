"""The calls of the CUDA driver that the profiler needs, by ctypes on `libcuda.so.1`, without headers or toolkit.

Rules
- The current context belongs to the host. This module makes no context, and never waits for the host's streams.
- The host may be capturing a graph. Calls that are possible during a capture are made `relaxed`. Otherwise, the
  driver would refuse them and break the capture.
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

NOT_READY = 600  # result of cuStreamQuery if the stream has not finished its work
_PORTABLE, _DEVICE_MAP = 1, 2  # flags of cuMemHostAlloc
_NON_BLOCKING = 1  # flag of cuStreamCreate: do not synchronize with the legacy default stream
_RELAXED = 2  # capture mode that keeps a thread's calls from breaking a capture


class Words(Protocol):
    """64-bit words in the host's memory. The device can read and write them, too."""

    host: int  # address of the words on the host
    address: int  # address of the words on the device

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...

    def __len__(self) -> int: ...

    def first(self, count: int, /) -> list[int]:
        """Return the first `count` words."""

    def clear(self, count: int, /) -> None:
        """Set the first `count` words to 0."""


Launch = Callable[[int], None]  # Launches a kernel. Takes the address of the kernel's arguments (see `Arguments`).


class DriverFunctions(NamedTuple):
    """The addresses of driver functions, for C code that launches kernels.

    `error(name, result)` returns the exception for a failed call.
    """

    launch: int  # cuLaunchKernelEx
    is_capturing: int  # cuStreamIsCapturing
    context: int  # cuCtxGetCurrent
    error: Callable[[str, int], DriverError]


class Driver(GraphDriver, Protocol):
    """What the profiler needs of a driver. Each method raises DriverError if the driver refuses the call."""

    def context(self) -> int:
        """Return the current context, or 0 if there is none."""

    def within(self, context: int) -> contextlib.AbstractContextManager[None]:
        """Make `context` current on the calling thread inside a block: `with driver.within(context):`."""

    def load(self, ptx: bytes, kernels: Sequence[str]) -> tuple[int, list[int]]:
        """Load the module `ptx` into the current context. Returns the module and its kernels."""

    def unload(self, module: int) -> None:
        """Undo `load`."""

    def map_words(self, count: int) -> Words:
        """Return `count` words in memory that the host and the device share. All are 0."""

    def free_words(self, words: Words) -> None:
        """Free words that `map_words` returned. No kernel may still write to them."""

    def launcher(self, kernel: int, stream: int) -> Launch:
        """Return a function that launches `kernel` with a single thread on `stream`."""

    def functions(self) -> DriverFunctions:
        """Return the addresses that C code needs to launch kernels."""

    def is_capturing(self, stream: int) -> bool:
        """Return whether `stream` is being captured into a graph."""

    def new_stream(self) -> int:
        """Return a new stream that does not wait for other streams."""

    def end_stream(self, stream: int) -> None:
        """Undo `new_stream`."""

    def is_done(self, stream: int) -> bool:
        """Return whether `stream` has finished all enqueued work."""

    def relaxed(self) -> contextlib.AbstractContextManager[None]:
        """Return a context. Driver calls inside it do not break a graph capture of the host: `with
        driver.relaxed():`.
        """


class Arguments:
    """The arguments of several launches, one row per launch. `launch(arguments.at(3))` uses row 3.

    A kernel reads its arguments when it is launched. Each row has its own memory, so threads may launch at the same
    time.
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        width = len(rows[0])
        self._values = (c_uint64 * (len(rows) * width))(*(value for row in rows for value in row))
        first = ctypes.addressof(self._values)
        self._pointers = (c_uint64 * len(self._values))(*range(first, first + 8 * len(self._values), 8))
        self._first = ctypes.addressof(self._pointers)
        self._step = 8 * width

    def at(self, row: int) -> int:
        """Return the address of a row for a launch. It is an array of pointers to the values."""
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
    """Words in pinned memory of the host, which every context of the device can access."""

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
    """The driver of this machine. Raises DriverError if the driver is missing or too old."""

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

        # The default argument keeps `config` alive as long as this function.
        def launch_it(arguments: int, config: LaunchConfig = config) -> None:
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
