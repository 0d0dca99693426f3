"""What a recorded pass of a GPU becomes: launches in their bricks, and bricks in their layers."""

from __future__ import annotations

from cbtop.compute import brick_specs
from cbtop.compute.brick import ComputeBrick
from cbtop.compute.gpu.passes import Launched, parts_of
from cbtop.profiler.definitions import KernelDefinition
from cbtop.profiler.graph.nodes import Transfer
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.vocabulary import NodeKind, TransferDirection

PROFILER = BrickProfiler(enabled=False)


def brick(spec: brick_specs.BrickSpec) -> ComputeBrick:
    return ComputeBrick(spec, (), "cuda", PROFILER, names_launches=True)


def kernel(name: str) -> KernelDefinition:
    return KernelDefinition(name, "cuda")


def test_a_brick_runs_from_its_first_launch_to_its_last_and_a_layer_from_its_first_brick_to_its_last() -> None:
    norm, product, head = brick(brick_specs.RMS_NORM), brick(brick_specs.QKV_PROJECTION), brick(brick_specs.LM_HEAD)
    copy = Transfer("host", "device", 16, TransferDirection.H2D)
    launched = [
        Launched(None, None, 1, copy),
        Launched(norm, 0, 10, kernel("rms_norm")),
        Launched(product, 0, 20, kernel("quantize_rows")),
        Launched(product, 0, 20, kernel("linear_1")),
        Launched(head, None, 30, kernel("linear_1")),
    ]
    times = [(0, 5), (10, 20), (30, 35), (40, 90), (100, 150)]
    layer = (NodeKind.LAYER, 0)
    assert [*parts_of(launched, times, {})] == [
        ((copy,), 0, 5, 1),
        ((layer, norm.definition, kernel("rms_norm")), 10, 20, 1),
        ((layer, norm.definition), 10, 20, 10),
        ((layer, product.definition, kernel("quantize_rows")), 30, 35, 1),
        ((layer, product.definition, kernel("linear_1")), 40, 90, 1),
        ((layer, product.definition), 30, 90, 20),
        ((layer,), 10, 90, 1),
        ((head.definition, kernel("linear_1")), 100, 150, 1),
        ((head.definition,), 100, 150, 30),
    ]


def test_elements_that_are_given_count_and_not_those_noted_when_a_graph_was_captured() -> None:
    one = brick(brick_specs.ATTENTION)
    parts = [*parts_of([Launched(one, 3, 7, kernel("attention"))], [(1, 2)], {one: 99})]
    assert parts[1] == (((NodeKind.LAYER, 3), one.definition), 1, 2, 99)
