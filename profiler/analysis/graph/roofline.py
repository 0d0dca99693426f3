"""Compares the nodes of a graph with a machine's roof: the rate that its peak FLOP/s and bandwidth allow."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.profiler.analysis.graph.nodes import Brick, KernelLaunch
from cbtop.profiler.analysis.graph.recorded_graph import RecordedGraph
from cbtop.profiler.analysis.roofline import distance, intensity


@dataclass(frozen=True, slots=True)
class RooflineDistances:
    """How far nodes are from the roof (the highest rate that the machine allows). 0 is on or above the roof. 0.75 is
    a quarter of the attainable rate.

    `nodes` has the distance of each brick and kernel with known time, FLOP and bytes, by id. `whole` is the distance
    of all counted work together, or None without any.
    """

    nodes: dict[int, float]
    whole: float | None


def roofline_distance(graph: RecordedGraph, tflops: float, gb_per_sec: float) -> RooflineDistances:
    """Return the distances from the roof of a machine with the peaks `tflops` (TFLOP/s) and `gb_per_sec` (GB/s).

    In `whole`, a kernel inside a counted brick counts as a part of the brick. Raises ValueError unless both peaks are
    positive. Source: Williams et al., CACM 52(4), 2009.
    """
    if not (tflops > 0 and gb_per_sec > 0):
        raise ValueError(f"the peaks are {tflops} TFLOP/s and {gb_per_sec} GB/s; both must be positive")
    nodes: dict[int, float] = {}
    counted: set[int] = set()
    flops = moved_bytes = time_ns = 0.0
    for number, node in enumerate(graph.nodes):
        parent = graph.parents[number]
        if parent in counted:
            counted.add(number)  # inside a counted brick, and so a part of the brick's work
        if not isinstance(node, (Brick, KernelLaunch)):
            continue
        found = _distance(node.flops, node.moved_bytes, node.duration_ns, tflops, gb_per_sec)
        if found is None:
            continue
        nodes[number] = found
        if number not in counted:
            counted.add(number)
            flops += (node.flops or 0.0) * node.calls
            moved_bytes += (node.moved_bytes or 0.0) * node.calls
            time_ns += (node.duration_ns or 0.0) * node.calls
    return RooflineDistances(nodes, _distance(flops, moved_bytes, time_ns, tflops, gb_per_sec))


def _distance(
    flops: float | None, moved_bytes: float | None, time_ns: float | None, tflops: float, gb_per_sec: float
) -> float | None:
    flop_per_byte = intensity(flops, moved_bytes)
    if not time_ns or flops is None or flop_per_byte is None:
        return None
    found = distance(flop_per_byte, flops / time_ns, [1000 * tflops], [gb_per_sec])
    return None if found is None else max(0.0, 1 - found.percent_of_roof / 100)
