"""A brick's host cost on a device: the host time of a call, and the number of kernels launched in a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol.kernel_messages import HostTimes, KernelBurst


class Launches(NamedTuple):
    """The host cost of a brick on a device, over all layers. None: not measured."""

    host_us: float | None = None  # host time of the median call, without inner bricks
    kernels: int | None = None  # Number of kernels that a step launches in this brick.


class LaunchesByNode:
    """The host time and the launched kernels of each node, from the newest steps that were measured."""

    def __init__(self, times: HostTimes | None, burst: KernelBurst | None, nodes: NodeTable) -> None:
        self._times = {one.node: one for one in times.bricks} if times else {}
        self._kernels: dict[int, float] = {}  # for the node of each brick: number of launches per step
        for kernel in burst.kernels if burst else ():
            if 0 < kernel.node <= len(nodes):
                brick = nodes.parent_of[kernel.node]
                self._kernels[brick] = self._kernels.get(brick, 0.0) + kernel.launches / kernel.steps

    def of(self, nodes: Iterable[int]) -> Launches:
        """Return the host cost of the brick with these nodes."""
        ids = list(nodes)
        timed = [self._times[node] for node in ids if node in self._times]
        calls = sum(one.calls for one in timed)
        launched = [self._kernels[node] for node in ids if node in self._kernels]
        return Launches(
            sum(one.calls * one.median_ns for one in timed) / calls / 1e3 if calls else None,
            round(sum(launched)) if launched else None,
        )
