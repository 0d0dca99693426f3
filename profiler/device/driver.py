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
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple, Protocol

SUCCESS, NOT_READY = 0, 600
_PORTABLE, _DEVICE_MAP = 1, 2  # of cuMemHostAlloc
_NON_BLOCKING = 1  # of cuStreamCreate: it does not wait for a legacy stream
_RELAXED = 2  # of a stream's capture


class DriverError(Exception):
    """A call that the driver refused, or a device that does not answer."""


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


class Driver(Protocol):
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

    def captured_last(self, stream: int) -> list[int] | None:
        """Return the nodes that the next captured work on `stream` will follow; None if nothing is captured there."""

    def captured_graph(self, stream: int) -> int | None:
        """Return the host's unfinished graph that is captured on `stream`, or None if there is none."""

    def new_graph(self) -> int:
        """An empty graph."""

    def clone(self, graph: int) -> int:
        """A copy of `graph`."""

    def in_clone(self, node: int, clone: int) -> int:
        """Return the node of `clone` that corresponds to `node` of the original."""

    def destroy_graph(self, graph: int) -> None:
        """Undo `new_graph` or `clone`."""

    def nodes(self, graph: int) -> list[int]:
        """The nodes of `graph`."""

    def edges(self, graph: int) -> list[DependencyEdge]:
        """The edges of `graph`."""

    def takes_time(self, node: int) -> bool:
        """Whether work runs there: not for an event, and not if nodes only wait for each other."""

    def add_kernel(self, graph: int, after: Sequence[int], kernel: int, arguments: int, blocks: int = 1) -> int:
        """Add a node to `graph` after those of `after`: `kernel`, in `blocks` blocks of one thread."""

    def add_edges(self, graph: int, edges: Sequence[tuple[int, int]]) -> None:
        """Make the second node of each pair wait for the first."""

    def remove_edges(self, graph: int, edges: Sequence[tuple[int, int]]) -> None:
        """Undo `add_edges`; of plain edges only."""

    def instantiate(self, graph: int) -> int:
        """Return an executable of `graph`, which may change or be destroyed afterwards."""

    def destroy_executable(self, executable: int) -> None:
        """Undo `instantiate`. It must not be running."""

    def upload(self, executable: int, stream: int) -> None:
        """Do, on `stream`, the work that its first launch would otherwise do."""

    def launch_graph(self, executable: int, stream: int) -> None:
        """Enqueue it on `stream`."""


# Of CUgraphNodeType (CUDA driver API, "Data types used by CUDA driver"): EMPTY, WAIT_EVENT, EVENT_RECORD.
_NOTHING_RUNS = frozenset({5, 6, 7})


class DependencyEdge(NamedTuple):
    """The node `then` waits for `first`; a plain one waits until it has ended."""

    first: int
    then: int
    is_plain: bool


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


class _KernelNode(ctypes.Structure):  # CUDA_KERNEL_NODE_PARAMS_v2
    _fields_ = (
        ("kernel", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("arguments", c_void_p),
        ("extra", c_void_p),
        ("library_kernel", c_void_p),
        ("context", c_void_p),
    )


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


_Handle, _Count = POINTER(c_void_p), POINTER(c_size_t)
# Arguments by name; all return a CUresult. Drivers of CUDA 12.3 and later have these forms.
_CALLS: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGraphAddDependencies_v2": (c_void_p, c_void_p, c_void_p, c_void_p, c_size_t),
    "cuGraphAddKernelNode_v2": (_Handle, c_void_p, c_void_p, c_size_t, POINTER(_KernelNode)),
    "cuGraphClone": (_Handle, c_void_p),
    "cuGraphCreate": (_Handle, c_uint),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphGetEdges_v2": (c_void_p, c_void_p, c_void_p, c_void_p, _Count),
    "cuGraphGetNodes": (c_void_p, c_void_p, _Count),
    "cuGraphInstantiateWithFlags": (_Handle, c_void_p, c_uint64),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphNodeFindInClone": (_Handle, c_void_p, c_void_p),
    "cuGraphNodeGetType": (c_void_p, POINTER(c_uint)),
    "cuGraphRemoveDependencies_v2": (c_void_p, c_void_p, c_void_p, c_void_p, c_size_t),
    "cuGraphUpload": (c_void_p, c_void_p),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemHostGetDevicePointer_v2": (POINTER(c_uint64), c_void_p, c_uint),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamGetCaptureInfo_v3": (c_void_p, POINTER(c_int), c_void_p, c_void_p, _Handle, c_void_p, _Count),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuStreamQuery": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
}


