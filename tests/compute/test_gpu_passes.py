"""What a recorded pass of a GPU becomes: launches in their bricks, and bricks in their layers."""

from __future__ import annotations

import numpy as np

from cbtop.compute import brick_specs
from cbtop.compute.brick import ComputeBrick
from cbtop.compute.gpu.passes import Launched, PassParts
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
    parts = PassParts(launched)
    stamps = np.array([(0, 5), (10, 20), (30, 35), (40, 90), (100, 150)], np.uint64)
    layer = (NodeKind.LAYER, 0)
    assert [*zip(parts.alike.keys, parts.times(stamps, 1000), parts.elements({}), strict=True)] == [
        ((copy,), (1000, 1005), 1),
        ((layer, norm.definition, kernel("rms_norm")), (1010, 1020), 1),
        ((layer, norm.definition), (1010, 1020), 10),
        ((layer, product.definition, kernel("quantize_rows")), (1030, 1035), 1),
        ((layer, product.definition, kernel("linear_1")), (1040, 1090), 1),
        ((layer, product.definition), (1030, 1090), 20),
        ((layer,), (1010, 1090), 1),
        ((head.definition, kernel("linear_1")), (1100, 1150), 1),
        ((head.definition,), (1100, 1150), 30),
    ]


def test_elements_that_are_given_count_and_not_those_noted_when_a_graph_was_captured() -> None:
    one = brick(brick_specs.ATTENTION)
    parts = PassParts([Launched(one, 3, 7, kernel("attention"))])
    assert parts.elements({one: 99}) == [1, 99, 1]
    assert parts.elements({}) == [1, 7, 1]
