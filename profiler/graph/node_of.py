"""The nodes that stand for what was started or recorded: what a key of the hot path is announced as."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cbtop.profiler.definitions import BrickDefinition, KernelDefinition
from cbtop.profiler.graph.nodes import AsyncTask, Function, Transfer
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import BrickCategory, BrickId, NodeKind


def nodes_of(key: object, first_id: int, parent: int | None, inside: object) -> list[Node]:
    """The node of `key` inside `parent`, followed by those of its kernels; `inside` is the key of the parent."""
    match key:
        case (NodeKind.LAYER, index):
            return [Node(first_id, parent, NodeKind.LAYER, str(index))]
        case (NodeKind.STEP, name):
            return [Node(first_id, parent, NodeKind.STEP, str(name))]
        case Function():
            return [Node(first_id, parent, NodeKind.FUNCTION, key.name, file=key.file or "", line=key.line)]
        case AsyncTask():
            return [Node(first_id, parent, NodeKind.ASYNC_TASK, key.name)]
        case Transfer():
            return [_transfer_node(key, first_id, parent)]
        case KernelDefinition():
            return [_kernel_node(key, first_id, parent, _definition(inside).category)]
        case _:
            return _brick_nodes(_definition(key), first_id, parent)


def _definition(key: object) -> BrickDefinition:
    match key:
        case BrickDefinition():
            return key
        case BrickId():
            return BrickDefinition.of(key)
        case _:
            return BrickDefinition(str(key), BrickCategory.OTHER)


def _brick_nodes(definition: BrickDefinition, first_id: int, parent: int | None) -> list[Node]:
    # An unknown amount of work leaves the fields None.
    work: dict[str, Any] = asdict(definition.work) if definition.work else {}
    work.pop("of_call", None)
    brick = Node(
        first_id,
        parent,
        NodeKind.BRICK,
        definition.name,
        category=definition.category,
        brick=definition.brick,
        backend=definition.backend,
        budget_us_per_token=definition.budget_us_per_token,
        **work,
    )
    kernels = enumerate(definition.kernels, start=first_id + 1)
    return [brick, *(_kernel_node(kernel, at, first_id, definition.category) for at, kernel in kernels)]


def _kernel_node(kernel: KernelDefinition, at: int, parent: int | None, category: BrickCategory) -> Node:
    return Node(
        at,
        parent,
        NodeKind.KERNEL,
        kernel.name,
        category=category,
        backend=kernel.backend,
        grid=kernel.grid,
        block=kernel.block,
        shared_memory_bytes=kernel.shared_memory_bytes,
        ptx_hash=kernel.ptx_hash,
    )


def _transfer_node(transfer: Transfer, at: int, parent: int | None) -> Node:
    return Node(
        at,
        parent,
        NodeKind.TRANSFER,
        f"{transfer.source} → {transfer.destination}",
        source=transfer.source,
        destination=transfer.destination,
        direction=transfer.direction,
        size_bytes=transfer.size_bytes,
    )
