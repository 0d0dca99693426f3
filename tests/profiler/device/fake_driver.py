"""A fake driver with a fake device. Time passes only when the host reads its clock."""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from ctypes import CFUNCTYPE, POINTER, c_int, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any

from cbtop.profiler.device.cuda_calls import DriverError
from cbtop.profiler.device.driver import DriverFunctions, Launch, LaunchConfig, MappedWords
from cbtop.profiler.device.graph_driver import DependencyEdge
from cbtop.profiler.device.kernels import ENDED, FIRST_PONG, NOTHING, PING, PONG, RESOLUTION, STAMP

READING_NS = 50  # time that the host needs to read its clock
KERNEL_NS = 1_000
RESOLUTION_NS = 32
EPOCH_NS = 1_763_800_000_000_000_001  # start time of the clock in ns; too large for an exact float64
WORK = "work"
_ARGUMENTS = {STAMP: 1, NOTHING: 0, PONG: 3}


class FakeWords(MappedWords):
    """Fake memory for words that the device writes. On the device it has another address than in the process."""

    def __init__(self, address: int, count: int) -> None:
        self._memory = (c_uint64 * count)()
        super().__init__(ctypes.addressof(self._memory), address, count)


@dataclass
class FakeGraph:
    """A fake CUDA graph. A node is a kernel with its arguments, or a duration in ns."""

    nodes: dict[int, tuple[str, list[int]] | int] = field(default_factory=dict)
    edges: list[DependencyEdge] = field(default_factory=list)
    # If this graph is a clone: maps each node of the original graph to its node in the clone.
    origin: dict[int, int] = field(default_factory=dict)

    def in_order(self) -> list[int]:
        """Return the nodes in an order that respects all edges. Raises DriverError for a cycle."""
        waits = dict.fromkeys(self.nodes, 0)
        behind: dict[int, list[int]] = {node: [] for node in self.nodes}
        for edge in self.edges:
            waits[edge.then] += 1
            behind[edge.first].append(edge.then)
        order = [node for node in self.nodes if not waits[node]]
        for node in order:
            for then in behind[node]:
                waits[then] -= 1
                if not waits[then]:
                    order.append(then)
        if len(order) < len(self.nodes):
            raise DriverError("CUDA_ERROR_INVALID_VALUE: a cycle")
        return order


@dataclass
class Stream:
    """The queue of a stream. Each waiting kernel has its name, its arguments and the time of its launch."""

    waiting: deque[tuple[str, list[int], int]] = field(default_factory=deque)
    free_ns: int = 0  # time at which the last kernel of the stream has ended


