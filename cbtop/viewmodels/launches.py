"""What a brick on a device costs the host: the host's time in a call, and the kernels launched in a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol.messages import HostTimes, KernelBurst


class Launches(NamedTuple):
    """What one brick costs the host, over all its places. None means not measured."""

    host_us: float | None = None  # The host's time in a median call, without the time of bricks inside.
    kernels: int | None = None  # Number of kernel launches in a step.


class LaunchesByNode:
    """The host's times and launched kernels of each node, from the newest steps with such measurements."""

    def __init__(self, times: HostTimes | None, burst: KernelBurst | None, nodes: NodeTable) -> None:
        self._times = {one.node: one for one in times.bricks} if times else {}
        self._kernels: dict[int, float] = {}  # Launches in a step, by brick node.
        for kernel in burst.kernels if burst else ():
            if 0 < kernel.node <= len(nodes):
                brick = nodes.parent_of[kernel.node]
                self._kernels[brick] = self._kernels.get(brick, 0.0) + kernel.launches / kernel.steps

    def of(self, nodes: Iterable[int]) -> Launches:
        """Return what the brick with these nodes costs its host."""
        ids = list(nodes)
        timed = [self._times[node] for node in ids if node in self._times]
        calls = sum(one.calls for one in timed)
        launched = [self._kernels[node] for node in ids if node in self._kernels]
        return Launches(
            sum(one.calls * one.median_ns for one in timed) / calls / 1e3 if calls else None,
            round(sum(launched)) if launched else None,
        )
