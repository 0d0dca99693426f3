"""Makes graph nodes from the keys of the hot path, to announce them to the daemon."""

from __future__ import annotations

from typing import TypeVar

from cbtop.profiler.analysis.budget import ByteBudget, TokenBudget
from cbtop.profiler.analysis.graph.nodes import AsyncTask, Function, Transfer
from cbtop.profiler.definitions import BrickDefinition, KernelDefinition, own_operations
from cbtop.protocol.attributes import (
    NO_KERNEL,
    UNKNOWN_WORK,
    FunctionAttributes,
    KernelAttributes,
    TransferAttributes,
    Work,
    carried,
)
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import BrickCategory, BrickId, NodeKind

Attributes = TypeVar("Attributes")


def nodes_of(key: object, first_id: int, parent: int | None, inside: object) -> list[Node]:
    """Return the node of `key`, followed by the nodes of its kernels. `inside` is the key of its parent.

    Keys: a layer is (NodeKind.LAYER, index[, stack name]), a step is (NodeKind.STEP, name[, model name]), and adopted
    work is (NodeKind.ADOPTED, name).
    """
    match key:
        case (NodeKind() as kind, name):
            return [Node(first_id, parent, kind, str(name), own=_own_name(key))]
        case (NodeKind() as kind, name, label):
            return [Node(first_id, parent, kind, str(name), str(label), own=_own_name(key))]
        case Function():
            return [Node(first_id, parent, NodeKind.FUNCTION, key.name, function=_only(FunctionAttributes, key))]
        case AsyncTask():
            return [Node(first_id, parent, NodeKind.ASYNC_TASK, key.name)]
        case Transfer():
            name = f"{key.source} → {key.destination}"
            return [Node(first_id, parent, NodeKind.TRANSFER, name, transfer=_only(TransferAttributes, key))]
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


def _own_name(key: object) -> str:
    own = own_operations(key)
    return "" if own is None or own.on_device else own.name


def _brick_nodes(definition: BrickDefinition, first_id: int, parent: int | None) -> list[Node]:
    budget = definition.budget
    brick = Node(
        first_id,
        parent,
        NodeKind.BRICK,
        definition.name,
        definition.label,
        category=definition.category,
        brick=definition.brick,
        backend=definition.backend,
        budget_us_per_token=budget.us_per_token if isinstance(budget, TokenBudget) else None,
        budget_gb_per_sec=budget.gb_per_sec if isinstance(budget, ByteBudget) else None,
        work=definition.work if isinstance(definition.work, Work) else UNKNOWN_WORK,
        own=_own_name(definition),
        module=definition.module,
    )
    kernels = enumerate(definition.kernels, start=first_id + 1)
    return [brick, *(_kernel_node(kernel, at, first_id, definition.category) for at, kernel in kernels)]


def _kernel_node(kernel: KernelDefinition, at: int, parent: int | None, category: BrickCategory) -> Node:
    launch = carried(KernelAttributes, kernel)
    is_known = any([value is not None for value in launch.values()])  # a kernel on a CPU has no launch attributes
    return Node(
        at,
        parent,
        NodeKind.KERNEL,
        kernel.name,
        category=category,
        backend=kernel.backend,
        kernel=KernelAttributes(**launch) if is_known else NO_KERNEL,
    )


def _only(kind: type[Attributes], holder: Attributes) -> Attributes:
    """Return an object of the class `kind`, with the attributes that this class declares, copied from `holder`.

    Attributes of a subclass are dropped, so that nodes with equal work are equal.
    """
    return kind(**carried(kind, holder))
