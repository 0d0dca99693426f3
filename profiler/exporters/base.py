"""What every exporter is given: the timed records of one process and the nodes they name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TextIO

from cbtop.profiler.graph.node_table import NodeTable
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind


@dataclass(frozen=True, slots=True)
class TimedRecord:
    """One run of a node, on the monotonic clock. Which thread ran it is not recorded."""

    node: int
    start_ns: int
    end_ns: int
    elements: int
    failed: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """The records of one process, in the order they ended; every one names a node of `nodes` and runs forward.

    `records` can be walked more than once. `overwritten` and `rejected` are those that were written and are not
    among them: lost in the ring before they were read, or naming no node, or running backwards.
    """

    process: str
    pid: int
    nodes: NodeTable
    records: Iterable[TimedRecord]
    overwritten: int = 0
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class Exporter:
    """A format: what its files end in, and the function that writes one."""

    suffix: str
    write: Callable[[Trace, TextIO], None]


def display_name(node: Node) -> str:
    """What a node is called where nothing else says what it is: a layer's own name is only its number."""
    return f"Layer {node.name}" if node.kind is NodeKind.LAYER else node.name


def kind_name(node: Node) -> str:
    """`brick`, `layer`, `async_task`."""
    return node.kind.name.lower()
