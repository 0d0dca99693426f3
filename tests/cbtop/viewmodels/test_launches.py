"""Tests of the time that the host needs to launch kernels.

The costs of a brick are added up over all layers.
"""

from __future__ import annotations

import pytest

from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol.kernel_messages import BrickHostTime, HostTimes, KernelBurst, KernelTimes
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import BrickCategory, NodeKind
from cbtop.viewmodels.launches import Launches, LaunchesByNode


def table() -> NodeTable:
    """Return the nodes of a step with two layers. Each layer has a norm with one kernel."""
    nodes = NodeTable()
    nodes.add(Node(1, None, NodeKind.STEP, "decode"))
    for layer in range(2):
        first = 2 + 3 * layer
        nodes.add(Node(first, 1, NodeKind.LAYER, str(layer)))
        nodes.add(Node(first + 1, first, NodeKind.BRICK, "RmsNorm", category=BrickCategory.NORM))
        nodes.add(Node(first + 2, first + 1, NodeKind.KERNEL, "rms"))
    return nodes


def kernel(node: int, launches: int) -> KernelTimes:
    return KernelTimes(node, 2, launches, 1000.0, 0.0, 1000, 1000)


def test_a_brick_has_the_mean_of_its_calls_and_the_launches_of_all_layers() -> None:
    times = HostTimes(5, (BrickHostTime(3, 10, 12_000.0), BrickHostTime(6, 30, 20_000.0)))
    burst = KernelBurst(0, 2, (kernel(4, 2), kernel(7, 4)))
    found = LaunchesByNode(times, burst, table()).of([3, 6])
    assert found.host_us == pytest.approx(18.0)
    assert found.kernels == 3


def test_what_was_not_measured_is_none_and_a_strange_node_is_passed_over() -> None:
    burst = KernelBurst(0, 2, (kernel(-3, 2), kernel(99, 2), kernel(0, 2)))
    times = HostTimes(1, (BrickHostTime(99, 1, 5.0),))
    assert LaunchesByNode(times, burst, table()).of([3, 6]) == Launches(None, None)
    assert LaunchesByNode(None, None, table()).of([3]) == Launches(None, None)