class CudaDriver:  # pragma: no cover - gpu
    """The driver of this machine. Raises DriverError if there is none, or if it is too old."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self._functions: dict[str, Any] = {name: getattr(library, name) for name in _CALLS}
        except (OSError, AttributeError) as error:
            raise DriverError(str(error)) from error
        for name, arguments in _CALLS.items():
            self._functions[name].argtypes, self._functions[name].restype = arguments, c_int

    def _call(self, name: str, *arguments: Any) -> None:
        result = self._functions[name](*arguments)
        if result != SUCCESS:
            raise self._error(name, result)

    def _error(self, name: str, result: int) -> DriverError:
        text = c_char_p()
        self._functions["cuGetErrorName"](result, byref(text))
        return DriverError(f"{name}: {text.value.decode() if text.value else result}")

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

    def captured_graph(self, stream: int) -> int | None:
        status, graph = c_int(), c_void_p()
        self._call("cuStreamGetCaptureInfo_v3", stream, byref(status), None, byref(graph), None, None, None)
        return graph.value if status.value else None

    def captured_last(self, stream: int) -> list[int] | None:
        status, nodes, edges, count = c_int(), c_void_p(), c_void_p(), c_size_t()
        self._call(
            "cuStreamGetCaptureInfo_v3", stream, byref(status), None, None, byref(nodes), byref(edges), byref(count)
        )
        if not status.value:
            return None
        return list((c_uint64 * count.value).from_address(nodes.value)) if nodes.value else []

    def new_graph(self) -> int:
        graph = c_void_p()
        self._call("cuGraphCreate", byref(graph), 0)
        return graph.value or 0

    def clone(self, graph: int) -> int:
        clone = c_void_p()
        self._call("cuGraphClone", byref(clone), graph)
        return clone.value or 0

    def in_clone(self, node: int, clone: int) -> int:
        found = c_void_p()
        self._call("cuGraphNodeFindInClone", byref(found), node, clone)
        return found.value or 0

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphDestroy", graph)

    def nodes(self, graph: int) -> list[int]:
        count = c_size_t()
        self._call("cuGraphGetNodes", graph, None, byref(count))
        found = (c_uint64 * count.value)()
        if count.value:
            self._call("cuGraphGetNodes", graph, found, byref(count))
        return list(found)

    def edges(self, graph: int) -> list[DependencyEdge]:
        count = c_size_t()
        self._call("cuGraphGetEdges_v2", graph, None, None, None, byref(count))
        size = count.value
        first, then, data = (c_uint64 * size)(), (c_uint64 * size)(), (c_uint64 * size)()
        if size:
            self._call("cuGraphGetEdges_v2", graph, first, then, data, byref(count))
        return [DependencyEdge(one, other, not kind) for one, other, kind in zip(first, then, data, strict=True)]

    def takes_time(self, node: int) -> bool:
        kind = c_uint()
        self._call("cuGraphNodeGetType", node, byref(kind))
        return kind.value not in _NOTHING_RUNS

    def add_kernel(self, graph: int, after: Sequence[int], kernel: int, arguments: int, blocks: int = 1) -> int:
        node, grid, block = c_void_p(), (c_uint * 3)(blocks, 1, 1), (c_uint * 3)(1, 1, 1)
        what = _KernelNode(kernel, grid, block, 0, arguments or None)
        self._call("cuGraphAddKernelNode_v2", byref(node), graph, _handles(after), len(after), byref(what))
        return node.value or 0

    def add_edges(self, graph: int, edges: Sequence[tuple[int, int]]) -> None:
        self._change_edges("cuGraphAddDependencies_v2", graph, edges)

    def remove_edges(self, graph: int, edges: Sequence[tuple[int, int]]) -> None:
        self._change_edges("cuGraphRemoveDependencies_v2", graph, edges)

    def _change_edges(self, name: str, graph: int, edges: Sequence[tuple[int, int]]) -> None:
        if edges:
            first, then = zip(*edges, strict=True)
            self._call(name, graph, _handles(first), _handles(then), None, len(edges))

    def instantiate(self, graph: int) -> int:
        executable = c_void_p()
        self._call("cuGraphInstantiateWithFlags", byref(executable), graph, 0)
        return executable.value or 0

    def destroy_executable(self, executable: int) -> None:
        self._call("cuGraphExecDestroy", executable)

    def upload(self, executable: int, stream: int) -> None:
        self._call("cuGraphUpload", executable, stream)

    def launch_graph(self, executable: int, stream: int) -> None:
        result = self._functions["cuGraphLaunch"](executable, stream)
        if result != SUCCESS:
            raise self._error("cuGraphLaunch", result)


def _handles(handles: Sequence[int]) -> Any:
    return (c_uint64 * len(handles))(*handles) if handles else None