class FakeDriver:
    """A fake driver. Its device has a clock that is `drift_ppm` too fast.

    A signal between device and host takes up to `way_ns`.
    """

    def __init__(self, *, drift_ppm: float = -12, way_ns: int = 800, seed: int = 0) -> None:
        self.host_ns = 1_000_000_000
        # Several threads may read the clock. All of these threads advance the same device.
        self._playing = threading.RLock()
        self.current = 0xC0DE
        self.stands_still = False  # If true, the device does not progress.
        self.launched = 0
        self._drift_ppb = round(drift_ppm * 1000)
        self._way_ns = way_ns
        self._chance = random.Random(seed)
        self._words: dict[int, FakeWords] = {}
        self._streams: dict[int, Stream] = {}
        self._kernels: dict[int, str] = {}
        self._contexts: dict[int, int] = {}  # the context that each of our kernels and streams belongs to
        self._modules: set[int] = set()
        self._handles = 0x1000
        self._pongs: list[_Pongs] = []
        self.graphs: dict[int, FakeGraph] = {}
        self.executables: dict[int, list[tuple[str, list[int]] | int]] = {}
        self._launched: dict[int, list[tuple[str, list[int]] | int]] = {}
        self.most_nodes: int | None = None  # limit for instantiated graphs
        # errors that functions for C have raised; the index is the code that they returned
        self._refusals: list[DriverError] = []
        # Functions that C code can call. These functions call the methods below.
        self._functions = (
            CFUNCTYPE(c_int, POINTER(LaunchConfig), c_uint64, c_uint64, c_void_p)(self._launch_kernel),
            CFUNCTYPE(c_int, c_uint64, POINTER(c_int))(self._stream_is_capturing),
            CFUNCTYPE(c_int, POINTER(c_uint64))(self._current_context),
        )

    # --- the world ------------------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """Read the host's clock. The reading takes time, in which the device continues to work."""
        self.pass_time(READING_NS)
        return self.host_ns

    def pass_time(self, duration_ns: int) -> None:
        with self._playing:
            self.host_ns += duration_ns
            if not self.stands_still:
                self._run()

    def work(self, stream: int, duration_ns: int) -> None:
        """Enqueue a kernel of the profiled program on a stream."""
        with self._playing:
            self._streams.setdefault(stream, Stream()).waiting.append((WORK, [duration_ns], self.host_ns))

    def device_ns(self, host_ns: int) -> int:
        """Return what the device's timer shows at this time of the host's clock."""
        return EPOCH_NS + host_ns + host_ns * self._drift_ppb // 1_000_000_000

    @property
    def left(self) -> list[object]:
        """Return all resources that were created but not released."""
        streams = [stream for stream in self._streams if stream >= 0x1000]
        return [*self._words, *self._modules, *streams, *self.graphs, *self.executables]

    def _run(self) -> None:
        for stream in self._streams.values():
            while stream.waiting:
                name, arguments, launched_ns = stream.waiting[0]
                at_ns = max(stream.free_ns, launched_ns + self._way_ns)
                if at_ns > self.host_ns:
                    break
                stream.waiting.popleft()
                if name == "graph":
                    for what in self._launched.pop(arguments[0]):
                        at_ns += what if isinstance(what, int) else KERNEL_NS
                        if not isinstance(what, int):
                            self._ran(*what, at_ns)
                    stream.free_ns = at_ns
                    continue
                stream.free_ns = at_ns + (arguments[0] if name == WORK else KERNEL_NS)
                self._ran(name, arguments, at_ns)
        for pongs in list(self._pongs):
            if pongs.play(self):
                self._pongs.remove(pongs)

    def _ran(self, name: str, arguments: list[int], at_ns: int) -> None:
        if name == STAMP:
            self.write(arguments[0], self.device_ns(at_ns))
        elif name == PONG:
            words = self._words[arguments[0]]
            words[RESOLUTION] = RESOLUTION_NS
            self._pongs.append(_Pongs(words, arguments[1], at_ns + arguments[2]))

    def write(self, address: int, value: int) -> None:
        """Write a word to memory, as a kernel on the device does. Raises KeyError if the memory was released."""
        for words in self._words.values():
            if words.address <= address < words.address + 8 * len(words):
                words[(address - words.address) // 8] = value
                return
        raise KeyError(f"nothing is mapped at {address:#x}")

    def way_ns(self) -> int:
        return self._chance.randrange(self._way_ns + 1)

    def handle(self) -> int:
        with self._playing:
            self._handles += 0x1000
            return self._handles

    # --- Driver -----------------------------------------------------------------------------------------------

    def context(self) -> int:
        return self.current

    @contextlib.contextmanager
    def within(self, context: int) -> Iterator[None]:
        before, self.current = self.current, context
        try:
            yield
        finally:
            self.current = before

    def load(self, ptx: bytes, kernels: Sequence[str]) -> tuple[int, list[int]]:
        found = [self.handle() for _ in kernels]
        self._kernels.update(zip(found, kernels, strict=True))
        self._contexts.update(dict.fromkeys(found, self.current))
        module = self.handle()
        self._modules.add(module)
        return module, found

    def unload(self, module: int) -> None:
        self._modules.remove(module)

    def map_words(self, count: int) -> FakeWords:
        words = FakeWords(self.handle() << 24, count)
        with self._playing:
            self._words[words.address] = words
        return words

    def free_words(self, words: object) -> None:
        assert isinstance(words, FakeWords)
        with self._playing:
            del self._words[words.address]

    def launch(self, kernel: int, stream: int, arguments: int) -> None:
        name = self._kernels[kernel]
        if {self._contexts[kernel], self._contexts.get(stream, self.current)} != {self.current}:
            raise DriverError("CUDA_ERROR_INVALID_CONTEXT")
        values = _values(arguments, _ARGUMENTS[name])
        with self._playing:
            self.launched += 1
            self._streams.setdefault(stream, Stream()).waiting.append((name, values, self.host_ns))

    def launcher(self, kernel: int, stream: int) -> Launch:
        return lambda arguments: self.launch(kernel, stream, arguments)

    def functions(self) -> DriverFunctions:
        launch, is_capturing, context = [ctypes.cast(function, c_void_p).value or 0 for function in self._functions]
        return DriverFunctions(launch, is_capturing, context, lambda name, result: self._refusals[result - 1])

    def is_capturing(self, stream: int) -> bool:
        return False

    def _launch_kernel(self, config: Any, kernel: int, arguments: int, extra: int | None) -> int:
        assert (list(config[0].grid), list(config[0].block), extra) == ([1] * 3, [1] * 3, None)
        return self._result(lambda: self.launch(kernel, config[0].stream or 0, arguments))

    def _stream_is_capturing(self, stream: int, status: Any) -> int:
        def answer() -> None:
            status[0] = self.is_capturing(stream)

        return self._result(answer)

    def _current_context(self, context: Any) -> int:
        def answer() -> None:
            context[0] = self.context()

        return self._result(answer)

    def _result(self, done: Callable[[], None]) -> int:
        try:
            done()
        except DriverError as error:
            with self._playing:
                self._refusals.append(error)
                return len(self._refusals)
        return 0

    def new_stream(self) -> int:
        stream = self.handle()
        with self._playing:
            self._streams[stream] = Stream()
        self._contexts[stream] = self.current
        return stream

    def end_stream(self, stream: int) -> None:
        if self._contexts[stream] != self.current:
            raise DriverError("CUDA_ERROR_INVALID_CONTEXT")
        with self._playing:
            del self._streams[stream]

    def is_done(self, stream: int) -> bool:
        if self.stands_still:
            raise DriverError("CUDA_ERROR_ILLEGAL_ADDRESS")
        return stream not in self._streams or not self._streams[stream].waiting

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        yield

    # --- graphs -------------------------------------------------------------------------------------------------

    def captured_last(self, stream: int) -> list[int] | None:
        return None

    def captured_graph(self, stream: int) -> int | None:
        return None

    def new_graph(self) -> int:
        graph = self.handle()
        self.graphs[graph] = FakeGraph()
        return graph

    def add(
        self, graph: int, after: Sequence[int] = (), duration_ns: int = KERNEL_NS, *, is_plain: bool = True
    ) -> int:
        """Add a node of the profiled program to a graph: a kernel, a copy or a child graph.

        A node that takes 0 ns is an event.
        """
        node = self.handle()
        self.graphs[graph].nodes[node] = duration_ns
        self.graphs[graph].edges += [DependencyEdge(one, node, is_plain) for one in after]
        return node

    def clone(self, graph: int) -> int:
        original, clone = self.graphs[graph], self.new_graph()
        copy = self.graphs[clone]
        copy.origin = {node: self.handle() for node in original.nodes}
        copy.nodes = {copy.origin[node]: what for node, what in original.nodes.items()}
        copy.edges = [
            DependencyEdge(copy.origin[one], copy.origin[other], plain) for one, other, plain in original.edges
        ]
        return clone

    def in_clone(self, node: int, clone: int) -> int:
        return self.graphs[clone].origin[node]

    def destroy_graph(self, graph: int) -> None:
        del self.graphs[graph]

    def nodes(self, graph: int) -> list[int]:
        return list(self.graphs[graph].nodes)

    def edges(self, graph: int) -> list[DependencyEdge]:
        return list(self.graphs[graph].edges)

    def takes_time(self, node: int) -> bool:
        return all(graph.nodes.get(node) != 0 for graph in self.graphs.values())

    def add_kernel(self, graph: int, after: Sequence[int], kernel: int, arguments: int, blocks: int = 1) -> int:
        node, name = self.handle(), self._kernels[kernel]
        self.graphs[graph].nodes[node] = (name, _values(arguments, _ARGUMENTS[name]))
        self.add_edges(graph, [(one, node) for one in after])
        return node

    def add_edges(self, graph: int, edges: Sequence[tuple[int, int]]) -> None:
        self.graphs[graph].edges += [DependencyEdge(one, other, True) for one, other in edges]

    def remove_edges(self, graph: int, edges: Sequence[tuple[int, int]]) -> None:
        for one, other in edges:
            self.graphs[graph].edges.remove(DependencyEdge(one, other, True))

    def instantiate(self, graph: int) -> int:
        there = self.graphs[graph]
        if self.most_nodes is not None and len(there.nodes) > self.most_nodes:
            raise DriverError("CUDA_ERROR_OUT_OF_MEMORY")
        executable = self.handle()
        self.executables[executable] = [there.nodes[node] for node in there.in_order()]
        return executable

    def destroy_executable(self, executable: int) -> None:
        del self.executables[executable]

    def upload(self, executable: int, stream: int) -> None:
        pass

    def launch_graph(self, executable: int, stream: int) -> None:
        # Copy the nodes now, because the graph may be destroyed before they have run.
        run = self.handle()
        self._launched[run] = self.executables[executable]
        with self._playing:
            self._streams.setdefault(stream, Stream()).waiting.append(("graph", [run], self.host_ns))


class _Pongs:
    """A kernel that answers pings of the host, so that both clocks can be compared."""

    def __init__(self, words: FakeWords, rounds: int, deadline_ns: int) -> None:
        self._words = words
        self._rounds = rounds
        self._deadline_ns = deadline_ns
        self._round = 1
        self._seen_ns: int | None = None  # time at which the kernel sees the current ping
        self._heard_ns = 0

    def play(self, driver: FakeDriver) -> bool:
        """Let the kernel work until the present time. Returns whether it has finished."""
        now_ns, words = driver.host_ns, self._words
        if self._seen_ns is None and words[PING] >= self._round:
            self._seen_ns = now_ns + driver.way_ns()
            self._heard_ns = self._seen_ns + driver.way_ns()
        if self._seen_ns is not None and now_ns >= self._heard_ns:
            words[FIRST_PONG + self._round - 1] = driver.device_ns(self._seen_ns)
            self._round += 1
            self._seen_ns = None
        if self._round <= self._rounds and now_ns < self._deadline_ns:
            return False
        words[ENDED] = 1
        return True


def _values(arguments: int, count: int) -> list[int]:
    """Return `count` argument values of a launch. `arguments` is the address of pointers to them."""
    pointers = (ctypes.c_uint64 * count).from_address(arguments) if count else []
    return [ctypes.c_uint64.from_address(pointer).value for pointer in pointers]
