"""A fake CUPTI. While it is active, it records kernels of the fake device as bytes in the layout of CUPTI."""

from __future__ import annotations

import struct
from _thread import get_ident
from collections.abc import Sequence

from cbtop.profiler.device.cupti import EXTERNAL, KERNEL, CuptiError, Records, read_in_python
from cbtop.protocol.requests import State
from tests.profiler.device.fake_driver import FakeDriver

CUSTOM = 3


def kernel_record(
    *,
    name_at: int = 1,
    duration_ns: int = 1000,
    start_ns: int = 1_763_800_000_000_000_001,
    grid: tuple[int, int, int] = (8, 1, 1),
    block: tuple[int, int, int] = (128, 1, 1),
    registers: int = 32,
    static_bytes: int = 16,
    dynamic_bytes: int = 1024,
    local_bytes: int = 0,
    call: int = 0,
    graph: int = 0,
    graph_node: int = 0,
) -> bytes:
    """Return a record in the layout of CUpti_ActivityKernel10, 216 bytes."""
    raw = bytearray(216)
    struct.pack_into("<IBBHII", raw, 0, KERNEL, 0, 0, registers, 1, 1)
    struct.pack_into("<QQQ", raw, 16, start_ns, start_ns + duration_ns, start_ns + duration_ns)
    struct.pack_into("<III8i", raw, 40, 0, 1, 7, *grid, *block, static_bytes, dynamic_bytes)
    struct.pack_into("<IIIqQ", raw, 84, local_bytes, local_bytes << 18, call, 0, name_at)
    struct.pack_into("<Q", raw, 144, graph << 32 | graph_node)
    struct.pack_into("<I", raw, 156, graph)
    return bytes(raw)


def external_record(external: int, call: int, whose: int = CUSTOM) -> bytes:
    return struct.pack("<IIQII", EXTERNAL, whose, external, call, 0)


class CuptiWorld(FakeDriver):
    """A fake device with kernels that the fake CUPTI can record. The kernels are launched alone or in graphs."""

    owner: FakeCupti | object | None = None
    calls = 0
    finalized = 0
    let_go = 0
    launched_graphs = 0
    launched_while_recorded: list[int]  # executables
    fails_at = ""  # name of the CUPTI method that fails
    hostile: bytes | None = None  # a damaged record between valid records
    names = ("gemm_kernel", "norm_kernel")

    def __init__(self) -> None:
        super().__init__()
        self.launched_while_recorded = []

    def eager(self, duration_ns: int) -> None:
        """Launch a single kernel from the host."""
        self.calls += 1
        if isinstance(self.owner, FakeCupti) and self.owner.kinds:
            self.owner.recorded(duration_ns, call=self.calls)

    def launch_graph(self, executable: int, stream: int) -> None:
        super().launch_graph(executable, stream)
        self.launched_graphs += 1
        if isinstance(self.owner, FakeCupti) and self.owner.kinds:
            self.launched_while_recorded.append(executable)
            for at, what in enumerate(self.executables[executable]):
                if isinstance(what, int):
                    self.owner.recorded(what, graph=executable & 0xFFFFFFFF, graph_node=at)


class FakeCupti:
    """A fake CUPTI that records the kernels of a CuptiWorld. Only one can be active at a time."""

    def __init__(self, world: CuptiWorld) -> None:
        self._world = world
        self.kinds: list[int] = []
        self.raw: list[bytes] = []
        self.stacks: dict[int, list[int]] = {}  # correlation ids that are pushed in each thread, by thread id
        self.dropped = 0
        self._start_ns, self._took_ns = 1_763_800_000_000_000_001, 0

    def _may_fail(self, what: str) -> None:
        if self._world.fails_at == what:
            raise CuptiError(f"{what}: played", State.FAILED)

    def recorded(self, duration_ns: int, *, call: int = 0, graph: int = 0, graph_node: int = 0) -> None:
        name_at = 1 if duration_ns >= 10_000 else 2
        self._start_ns += self._took_ns  # kernels run one after another
        self._took_ns = duration_ns
        record = kernel_record(
            duration_ns=duration_ns,
            start_ns=self._start_ns,
            call=call,
            graph=graph,
            graph_node=graph_node,
            name_at=name_at,
        )
        self.raw.append(record)
        stack = self.stacks.get(get_ident())
        if EXTERNAL in self.kinds and stack and call:
            self.raw.append(external_record(stack[-1], call))

    def begin(self, kinds: Sequence[int]) -> None:
        self._may_fail("begin")
        if self._world.owner is not None:
            raise CuptiError("cuptiSubscribe: CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED", State.TAKEN)
        self._world.owner, self.kinds = self, list(kinds)
        self.raw.clear()
        self.stacks.clear()

    def end(self) -> None:
        self._may_fail("end")
        self.kinds = []
        if self._world.hostile is not None:
            self.raw.append(self._world.hostile)

    def finalize(self) -> None:
        assert self._world.owner is self
        self._world.owner, self.kinds = None, []
        self._world.finalized += 1
        self._may_fail("finalize")

    def let_go(self) -> None:
        assert self._world.owner is self
        self._world.owner, self.kinds = None, []
        self._world.let_go += 1

    def push(self, external: int) -> None:
        self._may_fail("push")
        self.stacks.setdefault(get_ident(), []).append(external)

    def pop(self) -> None:
        stack = self.stacks.get(get_ident())
        if stack:
            stack.pop()

    def node_number(self, node: int) -> int:
        self._may_fail("node_number")
        for graph in self._world.graphs.values():
            if node in graph.nodes:
                return graph.in_order().index(node)
        raise CuptiError("no such node")

    def graph_number(self, executable: int) -> int:
        return executable & 0xFFFFFFFF

    def read(self, most: int) -> Records:
        return read_in_python([raw[:160] for raw in self.raw], most)

    def text(self, address: int) -> bytes:
        return self._world.names[address - 1].encode()
