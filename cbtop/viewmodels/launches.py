"""The cost of a brick on a device for its host: its time in a call, and the kernels that a step launches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol.messages import HostTimes, KernelBurst


class Launches(NamedTuple):
    """The same of one brick in all its places; None if it was not measured."""

    host_us: float | None = None  # the host's time in the median call, without the bricks inside it
    kernels: int | None = None  # launches in a step


class LaunchesByNode:
    """The host's times and the kernels of the newest steps in which these were measured."""

    def __init__(self, times: HostTimes | None, burst: KernelBurst | None, nodes: NodeTable) -> None:
        self._times = {one.node: one for one in times.bricks} if times else {}
        self._kernels: dict[int, float] = {}  # by brick: launches in a step
        for kernel in burst.kernels if burst else ():
            if 0 < kernel.node <= len(nodes):
                brick = nodes.parent_of[kernel.node]
                self._kernels[brick] = self._kernels.get(brick, 0.0) + kernel.launches / kernel.steps

    def of(self, nodes: Iterable[int]) -> Launches:
        """Return what the brick with these nodes costs."""
        ids = list(nodes)
        timed = [self._times[node] for node in ids if node in self._times]
        calls = sum(one.calls for one in timed)
        launched = [self._kernels[node] for node in ids if node in self._kernels]
        return Launches(
            sum(one.calls * one.median_ns for one in timed) / calls / 1e3 if calls else None,
            round(sum(launched)) if launched else None,
        )
