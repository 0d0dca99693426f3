"""Helpers for tests of declared work: the FLOP and bytes of bricks that cbtop derives, and the FLOP that torch
counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cbtop.profiler.instrument import attach
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_AMOUNTS
from cbtop.protocol.vocabulary import NodeKind
from tests.profiler.memory import Memory

import torch  # isort: skip
from torch.nn.attention import SDPBackend, sdpa_kernel  # isort: skip
from torch.utils.flop_counter import FlopCounterMode  # isort: skip


@dataclass
class Brick:
    """The work of all bricks with one name and label. FLOP or bytes are None if unknown in any of the calls."""

    flops: float | None = 0.0
    bytes: float | None = 0.0
    calls: int = 0
    dtypes: set[str] = field(default_factory=set)


def bricks_of(memory: Memory) -> dict[str, Brick]:
    """Add up the recorded bricks by their label, or by their name if they have none."""
    nodes = {node.id: node for node in memory.said if isinstance(node, Node)}
    found: dict[str, Brick] = {}
    for tag, _, _, elements in memory.records:
        node = nodes[tag & 0xFFFFFF]
        if tag & FLAG_AMOUNTS or node.kind is not NodeKind.BRICK:
            continue
        brick = found.setdefault(node.label or node.name, Brick())
        flops, moved = node.work.flops(1, elements), node.work.bytes(1, elements)
        brick.flops = None if flops is None or brick.flops is None else brick.flops + flops
        brick.bytes = None if moved is None or brick.bytes is None else brick.bytes + moved
        brick.calls += 1
        if flops:
            brick.dtypes.add(node.work.dtype)
    return found


def recorded(model: Any, call: Callable[[], object]) -> dict[str, Brick]:
    """Call `call` while cbtop is attached to the model. Returns the work of each brick, by label."""
    memory = Memory()
    attachment = attach(model, BrickProfiler(recorder=memory))
    try:
        with torch.no_grad():
            call()
    finally:
        attachment.detach()
    return bricks_of(memory)


def each_step(model: Any, *steps: Callable[[], object]) -> list[dict[str, Brick]]:
    """Call each of `steps` while cbtop is attached to the model.

    Returns the work of the bricks in each step, by label.
    """
    memory, found = Memory(), []
    attachment = attach(model, BrickProfiler(recorder=memory))
    with torch.no_grad():
        for step in steps:
            before = len(memory.records)
            step()
            part = Memory()
            part.said, part.records = memory.said, memory.records[before:]
            found.append(bricks_of(part))
    attachment.detach()
    return found


def observe(model: Any, call: Callable[[], object], add: Callable[[str, Any, Any, Any], None]) -> None:
    """Call `call`.

    For each module that runs, call `add` with its name, the module, its first argument and its result.
    """

    def hook_of(name: str) -> Callable[[Any, Any, Any], None]:
        return lambda module, given, result: add(name, module, given[0] if given else None, result)

    modules = list(model.named_modules())
    handles = [module.register_forward_hook(hook_of(path.rpartition(".")[2])) for path, module in modules]
    with torch.no_grad():
        call()
    for handle in handles:
        handle.remove()


def counted(model: Any, call: Callable[[], object]) -> dict[str, int]:
    """Call `call` without cbtop. Returns the FLOP of each module as torch counts them, by path of the module."""
    counter = FlopCounterMode(display=False)
    # With other backends, torch does not count all FLOP of attention.
    with torch.no_grad(), counter, sdpa_kernel(SDPBackend.MATH):
        call()
    root = type(model).__name__
    flops = {path: sum(by_operator.values()) for path, by_operator in counter.get_flop_counts().items()}
    return {path.removeprefix(f"{root}."): count for path, count in flops.items()}


def counted_in(counts: dict[str, int], *names: str) -> int:
    """Return the sum of the FLOP of all modules with a path that ends with one of `names`."""
    return sum(count for path, count in counts.items() if path.endswith(tuple(f".{name}" for name in names)))
