"""The parts of an execution graph: its nodes and edges, and their names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from cbtop.protocol.attributes import FunctionAttributes, KernelAttributes, TransferAttributes
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer. `stack` names its stack (encoder, decoder) if the model has several."""

    index: int
    stack: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """A forward pass, or the mean of many.

    Its name is the phase, such as `decode` or `prefill`. `model` is set if the process runs several models.
    """

    name: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class Brick:
    """A brick. `elements`, `flops` and `moved_bytes` are per call. `duration_ns` is None if it was never timed.

    `calls` is how often it runs in one run of its root node: 1 if it was recorded, and a mean in a graph of many
    runs. `label` is the caller's name for its place in the model.
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
    """A kernel. A launch on a GPU has a grid and a block, a CPU kernel only its backend. See `Brick` for the other
    fields.
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
    """An async task. It runs in parallel with its siblings, and starts where it was recorded.

    Nodes that need its result declare a dependency. It was polled `polls` times, and was not done after `yields` of
    them.
    """

    name: str
    polls: int
    yields: int
    total_poll_ns: float


def is_beside(node: GraphNode) -> bool:
    """Return whether a node runs in parallel with its siblings, as async tasks and copies with a stream do."""
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


# Kinds of edges that follow from nesting and order, so callers cannot add them.
DERIVED_KINDS = frozenset({EdgeKind.CONTAINS, EdgeKind.LAUNCHES, EdgeKind.SEQUENCE})
# Edges of these kinds mean that `destination` starts after the end of `source`.
ORDERING_KINDS = frozenset({EdgeKind.SEQUENCE, EdgeKind.DEPENDS_ON})


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge between two nodes, given by id. The default weight is the number of bytes for a Transfer, and 1 for
    other edges.
    """

    source: int
    destination: int
    kind: EdgeKind
    weight: float = 1.0


def display_name(node: Node) -> str:
    """Return a node's name as it is shown. A phase includes its model: `draft decode`."""
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
        case NodeKind.LAYER:  # a layer's only name is its number
            return f"Layer {name} ({label})" if label else f"Layer {name}"
        case NodeKind.STEP:
            return f"{label} {name}" if label else name
        case _:
            return f"{name} {label}" if label else name


def work_ns(node: GraphNode) -> float | None:
    """Return the time of a node in one run of its root, with the nodes inside it. None if it was not timed."""
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
    """Return `text` with escapes for characters that would move a cursor, break a line or fail to encode."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
