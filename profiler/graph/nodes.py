"""What an execution graph is made of: its kinds of nodes, its edges, and what any node is called."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from cbtop.protocol.vocabulary import TransferDirection

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Layer:
    index: int


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass, or the mean of many: `decode`, `prefill`."""

    name: str


@dataclass(frozen=True, slots=True)
class Brick:
    """`duration_ns` is None where the brick was never timed; `elements`, `flops` and `moved_bytes` are of one call.

    `calls` is how often it ran in one run of the root it lies under: once when it was recorded there, and where
    the graph is the mean of many runs, what their counts say.
    """

    name: str
    duration_ns: float | None = None
    elements: int | None = None
    flops: float | None = None
    moved_bytes: float | None = None
    calls: float = 1.0


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: a GPU launch has a grid and a block, a CPU kernel only its backend. Amounts are as in Brick."""

    name: str
    grid: Grid | None = None
    block: Grid | None = None
    shared_memory_bytes: int = 0
    backend: str = ""
    ptx_hash: int | None = None
    duration_ns: float | None = None
    flops: float | None = None
    moved_bytes: float | None = None
    calls: float = 1.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy of `size_bytes` bytes between two memories. `duration_ns` and `calls` are as in Brick."""

    source: str
    destination: str
    size_bytes: int
    direction: TransferDirection
    duration_ns: float | None = None
    calls: float = 1.0


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class AsyncTask:
    """Work that runs beside its siblings: it starts where it was recorded, and who needs it says so.

    It was polled `polls` times; `yields` of them found it not done yet.
    """

    name: str
    polls: int
    yields: int
    total_poll_ns: float


GraphNode = Layer | Step | Brick | Kernel | Transfer | Function | AsyncTask


class EdgeKind(StrEnum):
    """How two nodes are connected."""

    CALLS = "Calls"
    CONTAINS = "Contains"
    LAUNCHES = "Launches"
    SEQUENCE = "Sequence"
    DEPENDS_ON = "DependsOn"
    TRANSFER = "Transfer"


# These follow from who lies inside whom and in which order; nobody adds them.
DERIVED_KINDS = frozenset({EdgeKind.CONTAINS, EdgeKind.LAUNCHES, EdgeKind.SEQUENCE})
# `destination` starts after `source` has ended.
ORDERING_KINDS = frozenset({EdgeKind.SEQUENCE, EdgeKind.DEPENDS_ON})


@dataclass(frozen=True, slots=True)
class Edge:
    """From one node's id to another's. The weight of a Transfer edge is its bytes, of any other 1 unless set."""

    source: int
    destination: int
    kind: EdgeKind
    weight: float = 1.0


def name_of(node: GraphNode) -> str:
    """What a node is called. Names repeat: the RmsNorm of every layer is called RmsNorm."""
    match node:
        case Layer():
            return f"Layer {node.index}"
        case Transfer():
            return f"{node.direction}: {node.source} → {node.destination}"
        case Step() | Brick() | Kernel() | Function() | AsyncTask():
            return node.name
        case _:
            assert_never(node)


def work_ns(node: GraphNode) -> float | None:
    """The time a node took in one run of its root, what is inside it included; None where it is not timed."""
    match node:
        case Brick() | Kernel() | Transfer():
            return None if node.duration_ns is None else node.duration_ns * node.calls
        case AsyncTask():
            return node.total_poll_ns
        case Layer() | Step() | Function():
            return None
        case _:
            assert_never(node)


def printable(text: str) -> str:
    """`text` with whatever would move a cursor, break a line or not encode shown as its escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
