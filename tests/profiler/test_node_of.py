"""Tests of how the key of a brick becomes its node.

The static data of the node, such as its work, is in every output.
"""

from __future__ import annotations

import dataclasses
import json

import pytest

from cbtop.profiler.analysis.budget import ByteBudget, TokenBudget
from cbtop.profiler.analysis.graph.from_nodes import graph_of_nodes
from cbtop.profiler.analysis.graph.json_text import to_json
from cbtop.profiler.analysis.graph.nodes import Function, Transfer, display_name, name_of
from cbtop.profiler.definitions import BrickDefinition, KernelDefinition
from cbtop.profiler.node_of import nodes_of
from cbtop.protocol import codec
from cbtop.protocol.attributes import KernelAttributes
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import BrickId, NodeKind, TransferDirection


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ((NodeKind.LAYER, 3), "Layer 3"),
        ((NodeKind.LAYER, 3, "encoder"), "Layer 3 (encoder)"),
        ((NodeKind.STEP, "decode"), "decode"),
        ((NodeKind.STEP, "decode", "draft"), "draft decode"),
        (BrickId.RMS_NORM, "RmsNorm"),
        ("MoeRouter", "MoeRouter"),
        (BrickDefinition.of(BrickId.QKV_PROJECTION, label="q_proj"), "QkvProjection q_proj"),
        (Function("forward", file="model.py", line=12), "forward"),
    ],
)
def test_a_place_is_called_the_same_in_the_table_and_in_the_graph(key: object, shown: str) -> None:
    (node,) = nodes_of(key, 1, None, None)
    graph, _ = graph_of_nodes([node], {1: 0}, {1: 0}, {1: 0})
    assert display_name(node) == name_of(graph.nodes[0]) == shown
    assert codec.decode(codec.encode(node)) == node


def test_what_a_transfer_is_comes_back_from_its_node() -> None:
    transfer = Transfer("host", "gpu0", 4096, TransferDirection.H2D)
    graph, _ = graph_of_nodes(nodes_of(transfer, 1, None, None), {1: 0}, {1: 0}, {1: 0})
    assert graph.nodes == [transfer]


def test_a_budget_is_a_time_a_token_or_a_rate() -> None:
    nodes = [
        nodes_of(BrickDefinition.of(BrickId.RMS_NORM, budget=budget), 1, None, None)[0]
        for budget in (TokenBudget(12.5), ByteBudget(20), None)
    ]
    budgets = [(node.budget_us_per_token, node.budget_gb_per_sec) for node in nodes]
    assert budgets == [(12.5, None), (None, 20.0), (None, None)]


SAMPLES = {"grid": (32, 1, 1), "block": (256, 1, 1)}


def test_every_kernel_attribute_reaches_the_graph_and_its_json_over_the_wire() -> None:
    attributes = {f.name: SAMPLES.get(f.name, 7) for f in dataclasses.fields(KernelAttributes)}
    brick = BrickDefinition.of(
        BrickId.QKV_PROJECTION,
        kernels=(KernelDefinition("gemv", "cuda", **attributes),),  # type: ignore[arg-type]
    )
    received = [codec.decode(codec.encode(node)) for node in nodes_of(brick, 1, None, None)]
    nodes = [node for node in received if isinstance(node, Node)]
    graph, _ = graph_of_nodes(nodes, {1: 0, 2: 0}, {1: 0, 2: 0}, {1: 0, 2: 0})
    kernel = json.loads(to_json(graph))["nodes"][1]
    assert {name: kernel[name] for name in attributes} == json.loads(json.dumps(attributes))
