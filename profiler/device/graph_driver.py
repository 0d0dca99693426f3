"""The calls of the CUDA driver for graphs: graphs that the host captures, their clones and their launches."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple, Protocol

from cbtop.profiler.device.cuda_calls import SUCCESS, CudaCalls, KernelNode

# Types of graph nodes that run no work: EMPTY, WAIT_EVENT and EVENT_RECORD of CUgraphNodeType (CUDA driver API, "Data
# types used by CUDA driver").
_NOTHING_RUNS = frozenset({5, 6, 7})


class DependencyEdge(NamedTuple):
    """An edge of a graph: `then` waits for `first`. In a plain edge it waits for the end of `first`. Otherwise it may
    begin earlier.
    """

    first: int
    then: int
    is_plain: bool


class GraphDriver(Protocol):
    """What the profiler needs of a driver for graphs. Each method raises DriverError if the driver refuses the
    call.
    """

    def captured_last(self, stream: int) -> list[int] | None:
        """Return the nodes that the next captured work on `stream` will depend on, or None if `stream` is not being
        captured.
        """

    def captured_graph(self, stream: int) -> int | None:
        """Return the graph that `stream` is being captured into, or None."""

    def new_graph(self) -> int:
        """Return a new, empty graph."""

    def clone(self, graph: int) -> int:
        """Return a copy of `graph`."""

    def in_clone(self, node: int, clone: int) -> int:
        """Return the node of `clone` that corresponds to `node` of the original."""

    def destroy_graph(self, graph: int) -> None:
        """Destroy a graph that `new_graph` or `clone` returned."""

    def nodes(self, graph: int) -> list[int]:
        """Return the nodes of `graph`."""

    def edges(self, graph: int) -> list[DependencyEdge]:
        """Return the edges of `graph`."""

    def takes_time(self, node: int) -> bool:
        """Return whether `node` runs work. Events and nodes that only wait do not."""

    def add_kernel(self, graph: int, after: Sequence[int], kernel: int, arguments: int, blocks: int = 1) -> int:
        """Add a node that runs `kernel` in `blocks` blocks of one thread. The new node depends on the nodes
        `after`.
        """

    def add_edges(self, graph: int, edges: Sequence[tuple[int, int]]) -> None:
        """For each pair of nodes, make the second node wait for the first."""

    def remove_edges(self, graph: int, edges: Sequence[tuple[int, int]]) -> None:
        """Remove plain edges that `add_edges` has added."""

    def instantiate(self, graph: int) -> int:
        """Return an executable of `graph`. Afterwards, `graph` may change or be destroyed."""

    def destroy_executable(self, executable: int) -> None:
        """Destroy an executable that `instantiate` returned. It must not be running."""

    def upload(self, executable: int, stream: int) -> None:
        """Upload the executable to the device on `stream`, so that its first launch is as fast as later ones."""

    def launch_graph(self, executable: int, stream: int) -> None:
        """Launch the executable on `stream`."""


class CudaGraphs(CudaCalls):  # pragma: no cover - gpu
    """The graph functions of this machine's CUDA driver."""

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
        what = KernelNode(kernel, grid, block, 0, arguments or None)
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
