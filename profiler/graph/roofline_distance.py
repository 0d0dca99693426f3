"""How far each kernel and brick of an execution graph is from the roof above it."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.profiler.graph.execution_graph import ExecutionGraph
from cbtop.profiler.graph.nodes import Brick, Kernel
from cbtop.profiler.roofline import Distance, distance, intensity


@dataclass(frozen=True, slots=True)
class NodeDistance:
    """A kernel or brick under the roof. What cannot be known of it is None: shown as n/a, never guessed.

    `distance` is None without intensity, time or ceilings; a point above its roof says so (`above_roof`).
    """

    node: int
    name: str
    flop_per_byte: float | None
    gflops: float | None
    distance: Distance | None


def roofline_distance(
    graph: ExecutionGraph, peak_gflops: float | None, peak_gb_per_sec: float | None
) -> list[NodeDistance]:
    """Every kernel and brick against the given ceilings, in the order they were added."""
    return [
        _node_distance(found, node, peak_gflops, peak_gb_per_sec)
        for found, node in enumerate(graph.nodes)
        if isinstance(node, Brick | Kernel)
    ]


def _node_distance(
    found: int, node: Brick | Kernel, peak_gflops: float | None, peak_gb_per_sec: float | None
) -> NodeDistance:
    flop_per_byte = intensity(node.flops, node.moved_bytes)
    gflops = node.flops / node.duration_ns if node.flops and node.duration_ns else None  # FLOP a ns
    if not flop_per_byte or gflops is None:  # 0 where the quotient was too small for a float
        return NodeDistance(found, node.name, flop_per_byte, gflops, None)
    roof = distance(flop_per_byte, gflops, peak_gflops, peak_gb_per_sec)
    return NodeDistance(found, node.name, flop_per_byte, gflops, roof)
