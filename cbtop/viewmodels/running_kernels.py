"""List the kernels of a process: maker, loader, and the brick that launches each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.protocol.attributes import Grid
from cbtop.protocol.kernel_messages import KernelBurst
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from cbtop.viewmodels.kernel_makers import KernelMaker, maker_of
from cbtop.viewmodels.kernels import path_of


@dataclass(frozen=True, slots=True)
class RunningKernel:
    """A kernel at one place in the steps of a phase.

    `launches` is per step in the last burst. None without a burst.
    """

    phase: str
    layer: str | None  # name of the layer that contains the kernel; None outside of layers
    brick: str
    kernel: str
    maker: KernelMaker
    ptx_hash: int | None
    grid: Grid | None
    block: Grid | None
    launches: float | None


def running_kernels(nodes: Sequence[Node], burst: KernelBurst | None) -> list[RunningKernel]:
    """Return the kernels among `nodes` that bricks in steps launch, in the order of their first launch."""
    times = {one.node: one for one in burst.kernels} if burst else {}
    found = []
    for node in nodes:
        path = path_of(nodes, node.id) if node.kind is NodeKind.KERNEL else []
        if len(path) < 3 or path[0].kind is not NodeKind.STEP:
            continue
        brick, measured = path[-2], times.get(node.id)
        found.append(
            RunningKernel(
                phase=display_name(path[0]),
                layer=next((one.name for one in path if one.kind is NodeKind.LAYER), None),
                brick=f"{brick.name} {brick.label}".strip(),
                kernel=node.name,
                maker=maker_of(node.name, node.kernel, measured),
                ptx_hash=node.kernel.ptx_hash,
                grid=node.kernel.grid,
                block=node.kernel.block,
                launches=None if measured is None else measured.launches / measured.steps,
            )
        )
    return found
