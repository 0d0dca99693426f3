"""The parts of an execution graph: kinds of nodes, edges, and the names of nodes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from cbtop.protocol.attributes import FunctionAttributes, KernelAttributes, TransferAttributes
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer. `stack` names the stack of layers (encoder, decoder) in a model that has several."""

    index: int
    stack: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """A step: one forward pass, or the mean of many forward passes.

    Its name is the phase, such as `decode` or `prefill`. `model` is set if a process runs several models.
    """

    name: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class Brick:
    """A brick. `elements`, `flops` and `moved_bytes` are per call. `duration_ns` is None if the brick was never
    timed.

    `calls` is how often the brick runs in one run of its root node. It is 1 for a recorded brick, and a mean in a
    graph of many runs. `label` is the caller's name for the place of this brick in the model.
    """

    name: str
    duration_ns: float | None = None
    elements: int | None = None
    flops: float | None = None
    moved_bytes: float | None = None
    calls: float = 1.0
    label: str = ""


@dataclass(frozen=True, slots=True)
class KernelLaunch(KernelAttributes):
    """A kernel. A GPU launch has a grid and a block. A CPU kernel has only its backend. `Brick` describes `elements`,
    `flops` and `moved_bytes`.
    """

    name: str
    backend: str = ""
    duration_ns: float | None = None
    flops: float | None = None
    moved_bytes: float | None = None
    calls: float = 1.0


@dataclass(frozen=True, slots=True)
class Transfer(TransferAttributes):
    """A copy of `size_bytes` bytes between two memories. `Brick` describes `duration_ns` and `calls`."""

    duration_ns: float | None = None
    calls: float = 1.0


@dataclass(frozen=True, slots=True)
class Function(FunctionAttributes):
    """A function of the host: `Function("forward", file="model.py", line=12)`."""

    name: str


@dataclass(frozen=True, slots=True)
class AsyncTask:
    """An async task, which runs in parallel with its siblings and starts where it was recorded.

    Nodes that need its result declare a dependency. The task was polled `polls` times. After `yields` of these polls,
    the task was not done yet.
    """

    name: str
    polls: int
    yields: int
    total_poll_ns: float


def is_beside(node: GraphNode) -> bool:
    """Return whether a node runs in parallel with its siblings. An async task does, and so does a copy with a
    stream.
    """
    return isinstance(node, AsyncTask) or (isinstance(node, Transfer) and node.stream is not None)


GraphNode = Layer | Step | Brick | KernelLaunch | Transfer | Function | AsyncTask


class EdgeKind(StrEnum):
    """The kind of connection between two nodes."""

    CALLS = "Calls"
    CONTAINS = "Contains"
    LAUNCHES = "Launches"
    SEQUENCE = "Sequence"
    DEPENDS_ON = "DependsOn"
    TRANSFER = "Transfer"


# Callers cannot add edges of these kinds, because such edges follow from the nesting and order of nodes.
DERIVED_KINDS = frozenset({EdgeKind.CONTAINS, EdgeKind.LAUNCHES, EdgeKind.SEQUENCE})
# Kinds of edges that mean that `destination` starts after `source` has ended.
ORDERING_KINDS = frozenset({EdgeKind.SEQUENCE, EdgeKind.DEPENDS_ON})


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge between the ids of two nodes. By default, the weight of a Transfer edge is its number of bytes, and any
    other edge has weight 1.
    """

    source: int
    destination: int
    kind: EdgeKind
    weight: float = 1.0


def display_name(node: Node) -> str:
    """Return a node's name as screens and files show it. A phase includes its model: `draft decode`."""
    return _labelled(node.kind, node.name, node.label)


def name_of(node: GraphNode) -> str:
    """Return a node's name. Names are not unique: the RmsNorm of every layer is called RmsNorm."""
    match node:
        case Layer():
            return _labelled(NodeKind.LAYER, str(node.index), node.stack)
        case Step():
            return _labelled(NodeKind.STEP, node.name, node.model)
        case Brick():
            return _labelled(NodeKind.BRICK, node.name, node.label)
        case Transfer():
            return f"{node.direction}: {node.source} → {node.destination}"
        case KernelLaunch() | Function() | AsyncTask():
            return node.name
        case _:
            assert_never(node)


def _labelled(kind: NodeKind, name: str, label: str) -> str:
    match kind:
        case NodeKind.LAYER:  # a layer has only its number as its name
            return f"Layer {name} ({label})" if label else f"Layer {name}"
        case NodeKind.STEP:
            return f"{label} {name}" if label else name
        case _:
            return f"{name} {label}" if label else name


def work_ns(node: GraphNode) -> float | None:
    """Return the time of a node in one run of its root. The time includes the nodes inside the node. Returns None if
    the node was not timed.
    """
    match node:
        case Brick() | KernelLaunch() | Transfer():
            return None if node.duration_ns is None else node.duration_ns * node.calls
        case AsyncTask():
            return node.total_poll_ns
        case Layer() | Step() | Function():
            return None
        case _:
            assert_never(node)


def printable(text: str) -> str:
    """Return `text` with escapes in place of characters that would move a cursor, break a line or fail to encode."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
